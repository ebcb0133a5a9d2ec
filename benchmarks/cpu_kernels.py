"""The CPU kernels of each level against torch's (oneDNN) and this machine's memory, in one run.

python benchmarks/cpu_kernels.py [--threads N] [--levels amx,avx512_bf16] [--models 0.5B,8B]
                                 [--parts gemm,decode] [--seconds S] [--out FILE]

All that is compared takes turns until its time is up, and the best turn of each counts. On a shared
machine, medians tell more about the neighbours (`load_before` is what else ran). For the same
reason one thread is timed by the processor time it got, several by the clock on the wall.

    gemm       a layer's matrices, 32 to 512 rows. `times_torch`: torch's time over ours. torch's
               linear takes the weights as they are; `times_prepacked` is torch with weights that
               oneDNN has laid out for itself beforehand, a second copy. "amx/chunks" is the level
               `amx` with copies of all weights for more than 32 rows; `same_bits` says whether
               it gives the bits of the default. "gated" is gate and up with what combines them,
               also in torch.
    tiles      the level `amx` multiplies operands that come from one cache or another: what `gemm`
               can reach. KiB of w and of x that are read round and round.
    decode     all matrices of as many layers as exceed every cache, for 1 to 16 rows: bytes of
               weights per second, and as a share of a loop that only reads them.
    attention  a prompt's attention over its own blocks, and a decode step's over scattered blocks.
"""

import argparse
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from report import report
from torch import Tensor

from c2cserve.kernels.cpu_ops import CpuOps
from c2cserve.kernels.layer import KvLayout
from c2cserve.kernels.native import ISAS, best_isa, usable_flags
from c2cserve.kernels.ops import RowSampling

Calls = dict[str, Callable[[], object]]
Record = dict[str, float | int | str]

# [outputs, inputs] of qkv, o, gate and up, down: Qwen2.5-0.5B and -1.5B, Llama-3.1-8B.
MODELS: dict[str, dict[str, tuple[int, int]]] = {
    "0.5B": {"qkv": (1152, 896), "o": (896, 896), "up": (9728, 896), "down": (896, 4864)},
    "1.5B": {"qkv": (2048, 1536), "o": (1536, 1536), "up": (17920, 1536), "down": (1536, 8960)},
    "8B": {"qkv": (6144, 4096), "o": (4096, 4096), "up": (28672, 4096), "down": (4096, 14336)},
}
PARTS = ("gemm", "decode", "attention", "small", "tiles")
GEMM_ROWS = (32, 128, 512)
DECODE_ROWS = (1, 2, 4, 8, 16)
IN_PLACE_ROWS = 32  # at most: w of more rows may be copied
SETTLE_S = 0.05
"""How long torch's threads may wait in a loop for its next call, and take our threads' cores."""
DECODE_BYTES = 1 << 29  # of weights: more than the caches of a server's socket
# heads, kv heads, head size, context, sequences
DECODE_ATTENTION = ((14, 2, 64, 2048, 8), (32, 8, 128, 2048, 8), (32, 8, 128, 8192, 1))
TILE_OPERANDS = ((2, 2), (16, 16), (2, 512), (24, 512), (56, 512), (512, 512))  # KiB of w, of x
TILE_STEPS = 20_000
PROMPT_ATTENTION = ((14, 2, 64, 512), (14, 2, 64, 2048), (32, 8, 128, 2048))  # the same, one prompt


def best_s(threads: int, least_s: float, calls: Calls) -> dict[str, float]:
    """Return the best time of each, taking turns; at least three turns. Calls of torch are last."""
    clock = time.thread_time if threads == 1 else time.perf_counter
    best = dict.fromkeys(calls, float("inf"))
    spent, turns = 0.0, 0
    while turns < 3 or spent < least_s:
        if threads > 1:
            time.sleep(SETTLE_S)
        next(iter(calls.values()))()  # the first would be timed right after torch's threads
        begin = time.perf_counter()
        for name, call in calls.items():
            start = clock()
            call()
            best[name] = min(best[name], clock() - start)
        spent += time.perf_counter() - begin
        turns += 1
    return best


def torch_calls(x: Tensor, w: Tensor, *, gated: bool) -> Calls:
    narrow = x.bfloat16()

    def ended(y: Tensor) -> Tensor:
        gate, up = y.chunk(2, 1)
        return torch.nn.functional.silu(gate) * up

    end = ended if gated else lambda y: y
    calls: Calls = {"torch": lambda: end(torch.nn.functional.linear(narrow, w))}
    if torch.backends.mkldnn.is_available():
        packed = torch.ops.mkldnn._reorder_linear_weight(w, x.shape[0])
        calls["prepacked"] = lambda: end(
            torch.ops.mkldnn._linear_pointwise(narrow, packed, None, "none", [], "")
        )
    return calls


def gemm(
    levels: Sequence[CpuOps], m: int, n: int, k: int, least_s: float, *, gated: bool
) -> list[Record]:
    x, w, out = torch.randn(m, k), torch.randn(n, k).bfloat16() / k**0.5, torch.empty(m, n)

    def product(ops: CpuOps) -> Tensor:
        return ops.gated(x, w) if gated else ops.linear(x, w, None, out)

    def ours(ops: CpuOps, *, copies: bool = False) -> Callable[[], Tensor]:
        def call() -> Tensor:
            if ops.isa == "amx":
                ops.copy_strips(always=copies)
            return product(ops)

        return call

    theirs = torch_calls(x, w, gated=gated)
    mine = {ops.isa: ours(ops) for ops in levels}
    tiles = next((ops for ops in levels if ops.isa == "amx" and m > IN_PLACE_ROWS), None)
    same_bits: dict[str, int] = {}
    if tiles:
        usual = mine[tiles.isa]().clone()
        mine["amx/chunks"] = ours(tiles, copies=True)
        same_bits["amx/chunks"] = int(torch.equal(mine["amx/chunks"](), usual))
    taken = best_s(levels[0].threads, least_s, {**mine, **theirs})
    return [
        {
            "level": name, "m": m, "n": n, "k": k, "ms": taken[name] * 1e3,
            "gflop_per_s": 2 * m * n * k / taken[name] / 1e9,
            **{f"times_{other}": taken[other] / taken[name] for other in theirs},
            **({"same_bits": same_bits[name]} if name in same_bits else {}),
        }
        for name in mine
    ]  # fmt: skip


def tile_ceilings(ops: CpuOps, least_s: float) -> list[Record]:
    def call(w: int, x: int) -> Callable[[], object]:
        return lambda: ops.tile_steps(w << 10, x << 10, TILE_STEPS)

    names = {f"{w}/{x}": (w, x) for w, x in TILE_OPERANDS}
    taken = best_s(ops.threads, least_s, {name: call(*sizes) for name, sizes in names.items()})
    done = ops.tile_steps(2048, 2048, TILE_STEPS)
    return [
        {
            "w_kib": w, "x_kib": x, "gflop_per_s": done / taken[name] / 1e9,
            "step_ns": taken[name] / TILE_STEPS * 1e9,
        }
        for name, (w, x) in names.items()
    ]  # fmt: skip


class Layers:
    """All matrices of as many layers of a model as exceed every cache, one after another."""

    def __init__(self, model: str) -> None:
        shapes = MODELS[model].values()
        layer_bytes = sum(n * k * 2 for n, k in shapes)
        self.count = math.ceil(DECODE_BYTES / layer_bytes)
        some = torch.randn(1 << 20).bfloat16()
        size = self.count * layer_bytes // 2
        flat = some.repeat(math.ceil(size / some.numel()))[:size]
        self.bits, self.shapes = flat.view(torch.float32), shapes
        self.matrices: list[Tensor] = []
        at = 0
        for n, k in [*shapes] * self.count:
            self.matrices.append(flat[at : at + n * k].view(n, k))
            at += n * k

    def call(
        self, m: int, multiply: Callable[[Tensor, Tensor, Tensor], object]
    ) -> Callable[[], object]:
        """`multiply`(x, w, out) for all matrices, `m` rows each."""
        inputs = {k: torch.randn(m, k) for _, k in self.shapes}
        outputs = {n: torch.empty(m, n) for n, _ in self.shapes}
        return lambda: [multiply(inputs[w.shape[1]], w, outputs[len(w)]) for w in self.matrices]

    def rates(self, taken: dict[str, float], name: str) -> Record:
        return {
            "weights_gb_per_s": self.bits.nbytes / taken[name] / 1e9,
            "read_gb_per_s": self.bits.nbytes / taken["read"] / 1e9,
            "share_of_read": taken["read"] / taken[name],
        }


def decode(levels: Sequence[CpuOps], model: str, least_s: float) -> list[Record]:
    layers, records = Layers(model), list[Record]()
    for m in DECODE_ROWS:
        calls: Calls = {
            ops.isa: layers.call(m, lambda x, w, out, ops=ops: ops.linear(x, w, None, out))
            for ops in levels
        }
        calls["read"] = lambda: levels[0].read(layers.bits)
        narrow = {k: torch.randn(m, k).bfloat16() for _, k in layers.shapes}
        calls["torch"] = layers.call(
            m, lambda _x, w, _out, narrow=narrow: torch.nn.functional.linear(narrow[w.shape[1]], w)
        )
        taken = best_s(levels[0].threads, least_s, calls)
        records += [
            {
                "level": ops.isa, "model": model, "m": m, "layers": layers.count,
                **layers.rates(taken, ops.isa), "times_torch": taken["torch"] / taken[ops.isa],
            }
            for ops in levels
        ]  # fmt: skip
    return records


def attention(
    levels: Sequence[CpuOps], shape: tuple[int, int, int], context: int, seqs: int, new: int,
    least_s: float,
) -> list[Record]:  # fmt: skip
    """The last `new` tokens of each of `seqs` sequences, over scattered blocks."""
    heads, kv_heads, dim = shape
    kv = KvLayout(1, kv_heads, dim, "bfloat16")
    blocks = context // 16 * seqs
    arena = torch.randn(blocks * kv.block_bytes // 2).bfloat16().view(torch.uint8)
    table = (torch.randperm(blocks) * kv.block_bytes).view(seqs, -1)
    qkv = torch.randn(seqs * new, (heads + 2 * kv_heads) * dim)
    starts = torch.arange(0, seqs * new + 1, new, dtype=torch.int32)
    lengths = torch.full((seqs,), context, dtype=torch.int32)

    def ours(ops: CpuOps) -> Callable[[], object]:
        return lambda: ops.attention(qkv, arena, kv, 0, starts, lengths, table, dim**-0.5, 0)

    bits = arena.view(torch.float32)
    calls: Calls = {ops.isa: ours(ops) for ops in levels}
    taken = best_s(levels[0].threads, least_s, {**calls, "read": lambda: levels[0].read(bits)})
    pairs = seqs * (new * (context - new) + new * (new + 1) / 2)  # of a query and a key it sees
    return [
        {
            "level": ops.isa, "heads": heads, "kv_heads": kv_heads, "head_dim": dim,
            "context": context, "seqs": seqs, "new": new, "us": taken[ops.isa] * 1e6,
            "gflop_per_s": 4 * pairs * heads * dim / taken[ops.isa] / 1e9,
            "kv_gb_per_s": arena.nbytes / taken[ops.isa] / 1e9,
            "share_of_read": taken["read"] / taken[ops.isa],
        }
        for ops in levels
    ]  # fmt: skip


def small(ops: CpuOps, least_s: float) -> dict[str, float]:
    """Microseconds that a call costs where there is little to do, and those of sampling."""
    x, w, weight = torch.randn(1, 64), torch.randn(64, 64).bfloat16(), torch.ones(64)
    logits = torch.randn(1, 128256) * 3

    def sample(**how: float) -> Callable[[], object]:
        return lambda: ops.sample(logits, [RowSampling(1, 1, **how)])

    calls: Calls = {
        "linear_1x64x64": lambda: ops.linear(x, w),
        "rms_norm_1x64": lambda: ops.rms_norm(x, weight, 1e-5),
        "sample_128256_greedy": sample(temperature=0.0),
        "sample_128256": sample(),
        "sample_128256_top_k_50_top_p_90": sample(top_k=50, top_p=0.9),
    }
    taken = best_s(ops.threads, least_s, calls)
    return {f"{name}_us": t * 1e6 for name, t in taken.items()}


def gemms(levels: Sequence[CpuOps], given: argparse.Namespace) -> dict[str, Any]:
    records = [
        {"model": model, "matrix": "gated" if gated else name, **record}
        for model in given.models
        for name, (n, k) in MODELS[model].items()
        for gated in ((False, True) if name == "up" else (False,))
        for m in given.rows
        for record in gemm(levels, m, n, k, given.seconds, gated=gated)
    ]
    return {"gemm": records}


def tiles(levels: Sequence[CpuOps], given: argparse.Namespace) -> dict[str, Any]:
    found = [ops for ops in levels if ops.isa == "amx"]
    return {"tiles": [r for ops in found for r in tile_ceilings(ops, given.seconds)]}


def decodes(levels: Sequence[CpuOps], given: argparse.Namespace) -> dict[str, Any]:
    return {"decode": [r for model in given.models for r in decode(levels, model, given.seconds)]}


def attentions(levels: Sequence[CpuOps], given: argparse.Namespace) -> dict[str, Any]:
    return {
        "prompt_attention": [
            record
            for *shape, context in PROMPT_ATTENTION
            for record in attention(levels, tuple(shape), context, 1, context, given.seconds)
        ],
        "decode_attention": [
            record
            for *shape, context, seqs in DECODE_ATTENTION
            for record in attention(levels, tuple(shape), context, seqs, 1, given.seconds)
        ],
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    runnable = [isa for isa in ISAS if best_isa(usable_flags(), isa) == isa]
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--levels", type=lambda text: text.split(","), default=runnable[:3])
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(MODELS))
    parser.add_argument("--parts", type=lambda text: text.split(","), default=PARTS)
    parser.add_argument("--rows", type=lambda t: [int(m) for m in t.split(",")], default=GEMM_ROWS)
    parser.add_argument("--seconds", type=float, default=0.5, help="at least, per measurement")
    parser.add_argument("--out", type=Path, help="JSON")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    torch.set_num_threads(given.threads)
    cpus = sorted(os.sched_getaffinity(0))[: given.threads]
    levels = [CpuOps(given.threads, cpus if given.threads > 1 else None, isa)
              for isa in given.levels]  # fmt: skip
    measure = {
        "gemm": gemms, "decode": decodes, "attention": attentions, "tiles": tiles,
        "small": lambda levels, given: {"small": small(levels[0], given.seconds)},
    }  # fmt: skip
    results: dict[str, Any] = {
        "torch": torch.__version__,
        "onednn": torch.backends.mkldnn.is_available(),
    }
    for part in given.parts:
        results |= measure[part](levels, given)
    report(results, given.out, threads=given.threads, seconds=given.seconds)


if __name__ == "__main__":
    main()
