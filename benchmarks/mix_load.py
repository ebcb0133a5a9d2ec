"""The load of `weights_mix.py`: its cells, the requests of a seed, and the figures of answers.

Both worlds, the live server and the simulation, get the requests of `requests` and give `Answer`s.
"""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, floor, inf, sqrt
from statistics import median
from typing import Any, Literal

from catalogue_files import Pick, pick

from c2cserve.bench.plan import Caps, Shape, parse_lengths, parse_popularity, poisson
from c2cserve.bench.report import percentile
from c2cserve.core.request import Slo

SLO = Slo(1.0, 0.1)
_UNBOUNDED = 1 << 60
_WARM_GAP_S = 2.0
_SHOWN_ERRORS = 3

Ending = Literal["answered", "refused", "unanswered", "failed"]


@dataclass(frozen=True, slots=True)
class Mix:
    """A catalogue and the lengths of its requests."""

    shapes: tuple[tuple[str, int], ...]
    """Shape -> how many models."""
    cells: str
    """The default of `--cells`."""
    prompt: str
    output: str
    """Distributions, as `c2cserve.bench.plan.parse_lengths` reads them."""
    prompt_range: tuple[int, int]
    output_range: tuple[int, int]
    prompts: tuple[int, ...]
    """Prompt lengths whose times are measured."""
    batches: tuple[int, ...]
    """Batches of decodes whose times are measured."""
    contexts: tuple[int, ...]
    """Prompt lengths of these decodes."""

    def pick(self) -> Pick:
        return pick(sum(count for _, count in self.shapes), _UNBOUNDED, 1, self.shapes)


FULL = Mix(
    shapes=(("llama-3b", 5), ("llama-8b", 3)),
    cells="all:2,all:4,all:8,70:2,70:4,70:8,30:2,30:4,30+90:2,30+90:4,30+90:8",
    prompt="lognormal:512:0.8", output="exp:64", prompt_range=(16, 4096), output_range=(8, 400),
    prompts=(16, 64, 128, 256, 512, 1024, 2048, 4096), batches=(1, 2, 4, 8, 16, 32),
    contexts=(16, 1024),
)  # fmt: skip
TINY = Mix(
    shapes=(("tiny-llama", 5), ("tiny-tied", 3)),
    cells="0.05:4",
    prompt="lognormal:24:0.8", output="exp:12", prompt_range=(4, 96), output_range=(2, 48),
    prompts=(4, 16, 48, 96), batches=(1, 2, 4), contexts=(8,),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Arena:
    """The memory of a cell's slice. One server serves all cells of an arena."""

    text: str
    """As it was asked for: "all", "70", "30+90"."""
    bytes: int | None
    """None: what the server takes when it is not told."""
    lent_bytes: int = 0
    """What a second GPU lends."""


@dataclass(frozen=True, slots=True)
class Cell:
    arena: Arena
    rate: float
    """Requests per second."""

    @property
    def text(self) -> str:
        return f"{self.arena.text}:{self.rate:g}"


def parse_cells(text: str) -> list[Cell]:
    """Parse `ARENA:RATE,...`, where ARENA is GB, `GB+LENT` or `all`. Raises ValueError."""
    return [_cell(one) for one in text.split(",")]


def _cell(text: str) -> Cell:
    try:
        size, rate = text.split(":")
        own, plus, lent = size.partition("+")
        own_bytes = None if own == "all" else round(_positive(own) * 1e9)
        lent_bytes = round(_positive(lent) * 1e9) if plus else 0
        return Cell(Arena(size, own_bytes, lent_bytes), _positive(rate))
    except ValueError:
        raise ValueError(f"{text!r} is not a cell: use GB:RATE, GB+LENT:RATE or all:RATE") from None


def _positive(text: str) -> float:
    number = float(text)
    if not 0.0 < number < inf:
        raise ValueError(f"{text} is not a number greater than 0")
    return number


def popularity(models: int) -> list[float]:
    """Return the weights of models by rank, Zipf's law with exponent 1."""
    return parse_popularity("zipf:1", [""] * models)


def requests(mix: Mix, models: Sequence[str], rate: float, count: int, seed: int) -> list[Shape]:
    """Return `count` requests with Poisson arrivals. The first model is the most popular one.

    One seed gives the same models and lengths at every rate."""
    inputs, outputs = parse_lengths(mix.prompt), parse_lengths(mix.output)
    (few, many), (short, long) = mix.prompt_range, mix.output_range
    caps = Caps(many, long)

    def lengths(rng: random.Random) -> tuple[int, int]:
        return caps.apply(max(few, inputs(rng)), max(short, outputs(rng)))

    weights = popularity(len(models))
    return poisson(models, weights, rate, count, None, lengths, random.Random(seed))


def warm_up(mix: Mix, models: Sequence[str]) -> list[Shape]:
    """Return one short request for each model, which both worlds answer before what counts."""
    prompt, output = mix.prompt_range[0], mix.output_range[0]
    return [Shape(name, prompt, output, i * _WARM_GAP_S) for i, name in enumerate(models)]


def warm_up_s(models: Sequence[str]) -> float:
    """Return the time that a simulation leaves to `warm_up`."""
    return (len(models) + 2) * _WARM_GAP_S


# ---- answers ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of one request, in either world."""

    model: str
    ending: Ending
    ttft_s: float | None = None
    """None: no token came."""
    tpot_s: float | None = None
    """Mean time per token after the first; None: the answer is not whole, or has one token."""
    why: str = ""

    @property
    def in_time(self) -> bool:
        if self.ending != "answered" or self.ttft_s is None:
            return False
        return self.ttft_s <= SLO.ttft_s and (self.tpot_s or 0.0) <= SLO.tpot_s


Figures = dict[str, Any]


def figures(answers: Sequence[Answer], load_s: float = inf) -> Figures:
    """Return the figures of all answers, and of each model's under `models`.

    First tokens are of two kinds where models are loaded: few take a time between a prompt's and a
    load's. A median of all is of the kind that has a bit more than half. So there are medians
    `sooner` and `later` than `load_s`, the time of the smallest model's load, too."""
    by_model: dict[str, list[Answer]] = {}
    for answer in answers:
        by_model.setdefault(answer.model, []).append(answer)
    models = {name: _figures(own) for name, own in sorted(by_model.items())}
    errors = sorted({answer.why for answer in answers if answer.ending == "failed"})
    first_s = sorted(one.ttft_s for one in answers if one.ttft_s is not None)
    sooner = [took_s for took_s in first_s if took_s < load_s]
    token_s = sorted(one.tpot_s for one in answers if one.tpot_s is not None)
    return {
        **_figures(answers), "errors": errors[:_SHOWN_ERRORS], "models": models,
        "sooner": len(sooner), **_interval("ttft", first_s),
        "ttft_sooner_p50_s": median(sooner) if sooner else None,
        "ttft_later_p50_s": median(first_s[len(sooner) :]) if sooner != first_s else None,
        **_interval("tpot", token_s),
        "first_s": [one.ttft_s for one in answers], "token_s": [one.tpot_s for one in answers],
    }  # fmt: skip


def paired(live: Figures, simulated: Figures) -> dict[str, float | None]:
    """Return the median ratio, simulated over live, of each request's time.

    It is near one only if the same requests are quick in both worlds. Two medians can be near each
    other by chance, or far apart where half of the requests wait for a load and half do not. None:
    a world has no times of single requests."""
    found: dict[str, float | None] = {}
    for name, of in (("ttft", "first_s"), ("tpot", "token_s")):
        both = zip(live.get(of, ()), simulated.get(of, ()), strict=False)
        ratios = [after / before for before, after in both if before and after]
        found[f"{name}_ratio"] = median(ratios) if ratios else None
    return found


def _interval(name: str, rising: Sequence[float]) -> dict[str, float | None]:
    low_s, high_s = median_interval(rising) or (None, None)
    return {f"{name}_p50_low_s": low_s, f"{name}_p50_high_s": high_s}


def median_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Return between which of the rising values the median of many more lies, with 95 %
    confidence, by the binomial distribution. None: there are too few."""
    count = len(values)
    below = 1.96 * sqrt(count) / 2
    low, high = floor(count / 2 - below), ceil(count / 2 + below)
    return (values[low], values[high]) if low >= 0 and high < count else None


def _figures(answers: Sequence[Answer]) -> Figures:
    """A request without an answer in time is missed, whatever the reason is."""
    endings = [answer.ending for answer in answers]
    return {
        "requests": len(answers),
        "in_time": sum(answer.in_time for answer in answers) / max(1, len(answers)),
        **{name: endings.count(name) for name in ("answered", "refused", "unanswered", "failed")},
        **_quantiles("ttft", (answer.ttft_s for answer in answers)),
        **_quantiles("tpot", (answer.tpot_s for answer in answers)),
    }


def _quantiles(name: str, values: Iterable[float | None]) -> dict[str, float | None]:
    known = sorted(value for value in values if value is not None)
    return {
        f"{name}_p50_s": median(known) if known else None,
        f"{name}_p99_s": percentile(known, 0.99) if known else None,
    }
