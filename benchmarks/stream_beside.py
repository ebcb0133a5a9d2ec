"""A model that streams beside one that is resident: what each takes from the other.

python benchmarks/stream_beside.py [--near llama-3b] [--far llama-8b] [--tokens 2000] [--users 1]
    [--room-gb 2] [--lanes 2] [--limit-s 150] [--serve ARGUMENTS] [--work DIR] [--out FILE]
python benchmarks/stream_beside.py --cpu --near tiny-llama --far tiny-tied --tokens 60

One server, one slice, two models with random weights. The slice's memory holds the near model and
--room-gb more, so that most of the far one streams from host memory. Three phases, over HTTP:

    near alone     users send one request after another
    far alone      one request, of a fifth of --tokens
    beside         one request of the far model, of --tokens, while users ask the near one

A phase's times are those between a request's tokens, as they arrive; `tpot_p99_ms` is of their
means by request. Of `beside` only those count
in which both models were decoding. Alone, the far model may find more of itself in the slice's
memory than beside the other. So its times are also given per gigabyte that it read over the link.

`slow_by_phase` has the near model's times of `beside` that are over 1.5 times its median alone: how
many began in each twentieth of the far model's step, of how many times in all. Layers follow one
another evenly there; its head is in the last of them, and what the host does for it in the first.

An answer that takes longer than --limit-s is cut, and counts as far as it came: 2,000 tokens of
--tokens that stream from the host take ten minutes. The exit status is 1 if the server fails, or a
request does.
"""

import argparse
import asyncio
import json
import random
import shlex
import time
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import inf
from pathlib import Path
from typing import Any

from catalogue_server import Server, one_slice, serving_shapes, tell
from gpu_models import SHAPES, config_of, weight_bytes
from report import report

from c2cserve.bench.loadgen import Load, Planned, generate
from c2cserve.bench.loadgen_reply import Record
from c2cserve.bench.report import percentile

_NEAR_BAR, _FAR_BAR = 1.5, 1.15
"""Times beside over times alone, at most: the near model's at p99, the far model's mean."""
_FAR_ALONE = 5
"""The far model's request alone has the tokens of the one beside over this."""
_PHASES = 20
_REQUESTS = 8
"""Of the near model at a time, for each user."""
_WARM_TOKENS = 16
"""More than it takes to capture the far model's graphs."""
_STREAMED = "c2cserve:slice_weights_streamed_bytes_total"
_LOWEST_ID = 10

Figures = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> None:
    given = _arguments(arguments)
    shapes = [given.near, given.far]
    with serving_shapes(shapes, _slice_of(given), given.work) as (server, names):
        results = measure(server, names[given.near], names[given.far], given)
        results["counters"] = {
            name: value for name, value in server.metrics().items() if "slice_" in name
        }
    report(
        results, given.out, near=given.near, far=given.far, tokens=given.tokens, users=given.users,
        prompt=given.prompt, output=given.output, room_gb=given.room_gb, lanes=given.lanes,
        limit_s=given.limit_s, serve=given.serve,
    )  # fmt: skip


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--near", default="llama-3b", choices=SHAPES, help="the resident model")
    parser.add_argument("--far", default="llama-8b", choices=SHAPES, help="the one that streams")
    parser.add_argument("--tokens", type=int, default=2000, help="of the far model, beside")
    parser.add_argument("--users", type=int, default=1, help="of the near model")
    parser.add_argument("--prompt", type=int, default=128, help="tokens")
    parser.add_argument("--output", type=int, default=256, help="tokens of the near model")
    parser.add_argument("--room-gb", type=float, default=2.0, help="beside the near model")
    parser.add_argument("--lanes", type=int, choices=(1, 2), default=2)
    parser.add_argument("--limit-s", type=float, default=150.0, help="of an answer: cut then")
    parser.add_argument("--cpu", action="store_true", help="one CPU slice, to try it without a GPU")
    parser.add_argument(
        "--serve", default="", help="more arguments of `c2cserve serve`, one string"
    )
    parser.add_argument("--work", type=Path, help="for checkpoints and pool; /dev/shm")
    parser.add_argument("--out", type=Path, help="JSON")
    given = parser.parse_args(arguments)
    if given.near == given.far:
        parser.error("the models must have two shapes")
    return given


def _slice_of(given: argparse.Namespace) -> list[str]:
    arena_bytes = weight_bytes(given.near) + round(given.room_gb * 1e9)
    lanes = [] if given.cpu else ["--gpu-lanes", str(given.lanes)]
    own = one_slice(arena_bytes, gpu=None if given.cpu else 0)
    return [*own, *lanes, *shlex.split(given.serve)]


# ---- phases -------------------------------------------------------------------------------------


def measure(server: Server, near: str, far: str, given: argparse.Namespace) -> Figures:
    """Run the phases. Raises ValueError if a request is not answered, or none overlap."""
    vocab = config_of(given.near).vocab
    phases = _Phases(server, given, min(vocab, config_of(given.far).vocab))
    phases.near(near)  # whatever is loaded or captured at first use is in no phase
    phases.far(far, _WARM_TOKENS)
    tell("both models are warm")
    alone = phases.near(near)
    far_alone, far_bytes = phases.far(far, max(2, given.tokens // _FAR_ALONE))
    tell("each has answered alone")
    phases.near(near)
    beside, far_beside, beside_bytes = phases.beside(near, far, given.tokens)
    window = far_beside.first_s, far_beside.last_s
    both = min(r.first_s for r in beside), max(r.last_s for r in beside)
    results: Figures = {
        "near_alone": _figures(_gaps(alone)) | _tpot(alone),
        "near_beside": _figures(_gaps(beside, *window)) | _tpot(beside, *window),
        "far_alone": _figures(_gaps([far_alone])) | _streamed(far_alone, far_bytes),
        "far_beside": _figures(_gaps([far_beside], *both)) | _streamed(far_beside, beside_bytes),
    }  # fmt: skip
    slow_s = _NEAR_BAR * results["near_alone"]["p50_ms"] / 1e3
    results["near_beside"]["slow_by_phase"] = slow_by_phase(beside, far_beside, slow_s)
    return results | {"ratios": _ratios(results)}


class _Phases:
    def __init__(self, server: Server, given: argparse.Namespace, vocab: int) -> None:
        self._server, self._given, self._vocab = server, given, vocab
        self._random = random.Random(1)

    def near(self, model: str) -> list[Record]:
        """Users ask the near model, and nothing else runs."""
        return _answered(asyncio.run(self._near(model, time.monotonic())))

    def far(self, model: str, tokens: int) -> tuple[Record, float]:
        """The far model answers alone. Return the answer and the bytes that streamed meanwhile."""
        before = self._streamed()
        [record] = _answered(asyncio.run(self._far(model, tokens, time.monotonic())))
        return record, self._streamed() - before

    def beside(self, near: str, far: str, tokens: int) -> tuple[list[Record], Record, float]:
        """Both at once, until the far model's answer is whole."""

        async def run() -> tuple[list[Record], list[Record]]:
            start_s = time.monotonic()
            answer = asyncio.create_task(self._far(far, tokens, start_s))
            records: list[Record] = []
            while not answer.done():
                records += await self._near(near, start_s)
            return records, await answer

        before = self._streamed()
        beside, [record] = map(_answered, asyncio.run(run()))
        return beside, record, self._streamed() - before

    async def _near(self, model: str, start_s: float) -> list[Record]:
        given, users = self._given, self._given.users
        asked = [self._planned(model, given.output) for _ in range(_REQUESTS * users)]
        return await self._send(asked, users, start_s)

    async def _far(self, model: str, tokens: int, start_s: float) -> list[Record]:
        return await self._send([self._planned(model, tokens)], 1, start_s)

    async def _send(self, asked: list[Planned], users: int, start_s: float) -> list[Record]:
        load = Load(
            self._server.url, "/v1/completions", asked, concurrency=users,
            timeout_s=self._given.limit_s, start_s=start_s,
        )  # fmt: skip
        return (await generate(load, lambda _: None)).records

    def _planned(self, model: str, tokens: int) -> Planned:
        prompt = [
            self._random.randrange(_LOWEST_ID, self._vocab) for _ in range(self._given.prompt)
        ]
        body: Figures = {
            "model": model, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True,
            "temperature": 0, "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        return Planned(0, model, json.dumps(body).encode())

    def _streamed(self) -> float:
        return self._server.metrics().get(_STREAMED, 0.0)


def _answered(records: list[Record]) -> list[Record]:
    """Return the answers, also those that were cut after some tokens. Raises ValueError for others
    that are not whole."""
    for record in records:
        cut = record.error == "timeout" and record.gaps_s
        if not (record.ok or cut):
            raise ValueError(f"{record.model}: {record.error}: {record.error_detail}")
    return records


# ---- figures ------------------------------------------------------------------------------------


def _gaps(records: Sequence[Record], since_s: float = -inf, until_s: float = inf) -> list[float]:
    """Return the times between tokens that lie within [since_s, until_s], in order of size."""
    found: list[float] = []
    for record in records:
        ends = accumulate(record.gaps_s, initial=record.first_s)
        for gap_s, (begin_s, end_s) in zip(record.gaps_s, pairwise(ends), strict=True):
            if since_s <= begin_s and end_s <= until_s:
                found.append(gap_s)
    return sorted(found)


def slow_by_phase(near: Sequence[Record], far: Record, slow_s: float) -> list[tuple[int, int]]:
    """Return (times over `slow_s`, all times) between tokens of `near`, by the twentieth of a step
    of `far` in which they began."""
    steps = list(accumulate(far.gaps_s, initial=far.first_s))
    found = [[0, 0] for _ in range(_PHASES)]
    for record in near:
        begins = accumulate(record.gaps_s, initial=record.first_s)
        for gap_s, begin_s in zip(record.gaps_s, begins, strict=False):
            step = bisect_right(steps, begin_s) - 1
            if 0 <= step < len(steps) - 1:
                took_s = max(1e-9, steps[step + 1] - steps[step])
                phase = min(_PHASES - 1, int(_PHASES * (begin_s - steps[step]) / took_s))
                found[phase][0] += gap_s > slow_s
                found[phase][1] += 1
    return [(slow, every) for slow, every in found]


def _tpot(records: Sequence[Record], since_s: float = -inf, until_s: float = inf) -> Figures:
    """Return the p99 of what requests within [since_s, until_s] took per token, in the mean."""
    means = sorted(
        sum(record.gaps_s) / len(record.gaps_s)
        for record in records
        if record.gaps_s and since_s <= record.first_s and record.last_s <= until_s
    )
    return {"tpot_p99_ms": 1e3 * percentile(means, 0.99)} if means else {}


def _figures(gaps: Sequence[float]) -> Figures:
    if not gaps:
        raise ValueError("no time between tokens lies within the phase: ask for more tokens")
    return {
        "gaps": len(gaps), "mean_ms": 1e3 * sum(gaps) / len(gaps),
        **{f"p{share}_ms": 1e3 * percentile(gaps, share / 100) for share in (50, 90, 99)},
        "max_ms": 1e3 * gaps[-1],
    }  # fmt: skip


def _streamed(record: Record, streamed_bytes: float) -> Figures:
    tokens = record.output_tokens or 1 + len(record.gaps_s)
    per_token = streamed_bytes / 1e9 / tokens
    return {"tokens": tokens, "cut": not record.ok, "streamed_gb_per_token": per_token}


def _ratios(results: Figures) -> Figures:
    near = {
        share: results["near_beside"][share] / results["near_alone"][share]
        for share in ("mean_ms", "p50_ms", "p99_ms", "tpot_p99_ms")
        if share in results["near_beside"]
    }
    alone, beside = results["far_alone"], results["far_beside"]
    far = {"mean_ms": beside["mean_ms"] / alone["mean_ms"]}
    if alone["streamed_gb_per_token"]:
        rates = [one["mean_ms"] / one["streamed_gb_per_token"] for one in (beside, alone)]
        far["ms_per_gb"] = rates[0] / rates[1]
    judged = far.get("ms_per_gb", far["mean_ms"])
    return {
        "near": near, "far": far, "near_bar": _NEAR_BAR, "far_bar": _FAR_BAR,
        "held": near["p99_ms"] <= _NEAR_BAR and judged <= _FAR_BAR,
    }  # fmt: skip


if __name__ == "__main__":
    main()
