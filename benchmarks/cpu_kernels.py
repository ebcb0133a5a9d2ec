"""The CPU kernels against the machine's own ceilings and torch, in one run: JSON on stdout.

python benchmarks/cpu_kernels.py [--threads N]
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable

import torch

from c2cserve.kernels.cpu_ops import CpuOps
from c2cserve.kernels.native import load_library

SHAPES = ((2048, 2048), (8192, 2048), (2048, 8192), (128256, 2048))


def seconds(call: Callable[[], object], least_s: float = 0.4) -> float:
    """Median of repeated calls."""
    call()
    times: list[float] = []
    while sum(times) < least_s or len(times) < 3:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    threads = parser.parse_args().threads
    torch.set_num_threads(threads)
    ops = CpuOps(threads)
    data = torch.ones(256 << 20 >> 2)
    read = load_library(ops.isa).c2c_read_bandwidth
    ceiling = data.nbytes / seconds(lambda: read(ops._pool, data.data_ptr(), data.numel()))
    square = torch.ones(1024, 1024)
    peak = 2 * 1024**3 / seconds(lambda: square @ square)
    rows = []
    for n, k in SHAPES:
        w = torch.randn(n, k, dtype=torch.bfloat16)
        for m in (1, 2, 4, 8, 16, 64, 256):
            if m > 16 and n > 10_000:
                continue
            x = torch.randn(m, k)
            ours = seconds(lambda x=x, w=w: ops.linear(x, w))
            narrow = x.bfloat16()
            peer = seconds(lambda x=narrow, w=w: torch.nn.functional.linear(x, w))
            rows.append(
                {
                    "m": m, "n": n, "k": k, "ms": ours * 1e3, "torch_bf16_ms": peer * 1e3,
                    "weights_gb_per_s": w.nbytes / ours / 1e9,
                    "share_of_read_ceiling": w.nbytes / ours / ceiling,
                    "share_of_float32_peak": 2 * m * n * k / ours / peak,
                }
            )  # fmt: skip
    print(
        json.dumps(
            {
                "isa": ops.isa, "threads": threads, "read_gb_per_s": ceiling / 1e9,
                "torch_float32_gflop_per_s": peak / 1e9, "linear": rows,
            },
            indent=1,
        )
    )  # fmt: skip


if __name__ == "__main__":
    main()
