"""Step times of a live server whose weights are all in its memory, as tables to simulate by.

They are measured from outside, as a client sees them, one shape after another:

    decode    time between tokens, of so many requests at once
    prefill   for how long a prompt keeps the slice from another model's decode steps
    request   time to first token of a prompt alone, less its step

    stream    | | | | | |            | | | | | | |            | | | | | | |
    prompts          [ due .. first ]             [ due .. first ]
                      `- longer gaps -'            `- their excess is the prefill

What the host does for a step is part of the prefill: while it launches a prompt's kernels one by
one, no other step runs.

Counters of the host's thread are those of prompts beside a stream, which come last. So they have no
captures of graphs, no first launches, and no pauses between requests that are sent one by one. What
launching a prompt takes depends on its length. That is counted while prompts of a length are alone.
"""

from bisect import bisect_right
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from math import ceil
from statistics import fmean, median
from typing import Any

import msgspec
from mix_load import Mix

from c2cserve.bench.loadgen_reply import Record
from c2cserve.bench.plan import Shape
from c2cserve.sim.world.host_thread import HostTimes
from c2cserve.sim.world.tables import Tables, read_tables

DEVICE = "measured"
_REPEATS = 5
_DECODED = 32
"""Tokens of requests that decode together."""
_BESIDE = 4
"""Prompts of one length beside a stream."""
_STREAMED = 160
"""Tokens of a stream, at least."""
_TRIES = 4
_BOUND_BY_HOST = 1.2
"""Prompts that take this many times as long as the median one keep the GPU busy, if no longer one
takes less. All else is the host or noise."""
_KINDS = ("prefill", "decode", "switched")
"""Kinds of steps, as a server counts them."""

Counters = Callable[[], Mapping[str, float]]
"""Returns the slice's counters as they are, by their names without a prefix."""
Send = Callable[[Sequence[Shape], int | None], Sequence[Record]]
"""Sends requests, so many at a time, and returns their records. None: each when it is due. One
alone was answered; of several some may have been refused."""


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of steps by shape, and of a request outside of steps."""

    source: str
    request_s: float
    prefill: Mapping[str, Sequence[tuple[int, float]]]
    """Shape -> (prompt tokens, seconds)."""
    decode: Mapping[str, Mapping[str, Sequence[tuple[int, float]]]]
    """Shape -> mean length, as a text -> (batch, seconds)."""
    host: HostTimes | None = None
    """What the slice's thread did for a step; None: not counted, by an earlier server."""

    def bounded(self) -> "Times":
        """Return the times with the thread's no longer than decode steps take."""
        if self.host is None:
            return self
        return replace(self, host=self.host.within(min(map(_step_s, self.decode.values()))))

    def tables(self) -> Tables:
        """Return the GPU's times. Where those of the host are known too, it has none in them."""
        prefill = {
            shape: points
            if self.host is None
            else _without_host(points, _step_s(self.decode[shape]))
            for shape, points in self.prefill.items()
        }
        return read_tables(
            {
                "models": {
                    shape: {
                        DEVICE: {
                            "prefill_ms": [(n, 1e3 * took_s) for n, took_s in prefill[shape]],
                            "decode_ms": {
                                length: [(n, 1e3 * took_s) for n, took_s in points]
                                for length, points in self.decode[shape].items()
                            },
                        }
                    }
                    for shape in self.prefill
                }
            }
        )

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def read_times(results: Mapping[str, Any]) -> Times | None:
    """Return the times in an earlier run's results, None if it measured none. Raises
    ValueError."""
    found = results.get("times")
    if found is None:
        return None
    host = found.get("host")
    if host and "prefill_launch_s" in host:  # results until November 2026 have one for all lengths
        launch = {"prefill_launch": [(1, host["prefill_launch_s"])]}
        found = {**found, "host": {**host, **launch}}
    return msgspec.convert(found, Times)


def host_times(risen: Mapping[str, float]) -> HostTimes | None:
    """Return what a slice's thread did for a step, by how much the slice's counters rose. None: too
    few are counted to say."""
    if "submit_seconds_total" not in risen:
        return None

    def seconds(name: str) -> float:
        return risen.get(f"{name}_seconds_total", 0.0)

    steps = risen["steps_total"]
    prefills, switched = risen["prefill_steps_total"], risen["switched_steps_total"]
    decodes = steps - prefills - switched
    if min(prefills, decodes) < 1:
        return None
    spent = {kind: seconds(f"{kind}_batch") + seconds(f"{kind}_launch") for kind in _KINDS}
    whole_s = sum(seconds(name) for name in ("policy", "submit", "action", "poll"))
    others_s = whole_s - seconds("step_wait") - sum(spent.values())
    decode_s = spent["decode"] / decodes
    return HostTimes(
        seconds("prefill_batch") / prefills, [(1, seconds("prefill_launch") / prefills)], decode_s,
        spent["switched"] / switched if switched else decode_s, max(0.0, others_s) / steps,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Stream:
    """A request whose tokens come one after another, measured alone."""

    shape: Shape
    ttft_s: float
    gap_s: float

    @classmethod
    def alone(cls, model: str, prompt: int, send: Send) -> "_Stream":
        shape = Shape(model, prompt, _STREAMED)
        [record] = send([shape], 1)
        return cls(shape, record.ttft_s, sum(record.gaps_s) / (_STREAMED - 1))


def measure_times(
    mix: Mix, models: Mapping[str, str], send: Send, source: str, counters: Counters = dict
) -> Times:
    """Measure the times of every shape by one of its models (`models`: shape -> model)."""
    ttft_s: dict[str, list[tuple[int, float]]] = {}
    launches = _Launches(counters)
    decode: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for shape, model in models.items():
        send([Shape(model, mix.prompts[0], _DECODED)] * _REPEATS, 1)  # its weights come in
        ttft_s[shape] = [(n, _first_s(model, n, send, launches)) for n in mix.prompts]
        decode[shape] = {
            str(context + _DECODED // 2): _rising(
                (batch, took_s)
                for batch in mix.batches
                if (took_s := _between_s(model, context, batch, send)) is not None
            )
            for context in mix.contexts
        }
    streams = {model: _Stream.alone(model, mix.prompts[0], send) for model in set(models.values())}
    before = counters()
    occupied = {
        shape: _prefills(ttft_s[shape], model, streams[_other(shape, models)],
                         _step_s(decode[shape]), send)
        for shape, model in models.items()
    }  # fmt: skip
    after = counters()
    host = launches.within(host_times(_risen(before, after)))
    # A first token comes no sooner than its step is over: noise must not say otherwise. Times may
    # fall with the length: a GPU slice has other kernels for few rows, which take longer to launch.
    prefill = {
        shape: [(n, min(first_s, took_s)) for (n, first_s), took_s in pairs]
        for shape in models
        if (pairs := list(zip(ttft_s[shape], occupied[shape], strict=True)))
    }
    times = Times(source, 0.0, prefill, decode, host)
    return replace(times, request_s=_outside_s(times, ttft_s))


def _outside_s(times: Times, ttft_s: Mapping[str, Sequence[tuple[int, float]]]) -> float:
    """Return the time of a request outside of its steps, by first tokens of prompts alone.

    Beside a stream, part of what the thread does for a prompt is hidden by the stream's steps.
    Alone none is. So what is simulated of the thread and the GPU is taken off, if it was counted.
    """
    bounded, tables = times.bounded(), times.tables()
    outside_s: list[float] = []
    for shape, points in ttft_s.items():
        table = tables.get(shape, DEVICE)
        for (n, first_s), (_, took_s) in zip(points, times.prefill[shape], strict=True):
            if (host := bounded.host) is not None and table is not None:
                step_s = max(host.launch_s(n), table.prefill_s(0, n))
                took_s = host.others_s + host.prefill_batch_s + step_s
            outside_s.append(first_s - took_s)
    return max(0.0, median(outside_s))


def _other(shape: str, models: Mapping[str, str]) -> str:
    """Return a model of another shape, if there is one: its steps and a prompt's take turns."""
    return next((model for other, model in models.items() if other != shape), models[shape])


def _step_s(decode: Mapping[str, Sequence[tuple[int, float]]]) -> float:
    """Return the time of the smallest decode step."""
    return min(points[0][1] for points in decode.values() if points)


def _prefills(
    ttft_s: Sequence[tuple[int, float]], model: str, beside: _Stream, least_s: float, send: Send
) -> list[float]:
    """Return the seconds of prompts. They read all weights, as a decode step does: it is the
    least."""
    return [max(least_s, _occupied_s(model, n, first_s, beside, send)) for n, first_s in ttft_s]


def _occupied_s(model: str, prompt: int, first_s: float, stream: _Stream, send: Send) -> float:
    """Return for how long a prompt of so many tokens keeps a stream's steps from running.

    `first_s`: its time to first token when it is alone. A stream that was faster than alone and
    ended before the prompts is sent again, with more tokens. Raises ValueError if that is no help,
    or requests are refused."""
    apart_s = max(2 * first_s, _STREAMED * stream.gap_s / (_BESIDE + 1))
    begin_s = stream.ttft_s + apart_s / 2
    lasts_s = begin_s + _BESIDE * apart_s - stream.ttft_s
    asked = [Shape(model, prompt, 1, begin_s + i * apart_s) for i in range(_BESIDE)]
    tokens = max(_STREAMED, ceil(lasts_s / stream.gap_s))
    for more in range(1, _TRIES + 1):
        shape = replace(stream.shape, output_tokens=more * tokens)
        streamed, *prompts = sorted(send([shape, *asked], None), key=lambda one: one.due_s)
        windows = [(one.due_s, one.first_s) for one in prompts if one.ok]
        found = excess_s(streamed, windows) if streamed.ok else []
        if len(found) > _BESIDE // 2:
            return median(found)
    raise ValueError(f"{model}: too few prompts of {prompt} tokens were beside a whole stream")


def excess_s(stream: Record, windows: Sequence[tuple[float, float]]) -> list[float]:
    """Return how much longer the gaps of a stream within each window were than those outside of
    all. A window lasts until the gap after the one in which it ends: the step that is delayed may
    be the next one. Windows that the stream does not cover are left out."""
    ends = list(accumulate(stream.gaps_s, initial=stream.first_s))
    spans: list[tuple[int, int]] = []
    for begin_s, end_s in windows:
        first, last = bisect_right(ends, begin_s) - 1, bisect_right(ends, end_s) + 1
        if first >= 0 and last < len(ends):
            spans.append((first, last))
    inside = {gap for first, last in spans for gap in range(first, last)}
    others = [gap_s for i, gap_s in enumerate(stream.gaps_s) if i not in inside]
    if not others:
        return []
    usual_s = sum(others) / len(others)
    return [ends[last] - ends[first] - (last - first) * usual_s for first, last in spans]


def _without_host(points: Sequence[tuple[int, float]], decode_s: float) -> list[tuple[int, float]]:
    """Return prompts' times on the GPU, of the times for which they keep a stream from running.

    Short prompts keep it for as long as the host launches them. The GPU takes less, which cannot be
    seen: from a decode step's time for one token, as it reads the same weights, along a line to the
    first of the longest prompts that are clearly longer."""
    most_s = _BOUND_BY_HOST * median(took_s for _, took_s in points)
    short = [at for at, (_, took_s) in enumerate(points) if took_s <= most_s]
    return [(1, decode_s), *(points[short[-1] + 1 :] or points[-1:])]


def _first_s(model: str, prompt: int, send: Send, launches: "_Launches") -> float:
    shape, ttft_s = Shape(model, prompt, 1), list[float]()
    send([shape], 1)  # the first one of a length loads what it needs
    for _ in range(_REPEATS):
        with launches.of(model, prompt):
            ttft_s += [one.ttft_s for one in send([shape], 1)]
    return median(ttft_s)


def _risen(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    return {name: value - before.get(name, 0.0) for name, value in after.items()}


class _Launches:
    """Seconds of launching prompts, by their length: medians, and means of these over the models.
    The thread does other things between steps, which delay a launch now and then."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._found: dict[int, dict[str, list[float]]] = {}

    @contextmanager
    def of(self, model: str, prompt: int) -> Generator[None]:
        before = self._counters()
        yield
        risen = _risen(before, self._counters())
        if steps := risen.get("prefill_steps_total", 0.0):
            took_s = risen.get("prefill_launch_seconds_total", 0.0) / steps
            self._found.setdefault(prompt, {}).setdefault(model, []).append(took_s)

    def within(self, host: HostTimes | None) -> HostTimes | None:
        """Return these times with the prompts' launches by length, if there are any."""
        if host is None or not self._found:
            return host
        points = [
            (float(n), fmean(map(median, found.values())))
            for n, found in sorted(self._found.items())
        ]
        return replace(host, prefill_launch=points)


def _between_s(model: str, prompt: int, batch: int, send: Send) -> float | None:
    """Return the median answer's mean time per token in its second half, when all requests decode.
    None: some were refused, so the batch was smaller.

    A client that is late reads several tokens at once, so single gaps say little. The same requests
    are sent twice, as steps of a new size are launched kernel by kernel, and then captured."""
    send([Shape(model, prompt, _DECODED)] * batch, batch)
    records = send([Shape(model, prompt, _DECODED)] * batch, batch)
    if not all(record.ok for record in records):
        return None
    return median(late_tpot_s(one) for one in records)


def late_tpot_s(record: Record) -> float:
    """Tokens that arrive in one piece are evenly among the pieces. Raises ValueError."""
    late = record.gaps_s[len(record.gaps_s) // 2 :]
    if not late:
        raise ValueError(f"{record.model}: an answer came in one piece, its steps have no times")
    tokens_per_gap = (record.output_tokens - 1) / len(record.gaps_s)
    return sum(late) / len(late) / tokens_per_gap


def _rising(points: Iterable[tuple[int, float]]) -> list[tuple[int, float]]:
    """Times never fall with the size: noise must not look like a gain."""
    found: list[tuple[int, float]] = []
    for size, took_s in points:
        found.append((size, max(took_s, found[-1][1] if found else 0.0)))
    return found
