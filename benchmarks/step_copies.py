"""Decode steps beside plain copies over the GPU's own link: does what moves KV slow what computes?

python benchmarks/step_copies.py [--shape llama-8b] [--decodes 16,32,64] [--context 1040]
    [--piece-mib 2] [--urgent] [--steps N] [--rates measured|assumed] [--out FILE]

All weights are in HBM. From step to step, the next one launched while this one runs, as a slice
does it: alone, beside copies of KV's size to host memory (`out`), from it (`in`), both, and alone
again. Copies run on streams of their own by CUDA's copy engines, without a pause. The streams have
the usual priority, or with --urgent the highest, as those of the transfer engine have. `over_alone`
is the step's time over the mean of both times alone.
"""

import argparse
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from gpu_models import SHAPES
from report import report
from step_launch import Bench, open_gpu

_KV_BYTES = 28 << 30
_BUFFER = 1 << 30
_AT_ONCE_BYTES = 128 << 20
"""Copies that are queued at a time. The thread waits for them without holding the interpreter."""
_BESIDE = ("alone", "out", "in", "both", "alone again")

Row = dict[str, Any]


class Copies:
    """Copies without a pause, within `with copies.beside(...)`."""

    def __init__(self, piece: int, *, urgent: bool) -> None:
        self._piece = piece
        self._priority = min(torch.cuda.Stream.priority_range()) if urgent else 0
        self._here = torch.empty(2, _BUFFER, dtype=torch.uint8, device="cuda")
        self._there = torch.empty(2, _BUFFER, dtype=torch.uint8, pin_memory=True)

    @contextmanager
    def beside(self, what: str) -> Generator[dict[str, float]]:
        """Yield a dict that has bytes a second of each direction once the block is left."""
        over, rates = threading.Event(), dict[str, float]()
        directions = {"out": ["out"], "in": ["in"], "both": ["out", "in"]}.get(what, [])
        threads = [
            threading.Thread(target=self._run, args=(direction, over, rates))
            for direction in directions
        ]
        for thread in threads:
            thread.start()
        try:
            yield rates
        finally:
            over.set()
            for thread in threads:
                thread.join()

    def _run(self, direction: str, over: threading.Event, rates: dict[str, float]) -> None:
        torch.cuda.set_device(0)
        number = 0 if direction == "out" else 1
        here, there = self._here[number], self._there[number]
        source, target = (here, there) if direction == "out" else (there, here)
        stream = torch.cuda.Stream(priority=self._priority)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        turns, queued = 0, [torch.cuda.Event(blocking=True) for _ in range(2)]
        with torch.cuda.stream(stream):
            begin.record()
            while not over.is_set():
                at = turns * _AT_ONCE_BYTES % _BUFFER
                for start in range(at, at + _AT_ONCE_BYTES, self._piece):
                    piece = slice(start, start + self._piece)
                    target[piece].copy_(source[piece], non_blocking=True)
                queued[turns % 2].record()
                turns += 1
                if turns > 1:
                    queued[turns % 2].synchronize()
            end.record()
        end.synchronize()
        rates[direction] = turns * _AT_ONCE_BYTES / (begin.elapsed_time(end) / 1e3)


class Beside(Bench):
    def row(self, decodes: int, context: int, copies: Copies, what: str) -> Row:
        talks = self._talks(decodes, context)
        with copies.beside(what) as rates:
            step_s, slowest_s = self._wall_s(talks, 0)
        self._engine.end()
        times = {"step_s": step_s, "slowest_s": slowest_s}
        return {"decodes": decodes, "context": context, "beside": what, **times, "copies": rates}


def main() -> None:
    given = _arguments()
    bench = Beside(open_gpu("step_copies", _KV_BYTES, given.rates), given)
    copies = Copies(given.piece_mib << 20, urgent=given.urgent)
    rows: list[Row] = []
    for decodes in given.decodes:
        found = [bench.row(decodes, given.context, copies, what) for what in _BESIDE]
        alone_s = (found[0]["step_s"] + found[-1]["step_s"]) / 2
        for row in found:
            rows.append({"shape": given.shape, **row, "over_alone": row["step_s"] / alone_s})
            rates = ", ".join(f"{k} {v / 1e9:.1f} GB/s" for k, v in row["copies"].items())
            print(
                f"{decodes} decodes at {given.context}, {row['beside']}: {row['step_s'] * 1e3:.2f}"
                f" ms, {rows[-1]['over_alone']:.2f} of alone {rates}", flush=True,
            )  # fmt: skip
    report(
        {"gpu": torch.cuda.get_device_name(0), "steps": rows}, given.out, show=False,
        shape=given.shape, piece_mib=given.piece_mib, urgent=given.urgent, steps=given.steps,
    )  # fmt: skip


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="llama-8b", choices=SHAPES)
    parser.add_argument(
        "--decodes", type=lambda text: [int(one) for one in text.split(",")], default="16,32,64"
    )
    parser.add_argument("--context", type=int, default=1040, help="tokens")
    parser.add_argument("--piece-mib", type=int, default=2, help="of one copy")
    parser.add_argument("--urgent", action="store_true", help="copies of the highest priority")
    parser.add_argument("--steps", type=int, default=24, help="timed steps of a kind")
    parser.add_argument("--rates", choices=("measured", "assumed"), help="of GEMMs")
    parser.add_argument("--out", type=Path, help="JSON")
    parser.set_defaults(layers=None, kept=False)
    return parser.parse_args()


if __name__ == "__main__":
    main()
