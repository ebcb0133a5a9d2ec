"""How fast two builds of the CPU kernels are beside each other, in turns: JSON.

python benchmarks/cpu_builds.py NAME=FOLDER NAME=FOLDER [--level amx] [--models 0.5B]
    [--prompts 128,512] [--decodes 1,4,16] [--context 256] [--chunks 512,640] [--threads 2]
    [--rounds 9] [--out FILE]

A folder has one library for each level (`python -m c2cserve.kernels.build`). All builds are in one
process, on the same threads' cores and weights. A step is what a model computes of it: all layers,
the last norm, and the head for the rows that get a token. Tokens of all builds must be equal.

    prompt   one prompt of so many tokens
    decode   one token of each of so many sequences, with `--context` tokens before it.
             `share_of_read`: the time of a loop that only reads the weights over a step's, the
             median over rounds. `share_of_best_read`: its best round over the median step
    chunks   each prompt in steps of so many tokens at most, with the last build. `ratio`: the time
             of the first size of chunks by another's

`ratio` is the median over rounds of the first build's time by another's: above 1, it is faster.
"""

import argparse
import os
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from cpu_prompt_parts import MODELS, numbers
from gpu_models import config_of
from report import report
from torch import Tensor

from c2cserve.engine.cpu.arena import make_arena
from c2cserve.kernels import native
from c2cserve.kernels.cpu_ops import CpuOps
from c2cserve.kernels.layer import (
    BLOCK_TOKENS,
    KvLayout,
    Layer,
    LayerShape,
    LayerWeights,
    Mlp,
    TokenRows,
)
from c2cserve.kernels.layer_records import native_layer

_NOISE = 1 << 20


class Weights:
    """All weights of a model, one after another. What they are does not matter for the time."""

    def __init__(self, model: str) -> None:
        self.config = config_of(MODELS[model])
        config, self._at = self.config, 0
        wide = (config.heads + 2 * config.kv_heads) * config.head_dim
        hidden, inner, attended = config.hidden, config.intermediate, config.heads * config.head_dim
        layer = hidden * (wide + attended + 3 * inner)
        size = config.layers * layer + config.vocab * hidden
        self.flat = torch.randn(_NOISE).bfloat16().repeat(-(-size // _NOISE) + 1)[: size + size % 2]
        self.kv = KvLayout(config.layers, config.kv_heads, config.head_dim, "bfloat16")
        self.shape = LayerShape(self.kv, hidden, config.heads, 1e-6, config.head_dim**-0.5)
        self.norm = torch.full((hidden,), hidden**-0.5)
        self.layers: list[Layer] = [
            native_layer(index, LayerWeights(
                self.norm, self._matrix(wide, hidden), torch.zeros(wide), None,
                self._matrix(hidden, attended), None, self.norm,
                Mlp(self._matrix(2 * inner, hidden), None, self._matrix(hidden, inner), None), 0,
            ), self.shape)
            for index in range(config.layers)
        ]  # fmt: skip
        self.head = self._matrix(config.vocab, hidden)

    def _matrix(self, outputs: int, inputs: int) -> Tensor:
        begin, self._at = self._at, self._at + outputs * inputs
        return self.flat[begin : self._at].view(outputs, inputs)


class Step:
    """The last `new` of `context` tokens of each of `seqs` sequences."""

    def __init__(
        self,
        weights: Weights,
        seqs: int,
        new: int,
        context: int,
        arena: Tensor | None = None,
        *,
        emits: bool = True,
    ) -> None:
        self.weights, kv = weights, weights.kv
        blocks = -(-context // BLOCK_TOKENS)
        self._bytes = seqs * blocks * kv.block_bytes
        self._arenas: dict[CpuOps | None, Tensor] = {} if arena is None else {None: arena}
        order = torch.randperm(seqs * blocks, generator=torch.Generator().manual_seed(0))
        table = (order * kv.block_bytes).view(seqs, blocks)
        at = torch.arange(context - new, context)
        slots = table[:, at // BLOCK_TOKENS] * BLOCK_TOKENS + at % BLOCK_TOKENS
        self.rows = TokenRows(
            at.int().repeat(seqs), torch.arange(0, seqs * new + 1, new, dtype=torch.int32),
            torch.full((seqs,), context, dtype=torch.int32), table, slots.flatten(),
        )  # fmt: skip
        half = kv.head_dim // 2
        angles = torch.arange(context)[:, None] / 1e4 ** (torch.arange(half) / half)
        self.rope = angles.cos().contiguous(), angles.sin().contiguous()
        self.hidden = torch.randn(seqs * new, weights.config.hidden)
        self.wanted = torch.arange(new - 1, seqs * new, new) if emits else torch.arange(0)

    def arena(self, ops: CpuOps) -> Tensor:
        """Return the blocks of a build. Builds may lay them out differently."""
        if None in self._arenas:
            return self._arenas[None]
        if ops not in self._arenas:
            self._arenas[ops] = make_arena(self._bytes).zero_()
        return self._arenas[ops]

    def run(self, ops: CpuOps) -> tuple[float, Tensor]:
        """Return the seconds it takes, and the logits."""
        weights, hidden, arena = self.weights, self.hidden.clone(), self.arena(ops)
        began_s = time.perf_counter()
        ops.run_layers(hidden, weights.layers, self.rows, self.rope, arena, self.wanted)
        last = hidden if len(self.wanted) == len(hidden) else hidden[self.wanted]
        last = ops.rms_norm(last, weights.norm, weights.shape.eps)
        logits = ops.linear(last, weights.head) if len(last) else last
        return time.perf_counter() - began_s, logits


def chunked(ops: CpuOps, weights: Weights, size: int, chunk: int) -> list[Step]:
    """Return the steps of a prompt. Their blocks overlap: that is all the same to the time."""
    arena = Step(weights, 1, 1, size).arena(ops)
    ends = [*range(chunk, size, chunk), size]
    return [
        Step(weights, 1, end - begin, end, arena, emits=end == size)
        for begin, end in zip([0, *ends], ends, strict=False)
    ]


def compare_chunks(
    ops: CpuOps, weights: Weights, size: int, chunks: list[int], rounds: int
) -> dict[str, Any]:
    steps = {chunk: chunked(ops, weights, size, chunk) for chunk in chunks}
    took: dict[int, list[float]] = {chunk: [] for chunk in chunks}
    for number in range(rounds + 1):
        for chunk in chunks if number % 2 else chunks[::-1]:
            seconds = sum(step.run(ops)[0] for step in steps[chunk])
            took[chunk] += [seconds] if number else []
    first = took[chunks[0]]
    return {
        "steps": {chunk: len(steps[chunk]) for chunk in chunks},
        "ms": {chunk: round(median(took[chunk]) * 1e3, 3) for chunk in chunks},
        "ratio": {
            chunk: round(median(a / b for a, b in zip(first, took[chunk], strict=True)), 3)
            for chunk in chunks
        },
    }


def loaded(folder: Path, level: str, threads: int) -> CpuOps:
    """Return the operators of a build."""
    native.LIBRARY_FOLDER = folder
    native.load_library.cache_clear()
    cpus = sorted(os.sched_getaffinity(0))[:threads]
    return CpuOps(threads, cpus if threads > 1 else None, level)


def compare(builds: dict[str, CpuOps], step: Step, rounds: int, *, reads: bool) -> dict[str, Any]:
    took: dict[str, list[float]] = {name: [] for name in builds}
    first, *others = names = list(builds)
    read_s: list[float] = []
    for number in range(rounds + 1):  # the first round warms up
        logits: dict[str, Tensor] = {}
        for name in names if number % 2 else names[::-1]:
            seconds, logits[name] = step.run(builds[name])
            took[name] += [seconds] if number else []
        assert all(torch.equal(one, logits[first]) for one in logits.values()), "not the same bits"
        if reads:
            began_s = time.perf_counter()
            builds[first].read(step.weights.flat.view(torch.float32))
            read_s += [time.perf_counter() - began_s] if number else []
    found: dict[str, Any] = {
        "ms": {name: round(median(took[name]) * 1e3, 3) for name in names},
        "ratio": {
            name: round(median(a / b for a, b in zip(took[first], took[name], strict=True)), 3)
            for name in others
        },
    }
    if reads:
        for n in names:
            shares = [read / step for read, step in zip(read_s, took[n], strict=True)]
            found.setdefault("share_of_read", {})[n] = round(median(shares), 3)
            best = round(min(read_s) / median(took[n]), 3)
            found.setdefault("share_of_best_read", {})[n] = best
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("builds", nargs="+", help="NAME=FOLDER")
    parser.add_argument("--level", default=native.chosen_isa())
    parser.add_argument("--models", default="0.5B")
    parser.add_argument("--prompts", default=[128, 512], type=numbers)
    parser.add_argument("--decodes", default=[1, 4, 16], type=numbers)
    parser.add_argument("--context", default=256, type=int)
    parser.add_argument("--chunks", default=[], type=numbers)
    parser.add_argument("--threads", default=len(os.sched_getaffinity(0)), type=int)
    parser.add_argument("--rounds", default=9, type=int)
    parser.add_argument("--out", type=Path, help="JSON")
    given = parser.parse_args()
    torch.set_num_threads(1)
    folders = {name: Path(at) for name, at in (one.split("=", 1) for one in given.builds)}
    builds = {name: loaded(at, given.level, given.threads) for name, at in folders.items()}
    rows: list[dict[str, Any]] = []

    def record(model: str, of: str, size: int, found: dict[str, Any]) -> None:
        """What a run that is ended has measured is not lost."""
        rows.append({"model": model, "of": of, "size": size, **found})
        print(rows[-1], flush=True)
        report(
            {"steps": rows}, given.out, show=False, threads=given.threads, level=given.level,
            rounds=given.rounds, context=given.context,
        )  # fmt: skip

    for model in given.models.split(","):
        weights = Weights(model)
        cases = [("prompt", 1, size, size) for size in given.prompts]
        cases += [("decode", seqs, 1, given.context) for seqs in given.decodes]
        for of, seqs, new, context in cases:
            step = Step(weights, seqs, new, context)
            found = compare(builds, step, given.rounds, reads=of == "decode")
            record(model, of, seqs * new, found)
        for size in given.prompts if given.chunks else ():
            last = list(builds.values())[-1]
            found = compare_chunks(last, weights, size, given.chunks, given.rounds)
            record(model, "chunks", size, found)


if __name__ == "__main__":
    main()
