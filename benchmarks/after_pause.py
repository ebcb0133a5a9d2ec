"""What a request takes after a pause: a machine that was idle works slower at first.

python benchmarks/after_pause.py [--shape llama-3b] [--pauses 0,0.05,0.2,0.5,2] [--requests 16]
    [--prompt 512] [--output 64] [--serve ARGUMENTS] [--work DIR] [--out FILE]
python benchmarks/after_pause.py --cpu --shape tiny-llama --requests 4

One server with one resident model, and one request at a time. The pause is from an answer's end to
the next request. Rounds of all pauses alternate. Given by pause: medians of the time to first token
and of the time between tokens, of the first 16 and of the others, and what the slice's thread took
for a step by its own counters. Times that hold for a machine at work are those of no pause.
"""

import argparse
import asyncio
import json
import random
import shlex
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from catalogue_server import Server, one_slice, serving_shapes
from gpu_models import SHAPES, config_of, weight_bytes
from report import report

from c2cserve.bench.loadgen import Load, Planned, generate
from c2cserve.bench.loadgen_reply import Record

_FIRST_GAPS = 16
_ROUNDS = 4
_LOWEST_ID = 10
_ROOM_BYTES = 8 << 30
_COUNTED = (
    "prefill_steps", "steps", "prefill_launch_seconds", "prefill_compute_seconds",
    "decode_launch_seconds", "decode_compute_seconds", "policy_seconds", "in_flight_seconds",
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    given = _arguments(arguments)
    with serving_shapes([given.shape], _slice_of(given), given.work) as (server, names):
        results = _Rounds(server, names[given.shape], given).all()
    report(
        results, given.out, shape=given.shape, pauses=given.pauses, requests=given.requests,
        prompt=given.prompt, output=given.output, serve=given.serve,
    )  # fmt: skip


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="llama-3b", choices=SHAPES)
    parser.add_argument("--pauses", default="0,0.05,0.2,0.5,2", help="seconds")
    parser.add_argument("--requests", type=int, default=16, help="after each pause, all rounds")
    parser.add_argument("--prompt", type=int, default=512, help="tokens")
    parser.add_argument("--output", type=int, default=64, help="tokens")
    parser.add_argument("--cpu", action="store_true", help="one CPU slice")
    parser.add_argument("--serve", default="", help="more arguments of `c2cserve serve`")
    parser.add_argument("--work", type=Path, help="for checkpoints and pool; /dev/shm")
    parser.add_argument("--out", type=Path, help="JSON")
    return parser.parse_args(arguments)


def _slice_of(given: argparse.Namespace) -> list[str]:
    arena_bytes = weight_bytes(given.shape) + _ROOM_BYTES
    return [*one_slice(arena_bytes, gpu=None if given.cpu else 0), *shlex.split(given.serve)]


class _Rounds:
    def __init__(self, server: Server, model: str, given: argparse.Namespace) -> None:
        self._server, self._model, self._given = server, model, given
        self._vocab = config_of(given.shape).vocab
        self._random = random.Random(1)

    def all(self) -> dict[str, Any]:
        given = self._given
        pauses = [float(one) for one in given.pauses.split(",")]
        self._round(0.0, 8)  # graphs are captured, weights come in
        records: dict[float, list[Record]] = defaultdict(list)
        counted: dict[float, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for _ in range(_ROUNDS):
            for pause_s in pauses:
                before = self._counters()
                records[pause_s] += self._round(pause_s, max(1, given.requests // _ROUNDS))
                for name, value in self._counters().items():
                    counted[pause_s][name] += value - before[name]
        return {
            "pauses": [
                {"pause_s": one, **_figures(records[one], counted[one])} for one in pauses
            ]
        }  # fmt: skip

    def _round(self, pause_s: float, count: int) -> list[Record]:
        records: list[Record] = []
        for _ in range(count):
            time.sleep(pause_s)
            records += asyncio.run(self._ask())
        return records

    async def _ask(self) -> list[Record]:
        load = Load(self._server.url, "/v1/completions", [self._planned()], concurrency=1)
        [record] = (await generate(load, lambda _: None)).records
        if not record.ok:
            raise ValueError(f"{record.model}: {record.error}: {record.error_detail}")
        return [record]

    def _planned(self) -> Planned:
        given = self._given
        prompt = [self._random.randrange(_LOWEST_ID, self._vocab) for _ in range(given.prompt)]
        body = {
            "model": self._model, "prompt": prompt, "max_tokens": given.output,
            "ignore_eos": True, "temperature": 0, "stream": True,
        }  # fmt: skip
        return Planned(0, self._model, json.dumps(body).encode())

    def _counters(self) -> dict[str, float]:
        found = self._server.metrics()
        return {name: found.get(f"c2cserve:slice_{name}_total", 0.0) for name in _COUNTED}


def _figures(records: Sequence[Record], counted: dict[str, float]) -> dict[str, float | None]:
    prefills = max(1.0, counted["prefill_steps"])
    decodes = max(1.0, counted["steps"] - counted["prefill_steps"])
    steps = max(1.0, counted["steps"])
    first = [gap for record in records for gap in record.gaps_s[:_FIRST_GAPS]]
    later = [gap for record in records for gap in record.gaps_s[_FIRST_GAPS:]]
    return {
        "ttft_p50_ms": 1e3 * median(record.ttft_s for record in records),
        "first_gaps_p50_ms": 1e3 * median(first) if first else None,
        "later_gaps_p50_ms": 1e3 * median(later) if later else None,
        "prefill_launch_ms": 1e3 * counted["prefill_launch_seconds"] / prefills,
        "prefill_compute_ms": 1e3 * counted["prefill_compute_seconds"] / prefills,
        "decode_launch_ms": 1e3 * counted["decode_launch_seconds"] / decodes,
        "decode_compute_ms": 1e3 * counted["decode_compute_seconds"] / decodes,
        "policy_ms": 1e3 * counted["policy_seconds"] / steps,
    }


if __name__ == "__main__":
    main()
