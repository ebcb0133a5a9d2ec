"""Makes a machine's profile from the record of a server on it (`serve --record`).

A step's time runs from the tick that submits it to the tick that is notified of its end. It
includes the loop around the kernels. Medians over similar steps make the tables of
`sim.world.tables`. Steps with the first tokens of one prompt are grouped by their number, decode
steps by batch and mean length.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import exp, log, sqrt
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from c2cserve.core import events as ev
from c2cserve.core.actions import RunStep
from c2cserve.core.machine import Slice
from c2cserve.core.model import ModelSpec
from c2cserve.core.step import Step
from c2cserve.runtime.replay import RecordLines
from c2cserve.runtime.wire import untagged
from c2cserve.sim.world.costs import table_seconds
from c2cserve.sim.world.hardware import SLICE_FIELDS
from c2cserve.sim.world.tables import Points, StepTable, interpolate

_ENOUGH = 3
"""How many similar steps a median needs."""
_SPREAD_SHARE = 0.6745
"""Median distance from the median of a normal distribution, in standard deviations."""
_DEVICE = "measured"


class CalibrationError(ValueError):
    """The record does not tell enough; one line that says what it lacks."""


Decodes = tuple[float, Points]
"""Mean length, and (batch, seconds)."""
Window = tuple[float, float]
"""Begin and end on the record's clock, seconds."""


@dataclass(frozen=True, slots=True)
class Timed:
    """A step that has run."""

    step: Step
    took_s: float

    def decodes(self) -> list[int]:
        """Return how many tokens precede each decode."""
        return [part.start for part in self.step.seqs if part.tokens == 1 and part.start]

    @property
    def mixed(self) -> bool:
        """Whether it has decodes and one chunk of a prompt."""
        return 1 < len(self.step.seqs) == len(self.decodes()) + 1


@dataclass(slots=True)
class Observed:
    """What a record says about a machine."""

    slices: dict[str, Slice] = field(default_factory=dict[str, Slice])
    models: dict[str, ModelSpec] = field(default_factory=dict[str, ModelSpec])
    pool_bytes: int = 0
    loads: list[float] = field(default_factory=list[float])
    """Bytes per second, of models that came into the pool."""
    steps: list[Timed] = field(default_factory=list[Timed])
    spans_s: dict[str, float] = field(default_factory=dict[str, float])
    """Request -> time from its submission to a slice until its first token."""


def observe(record: Path, windows: Sequence[Window] = ()) -> Observed:
    """Read a record. Only steps and requests that began in one of `windows` count; none: all.

    Raises OSError, `runtime.replay.RecordError`."""

    def counts(at_s: float) -> bool:
        return not windows or any(begin <= at_s < end for begin, end in windows)

    seen = Observed()
    began: dict[tuple[str, int], tuple[float, Step]] = {}
    submitted: dict[str, float] = {}
    for _, line in RecordLines(record):
        if "policy" in line:
            _header(seen, line)
            continue
        now, stream = line["now"], line["stream"]
        for event in untagged(line["events"]):
            match event:
                case ev.ModelAdded(spec):
                    seen.models[spec.id] = spec
                case ev.PoolState(budget_bytes):
                    seen.pool_bytes = budget_bytes
                case ev.ModelLoaded(_, size, took_s) if took_s > 0:
                    seen.loads.append(size / took_s)
                case ev.Submitted(request) if counts(now):
                    submitted[request.id] = now
                case ev.StepDone(step_id):
                    start_s, step = began.pop((stream, step_id))
                    if counts(start_s):
                        seen.steps.append(Timed(step, now - start_s))
                    for outcome in event.outcomes:
                        if outcome.request_id in submitted:
                            span_s = now - submitted.pop(outcome.request_id)
                            seen.spans_s[outcome.request_id] = span_s
                case _:
                    pass
        for action in untagged(line["actions"]):
            if isinstance(action, RunStep):
                began[stream, action.step.id] = (now, action.step)
    return seen


def _header(seen: Observed, line: Mapping[str, Any]) -> None:
    if line["policy"] == "slice":
        one = msgspec.convert(line["arguments"]["slice"], Slice)
        if one.kind != "cpu":
            raise CalibrationError(f"slice {one.id} is a GPU's: steps there share a link")
        seen.slices[one.id] = one


def step_table(steps: Sequence[Timed], model: str) -> StepTable:
    """Make a model's table. Raises CalibrationError if the record has too few of its steps."""
    decodes: dict[int, dict[int, list[float]]] = {}
    prefills: dict[int, list[tuple[int, float]]] = {}
    for timed in steps:
        parts = timed.step.seqs
        if timed.step.model != model:
            continue
        lengths = timed.decodes()
        if len(lengths) == len(parts) and len(parts) & (len(parts) - 1) == 0:
            mean = 1 << int(log(sum(lengths) / len(lengths), 2))
            decodes.setdefault(mean, {}).setdefault(len(parts), []).append(timed.took_s)
        elif len(parts) == 1 and not parts[0].start:
            tokens = parts[0].tokens
            bucket = int(2 * log(tokens, 2))
            prefills.setdefault(bucket, []).append((tokens, timed.took_s))
    by_length = [
        (length * sqrt(2.0), points)
        for length, batches in sorted(decodes.items())
        if len(points := _medians((n, times) for n, times in sorted(batches.items()))) > 1
    ]
    by_tokens = [
        (float(median(n for n, _ in pairs)), median(took_s for _, took_s in pairs))
        for _, pairs in sorted(prefills.items())
        if len(pairs) >= _ENOUGH
    ]
    if not by_length or len(by_tokens) < 2:
        raise CalibrationError(
            f"{model}: the record has too few steps of it: it takes prompts of different lengths "
            "one by one, and decodes of 1, 2, 4, 8 ... requests at a time"
        )
    one_s = by_length[0][1][0][1]
    if by_tokens[0][0] > 1:
        by_tokens.insert(0, (1.0, min(one_s, by_tokens[0][1])))
    whole = StepTable(by_tokens, list(_longer_is_slower(by_length)), 0.0)
    mixed = [timed for timed in steps if timed.step.model == model and timed.mixed]
    return replace(whole, base_s=_base_s(whole, mixed))


def _base_s(table: StepTable, mixed: Sequence[Timed]) -> float:
    """Return the fixed cost: what a mixed step saves compared with its parts in two steps."""
    less = [table_seconds(timed.step, table, 0)[0] - timed.took_s for timed in mixed]
    if len(less) < _ENOUGH:
        return table.prefill[0][1]
    return min(max(0.0, median(less)), table.prefill[0][1])


def _medians(groups: Iterable[tuple[int, list[float]]]) -> list[tuple[float, float]]:
    """Return (batch, median) pairs. Times never fall with the batch: noise must not look like a
    gain."""
    found: list[tuple[float, float]] = []
    for number, times in groups:
        if len(times) >= _ENOUGH:
            found.append((number, max(median(times), found[-1][1] if found else 0.0)))
    return found


def _longer_is_slower(by_length: Iterable[Decodes]) -> Iterator[Decodes]:
    before: Points = []
    for length, points in by_length:
        if before:
            points = [(batch, max(s, interpolate(before, batch))) for batch, s in points]
        yield length, points
        before = points


def spread(steps: Sequence[Timed], tables: Mapping[str, StepTable]) -> tuple[float, float]:
    """Return the median ratio of measured to tabulated times, and the deviation of its logarithm.

    The standard deviation is estimated from the median distance: outliers are not noise."""
    ratios = [
        log(one.took_s / table_seconds(one.step, tables[one.step.model], 0)[0]) for one in steps
    ]
    middle = median(ratios)
    return exp(middle), median(abs(ratio - middle) for ratio in ratios) / _SPREAD_SHARE


@dataclass(frozen=True, slots=True)
class Calibration:
    """A machine's profile, and how much step times vary around it."""

    seen: Observed
    tables: Mapping[str, StepTable]
    noise: float
    """Standard deviation of the logarithm of step times: what `--noise` takes."""
    request_s: float = 0.0
    """Time of a request outside of slices, which a record does not fully contain."""

    def write(self, folder: Path) -> Path:
        """Write the profile and its tables, and return the profile's path for `--hardware`.

        Raises OSError."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tables.json").write_text(json.dumps(self._tables(), indent=1) + "\n")
        path = folder / "hardware.toml"
        path.write_text("\n".join(self._toml()) + "\n")
        return path

    def _tables(self) -> dict[str, Any]:
        def points(pairs: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
            return [(x, y * 1e3) for x, y in pairs]

        return {
            "models": {
                name: {
                    _DEVICE: {
                        "prefill_ms": points(table.prefill),
                        "base_ms": table.base_s * 1e3,
                        "decode_ms": {str(at): points(found) for at, found in table.decode},
                    }
                }
                for name, table in self.tables.items()
            }
        }

    def _toml(self) -> Iterator[str]:
        seen = self.seen
        largest = max(self.tables, key=lambda name: seen.models[name].weight_bytes)
        weights, table = seen.models[largest].weight_bytes, self.tables[largest]
        (few, few_s), (many, many_s) = table.prefill[0], table.prefill[-1]
        yield 'source = "Measured: steps of a server on this machine (c2cserve calibrate)."'
        yield f'step_error = "measured on it; they spread by {self.noise:.0%}."'
        yield 'tables = "tables.json"'
        yield "\n[host]"
        yield f"pool_bytes = {seen.pool_bytes}"
        yield f"disk_bytes_per_s = {median(seen.loads) if seen.loads else 1e9:.4g}"
        yield f"request_s = {self.request_s:.4g}"
        for number, (one, count) in enumerate(_alike(seen.slices.values())):
            yield "\n[[devices]]"
            yield f'name = "cpu{chr(ord("a") + number) if number else ""}"'
            yield f"count = {count}"
            yield f'table = "{_DEVICE}"'
            yield "\n[devices.layouts.whole]"
            yield 'slices = 1\nkind = "cpu"'
            yield f"hbm_bytes = {one.kv_bytes}"
            yield f"hbm_bytes_per_s = {weights / table.decode_s(1, 1):.4g}"
            yield f"flops = {weights * (many - few) / (many_s - few_s):.4g}"
            yield "\n[devices.layouts.whole.slice]"
            yield from (f"{key} = {getattr(one, key)}" for key in SLICE_FIELDS)


def _alike(slices: Iterable[Slice]) -> Iterator[tuple[Slice, int]]:
    kinds: dict[Slice, int] = {}
    for one in slices:
        like = replace(one, id="", cpus=(), numa=0)
        kinds[like] = kinds.get(like, 0) + 1
    yield from kinds.items()


def calibrate(record: Path, windows: Sequence[Window] = ()) -> Calibration:
    """Calibrate from a record. Raises CalibrationError, OSError, `runtime.replay.RecordError`."""
    seen = observe(record, windows)
    ran = sorted({timed.step.model for timed in seen.steps})
    if not ran or not seen.slices:
        raise CalibrationError("the record has no steps")
    tables = {name: step_table(seen.steps, name) for name in ran}
    return Calibration(seen, tables, spread(seen.steps, tables)[1])
