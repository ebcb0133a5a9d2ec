"""The CPU kernels against the machine's own ceilings and torch, in one run: JSON on stdout.

python benchmarks/cpu_kernels.py [--threads N] [--quick] [--out FILE]

For every shape, the kernel, a loop that only reads the same bytes, a loop that only multiplies and
torch's linear take turns until their time is up, and the best of each counts: on a shared machine
medians tell more about the neighbours (`load_before` is what else ran). For the same reason one
thread is timed by the processor time it got, several by the clock on the wall.
"""

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
from report import report

from c2cserve.kernels.cpu_ops import CpuOps
from c2cserve.kernels.layer import KvLayout
from c2cserve.kernels.ops import RowSampling

SHAPES = ((2048, 2048), (8192, 2048), (2048, 8192), (128256, 2048))
ROWS = (1, 2, 4, 8, 16, 64, 512)
WIDE = 10_000  # outputs from which on large batches are left out: only logits are that wide
ATTENTION = (
    (32, 8, 64, 2048, 1),
    (32, 8, 64, 2048, 8),
    (32, 8, 128, 8192, 1),
    (32, 32, 128, 2048, 1),
)
ROUNDS = 200_000


def best_s(ops: CpuOps, least_s: float, **calls: Callable[[], object]) -> dict[str, float]:
    """Best time of each, taking turns; at least three turns."""
    clock = time.thread_time if ops.threads == 1 else time.perf_counter
    best = dict.fromkeys(calls, float("inf"))
    end, turns = time.perf_counter() + least_s, 0
    while turns < 3 or time.perf_counter() < end:
        for name, call in calls.items():
            start = clock()
            call()
            best[name] = min(best[name], clock() - start)
        turns += 1
    return best


def linear(ops: CpuOps, m: int, n: int, k: int, least_s: float) -> dict[str, float | int]:
    x, w = torch.randn(m, k), torch.randn(n, k, dtype=torch.bfloat16)
    narrow, wide, bits = x.bfloat16(), w.float() if n < WIDE else None, w.view(torch.float32)
    calls: dict[str, Callable[[], object]] = {
        "ours": lambda: ops.linear(x, w),
        "read": lambda: ops.read(bits),
        "multiply": lambda: ops.multiply(ROUNDS),
        "torch_bf16": lambda: torch.nn.functional.linear(narrow, w),
    }
    if wide is not None:
        calls["torch_f32"] = lambda: torch.nn.functional.linear(x, wide)
    taken = best_s(ops, least_s, **calls)
    flop, peak = 2 * m * n * k, ops.multiply(ROUNDS) / taken["multiply"]
    return {
        "m": m, "n": n, "k": k, "ms": taken["ours"] * 1e3,
        "weights_gb_per_s": w.nbytes / taken["ours"] / 1e9,
        "read_gb_per_s": w.nbytes / taken["read"] / 1e9,
        "share_of_read": taken["read"] / taken["ours"],
        "gflop_per_s": flop / taken["ours"] / 1e9,
        "peak_gflop_per_s": peak / 1e9,
        "share_of_peak": flop / taken["ours"] / peak,
        **{f"times_{k}": t / taken["ours"] for k, t in taken.items() if k.startswith("torch")},
    }  # fmt: skip


def attention(
    ops: CpuOps, heads: int, kv_heads: int, dim: int, context: int, seqs: int, least_s: float
) -> dict[str, float | int]:
    """One decode step of `seqs` sequences over scattered blocks."""
    kv = KvLayout(1, kv_heads, dim, "bfloat16")
    blocks = context // 16 * seqs
    arena = torch.randn(blocks * kv.block_bytes // 2).bfloat16().view(torch.uint8)
    table = (torch.randperm(blocks) * kv.block_bytes).view(seqs, -1)
    qkv = torch.randn(seqs, (heads + 2 * kv_heads) * dim)
    starts = torch.arange(seqs + 1, dtype=torch.int32)
    lengths = torch.full((seqs,), context, dtype=torch.int32)
    bits = arena.view(torch.float32)
    taken = best_s(
        ops,
        least_s,
        ours=lambda: ops.attention(qkv, arena, kv, 0, starts, lengths, table, 0.1, 0),
        read=lambda: ops.read(bits),
    )
    return {
        "heads": heads, "kv_heads": kv_heads, "head_dim": dim, "context": context, "seqs": seqs,
        "us": taken["ours"] * 1e6, "kv_gb_per_s": arena.nbytes / taken["ours"] / 1e9,
        "share_of_read": taken["read"] / taken["ours"],
    }  # fmt: skip


def small(ops: CpuOps, least_s: float) -> dict[str, float]:
    """Microseconds a call costs where there is next to nothing to do, and of sampling."""
    x, w, weight = torch.randn(1, 64), torch.randn(64, 64).bfloat16(), torch.ones(64)
    logits = torch.randn(1, 128256) * 3

    def sample(**how: float) -> Callable[[], object]:
        return lambda: ops.sample(logits, [RowSampling(1, 1, **how)])

    taken = best_s(
        ops,
        least_s,
        linear_1x64x64=lambda: ops.linear(x, w),
        rms_norm_1x64=lambda: ops.rms_norm(x, weight, 1e-5),
        sample_128256_greedy=sample(temperature=0.0),
        sample_128256=sample(),
        sample_128256_top_k_50_top_p_90=sample(top_k=50, top_p=0.9),
    )
    return {f"{name}_us": t * 1e6 for name, t in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--quick", action="store_true", help="a tenth of the time per row")
    parser.add_argument("--out", type=Path, help="JSON")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    ops = CpuOps(given.threads)
    least_s = 0.2 if given.quick else 2.0
    results = {
        "isa": ops.isa, "torch": torch.__version__,
        "linear_bf16": [
            linear(ops, m, n, k, least_s) for n, k in SHAPES for m in ROWS if n < WIDE or m <= 16
        ],
        "attention_decode_bf16": [attention(ops, *shape, least_s) for shape in ATTENTION],
        "small": small(ops, least_s),
    }  # fmt: skip
    report(results, given.out, threads=given.threads, quick=given.quick)


if __name__ == "__main__":
    main()
