"""Makes the requests of a simulation from a trace: when, to which model, how long."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from random import Random

from c2cserve.core.request import BLOCK_TOKENS
from c2cserve.sim.workload.catalogue import check_lengths, find_lengths, find_path, find_rows
from c2cserve.sim.workload.rates import has_rates, sample_requests
from c2cserve.sim.workload.rows import Row
from c2cserve.sim.workload.synthetic import synthetic
from c2cserve.sim.world.requests import SimRequest
from c2cserve.sim.world.shapes import SimModel

_SHARED_SEED = 1 << 62
_RATES_S = 3600.0
"""Default duration for a trace of rates. Some are two weeks long."""


@dataclass(frozen=True, slots=True)
class WorkloadSettings:
    trace: str
    """A packaged trace, a file, or `synthetic:...` (`workload.synthetic`)."""
    seed: int = 0
    time_scale: float = 1.0
    """How many times faster the trace runs."""
    start_s: float = 0.0
    duration_s: float = float("inf")
    """Duration in the trace's own time; infinite: all of it (an hour of a trace of rates)."""
    rate_scale: float = 1.0
    """Factor on the rates of a trace of rates or a synthetic one; of a trace of requests, a random
    share of them."""
    limit: int | None = None
    """The most requests, or None."""
    lengths: str = "azure-conv"
    """Lengths for traces without them."""
    mapping: str = "order"
    """How sources become models: `order` (by their numbers), `shuffle` (at random); requests of
    traces without sources are spread by `zipf`."""
    zipf: float = 1.0
    """Exponent of the popularity of models where the trace has no sources."""
    where: Mapping[str, str] = field(default_factory=dict[str, str])


def workload(settings: WorkloadSettings, models: Sequence[SimModel]) -> list[SimRequest]:
    """Return the requests, by arrival. Raises OSError, `rows.TraceError`, ValueError."""
    rows = _chosen(settings)
    names = _model_names(rows, settings, [model.spec.id for model in models])
    return _requests(rows, names, settings)


def by_source(settings: WorkloadSettings) -> dict[str, list[SimRequest]]:
    """Return the requests of each source of the trace, with the source in place of a model.

    Sources are in the order of `settings.mapping`. A trace that names none has one source, "".
    Raises as `workload`."""
    rows = _chosen(settings)
    found: dict[str, list[SimRequest]] = {source: [] for source in _sources(rows, settings)}
    for request in _requests(rows, [row.source for row in rows], settings):
        found[request.model].append(request)
    return found


def _chosen(settings: WorkloadSettings) -> list[Row]:
    check_lengths(settings.lengths)
    end_s = settings.start_s + settings.duration_s
    rows = [row for row in _rows(settings) if settings.start_s <= row.t_s < end_s]
    return rows[: settings.limit]


def _requests(
    rows: Sequence[Row], names: Sequence[str], settings: WorkloadSettings
) -> list[SimRequest]:
    lengths = None
    random = Random(f"{settings.seed}/lengths")
    requests: list[SimRequest] = []
    for number, (row, name) in enumerate(zip(rows, names, strict=True)):
        prompt, output = row.prompt, row.output
        if not prompt:
            lengths = lengths or find_lengths(settings.lengths)
            prompt, output = lengths(random)
        arrival_s = (row.t_s - settings.start_s) / settings.time_scale
        hashes = _prefix(name, prompt, row.seen, number) if row.seen else ()
        requests.append(SimRequest(arrival_s, name, prompt, max(1, output), hashes))
    return requests


def _rows(settings: WorkloadSettings) -> list[Row]:
    if settings.trace.startswith("synthetic:"):
        if settings.where:
            raise ValueError("a synthetic trace has no columns to choose lines by (--where)")
        text = settings.trace.removeprefix("synthetic:")
        return synthetic(text, settings.seed, settings.rate_scale)
    path = find_path(settings.trace)
    if has_rates(path):
        duration_s = settings.duration_s if isfinite(settings.duration_s) else _RATES_S
        return sample_requests(
            path, settings.seed, settings.start_s, duration_s, settings.where, settings.rate_scale
        )
    rows = find_rows(settings.trace, settings.where)
    if settings.rate_scale == 1.0:
        return rows
    if settings.rate_scale > 1.0:
        raise ValueError("a trace of requests has no more of them: rate_scale is at most 1 here")
    random = Random(f"{settings.seed}/share")
    return [row for row in rows if random.random() < settings.rate_scale]


def _model_names(
    rows: Sequence[Row], settings: WorkloadSettings, models: Sequence[str]
) -> list[str]:
    sources = _sources(rows, settings)
    if sources == [""]:
        weights = [1 / (rank + 1) ** settings.zipf for rank in range(len(models))]
        return Random(f"{settings.seed}/mapping").choices(models, weights, k=len(rows))
    names = {source: models[index % len(models)] for index, source in enumerate(sources)}
    return [names[row.source] for row in rows]


def _sources(rows: Sequence[Row], settings: WorkloadSettings) -> list[str]:
    if settings.mapping not in {"order", "shuffle"}:
        raise ValueError(f"mapping is order or shuffle, not {settings.mapping!r}")
    sources = sorted({row.source for row in rows}, key=_by_number)
    if settings.mapping == "shuffle":
        Random(f"{settings.seed}/mapping").shuffle(sources)
    return sources


def _by_number(source: str) -> tuple[int, str]:
    digits = "".join(char for char in source if char.isdigit())
    return int(digits or 0), source


def _prefix(model: str, prompt: int, seen: int, number: int) -> tuple[int, ...]:
    """Return the block hashes of a prompt whose first `seen` tokens are shared with its model.

    Such traces do not say which earlier prompt began the same way, so each model has one prefix."""
    shared = Random(f"prefix/{model}").getrandbits(32)
    blocks = prompt // BLOCK_TOKENS
    common = min(blocks, seen // BLOCK_TOKENS)
    own = _SHARED_SEED + (number << 20)
    return (
        *((shared << 20) + index for index in range(common)),
        *(own + index for index in range(blocks - common)),
    )
