"""Measuring how fast this host reads its memory, which bounds decoding on CPUs."""

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from c2cserve.core.machine import Link, Machine

_BYTES_PER_THREAD = 64 << 20
"""Bytes per thread: well beyond one core's share of any cache."""
_MEASURE_S = 0.4


def measure_host_read(machine: Machine) -> Link:
    """Read with one thread per physical core, as slices do, and report the best pass.

    It takes about half a second and 64 MiB per core, at most a quarter of the available memory. The
    threads read at the same time, as numpy reductions release the interpreter lock.
    """
    threads = max(1, len(machine.cores))
    each = min(_BYTES_PER_THREAD, machine.memory_available_bytes // 4 // threads)
    words = max(1 << 10, each // 8)
    parts = [np.ones(words, dtype=np.int64) for _ in range(threads)]
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        end_s = time.monotonic() + _MEASURE_S
        while best == 0.0 or time.monotonic() < end_s:
            start_s = time.perf_counter()
            list(pool.map(np.max, parts))
            best = max(best, threads * words * 8 / (time.perf_counter() - start_s))
    return Link("host", "memory", "cpu", best)
