"""Step times of a live server whose weights are all in its memory, as tables to simulate by.

They are measured from outside, as a client sees them, one shape after another:

    prefill   time to first token of one prompt, less the time of a request outside of steps
    decode    time between tokens, of so many requests at once
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import msgspec
from mix_load import Mix

from c2cserve.bench.loadgen_reply import Record
from c2cserve.bench.plan import Shape
from c2cserve.sim.world.tables import Tables, read_tables

DEVICE = "measured"
_REPEATS = 3
_DECODED = 32
"""Tokens of requests that decode together."""

Send = Callable[[Sequence[Shape], int], Sequence[Record]]
"""Sends requests, so many at a time, and returns their records. One alone was answered; of several
some may have been refused."""


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of steps by shape, and of a request outside of steps."""

    source: str
    request_s: float
    prefill: Mapping[str, Sequence[tuple[int, float]]]
    """Shape -> (prompt tokens, seconds)."""
    decode: Mapping[str, Mapping[str, Sequence[tuple[int, float]]]]
    """Shape -> mean length, as a text -> (batch, seconds)."""

    def tables(self) -> Tables:
        return read_tables(
            {
                "models": {
                    shape: {
                        DEVICE: {
                            "prefill_ms": [(n, 1e3 * took_s) for n, took_s in self.prefill[shape]],
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
    return None if found is None else msgspec.convert(found, Times)


def measure_times(mix: Mix, models: Mapping[str, str], send: Send, source: str) -> Times:
    """Measure the times of every shape by one of its models (`models`: shape -> model)."""
    ttft_s: dict[str, list[tuple[int, float]]] = {}
    decode: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for shape, model in models.items():
        send([Shape(model, mix.prompts[0], _DECODED)] * _REPEATS, 1)  # its weights come in
        ttft_s[shape] = [(n, _first_s(model, n, send)) for n in mix.prompts]
        decode[shape] = {
            str(context + _DECODED // 2): _rising(
                (batch, took_s)
                for batch in mix.batches
                if (took_s := _between_s(model, context, batch, send)) is not None
            )
            for context in mix.contexts
        }
    outside_s = [ttft_s[shape][0][1] - next(iter(decode[shape].values()))[0][1] for shape in models]
    request_s = max(0.0, min(outside_s))
    prefill = {
        shape: _rising((n, max(1e-6, took_s - request_s)) for n, took_s in points)
        for shape, points in ttft_s.items()
    }
    return Times(source, request_s, prefill, decode)


def _first_s(model: str, prompt: int, send: Send) -> float:
    return median(one.ttft_s for one in send([Shape(model, prompt, 1)] * _REPEATS, 1))


def _between_s(model: str, prompt: int, batch: int, send: Send) -> float | None:
    """Return the median answer's mean time per token in its second half, when all requests decode.
    None: some were refused, so the batch was smaller.

    A client that is late reads several tokens at once, so single gaps say little."""
    records = send([Shape(model, prompt, _DECODED)] * batch, batch)
    if not all(record.ok for record in records):
        return None
    return median(_late_tpot_s(one) for one in records)


def _late_tpot_s(record: Record) -> float:
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
