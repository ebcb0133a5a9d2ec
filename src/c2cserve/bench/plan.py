"""The requests of a benchmark: tokens, model and time of each. Deterministic by seed."""

import csv
import gzip
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO, cast

from c2cserve.terminal.output import CliError


@dataclass(frozen=True, slots=True)
class Shape:
    """One request before it has a body."""

    model: str
    input_tokens: int
    output_tokens: int
    due_s: float = 0.0


Lengths = Callable[[random.Random], int]


def parse_lengths(text: str) -> Lengths:
    """Parse a distribution of lengths. Raises `CliError`.

    `128` is fixed, `64-512` uniform, `exp:128` exponential by mean, and `lognormal:120:0.8` has a
    median and a sigma."""
    kind, _, rest = text.partition(":")
    try:
        if kind == "exp":
            mean = float(rest)
            return lambda rng: max(1, round(rng.expovariate(1 / mean)))
        if kind == "lognormal":
            median, sigma = (float(part) for part in rest.split(":"))
            return lambda rng: max(1, round(rng.lognormvariate(math.log(median), sigma)))
        low, _, high = text.partition("-")
        first, last = int(low), int(high or low)
    except (ValueError, ZeroDivisionError) as error:
        raise CliError(
            f"{text!r} is not a length: use 128, 64-512, exp:128 or lognormal:120:0.8", 2
        ) from error
    if not 1 <= first <= last:
        raise CliError(f"{text!r} is not a length: it must be at least 1 and not descend", 2)
    return lambda rng: rng.randint(first, last)


def parse_popularity(text: str, models: Sequence[str]) -> list[float]:
    """Return the weights of the models, by `uniform`, or by `zipf:S` with exponent S."""
    kind, _, exponent = text.partition(":")
    if kind == "uniform" and not exponent:
        return [1.0] * len(models)
    try:
        if kind == "zipf":
            return [rank ** -float(exponent or 1) for rank in range(1, len(models) + 1)]
    except ValueError:
        pass
    raise CliError(f"{text!r} is not a popularity: use uniform or zipf:1.0", 2)


@dataclass(frozen=True, slots=True)
class Caps:
    """Upper bounds of lengths, for models whose context is shorter than a trace's requests."""

    input_tokens: int | None = None
    output_tokens: int | None = None

    def apply(self, inputs: int, outputs: int) -> tuple[int, int]:
        inputs = max(1, inputs if self.input_tokens is None else min(inputs, self.input_tokens))
        if self.output_tokens is not None:
            outputs = min(outputs, self.output_tokens)
        return inputs, max(1, outputs)


Pairs = Callable[[random.Random], tuple[int, int]]
"""Samples one request's (input, output) tokens."""


def sampled_lengths(inputs: Lengths, outputs: Lengths) -> Pairs:
    return lambda rng: (inputs(rng), outputs(rng))


def dataset_lengths(path: Path, where: Mapping[str, str]) -> Pairs:
    """Sample rows of a CSV with `input_tokens` and `output_tokens`, with replacement."""
    pairs = [
        (_count(path, row, "input_tokens"), _count(path, row, "output_tokens"))
        for row in _rows(path, where)
    ]
    return lambda rng: rng.choice(pairs)


def closed_loop(
    models: Sequence[str], weights: Sequence[float], requests: int, pairs: Pairs, rng: random.Random
) -> list[Shape]:
    chosen = rng.choices(models, weights, k=requests)
    return [Shape(model, *pairs(rng)) for model in chosen]


def poisson(
    models: Sequence[str],
    weights: Sequence[float],
    rate_per_s: float,
    requests: int | None,
    duration_s: float | None,
    pairs: Pairs,
    rng: random.Random,
) -> list[Shape]:
    """Plan memoryless arrivals, up to a count or a duration, whichever comes first."""
    shapes: list[Shape] = []
    due_s = 0.0
    while requests is None or len(shapes) < requests:
        due_s += rng.expovariate(rate_per_s)
        if duration_s is not None and due_s > duration_s:
            break
        (model,) = rng.choices(models, weights)
        shapes.append(Shape(model, *pairs(rng), due_s))
    return shapes


@dataclass(frozen=True, slots=True)
class TraceOptions:
    path: Path
    where: Mapping[str, str]
    compress: float = 1.0
    """Factor by which time runs faster than recorded."""
    requests: int | None = None
    duration_s: float | None = None
    """Duration in compressed time."""


def trace(
    options: TraceOptions, models: Sequence[str], pairs: Pairs, rng: random.Random
) -> list[Shape]:
    """Plan the arrivals of a CSV with `t_s` (or `t_ms`), and optionally `func` or `model`.

    Lengths come from `input_tokens` and `output_tokens`, or are sampled without them. The recorded
    models are mapped to `models` by falling popularity, round robin. Without such a column models
    are sampled evenly.
    """
    rows = sorted(((_time_s(options.path, row), row) for row in _trace_rows(options)), key=_first)
    recorded = [row.get("func") or row.get("model") or "" for _, row in rows]
    by_popularity = [name for name, _ in Counter(recorded).most_common()]
    mapped = {name: models[rank % len(models)] for rank, name in enumerate(by_popularity)}
    origin_s = rows[0][0]
    shapes: list[Shape] = []
    for (time_s, row), name in zip(rows, recorded, strict=True):
        due_s = (time_s - origin_s) / options.compress
        past_end = options.duration_s is not None and due_s > options.duration_s
        if past_end or (options.requests is not None and len(shapes) >= options.requests):
            break
        lengths = (
            (_count(options.path, row, "input_tokens"), _count(options.path, row, "output_tokens"))
            if row.get("input_tokens") and row.get("output_tokens")
            else pairs(rng)
        )
        model = mapped[name] if name else rng.choice(models)
        shapes.append(Shape(model, *lengths, due_s))
    return shapes


def _first(pair: tuple[float, object]) -> float:
    return pair[0]


def _trace_rows(options: TraceOptions) -> list[dict[str, str]]:
    rows = list(_rows(options.path, options.where))
    if "t_s" not in rows[0] and "t_ms" not in rows[0]:
        raise CliError(f"{options.path}: a trace needs a column t_s (or t_ms)")
    return rows


def _time_s(path: Path, row: Mapping[str, str]) -> float:
    try:
        return float(row["t_s"]) if "t_s" in row else float(row["t_ms"]) / 1e3
    except ValueError as error:
        raise CliError(f"{path}: not a time: {error}") from error


def _count(path: Path, row: Mapping[str, str], column: str) -> int:
    try:
        return max(1, round(float(row[column])))
    except KeyError as error:
        raise CliError(f"{path}: no column {column}") from error
    except ValueError as error:
        raise CliError(f"{path}: {column} = {row[column]!r} is not a number") from error


def _rows(path: Path, where: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Yield rows whose columns equal `where`'s. Raises `CliError` for no file, column or row."""
    try:
        with _open(path) as file:
            reader = csv.DictReader(file)
            columns = list(reader.fieldnames or [])
            if unknown := [name for name in where if name not in columns]:
                raise CliError(f"{path}: no column {unknown[0]!r}: it has {', '.join(columns)}", 2)
            rows = [row for row in reader if all(row[k] == v for k, v in where.items())]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise CliError(f"{path}: cannot be read: {error}") from error
    if not rows:
        raise CliError(f"{path}: no rows" + (f" with {dict(where)}" if where else ""))
    yield from rows


def _open(path: Path) -> TextIO:
    if path.suffix == ".gz":
        return cast("TextIO", gzip.open(path, "rt", newline=""))
    return path.open(newline="")
