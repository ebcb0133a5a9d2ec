"""Host memory of a machine that is given more as it uses more: some virtual machines begin with a
part of what they may have, and a program that takes much at once finds too little."""

import contextlib
import mmap
import subprocess
import time
from collections.abc import Generator
from pathlib import Path

import numpy as np

_CHUNK = 1 << 30
_PAUSE_S = 0.2
_SPARE = 4 << 30
"""Left to everything else."""


def memory_bytes() -> dict[str, int]:
    """/proc/meminfo, in bytes."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    pairs = (line.split(":") for line in lines)
    return {name: int(value.split()[0]) << 10 for name, value in pairs}


def grow_memory(size: int, *, limit_s: float = 120.0) -> int:
    """Use `size` bytes for a moment, little by little, unless as many are available already.
    Returns how many are available afterwards. What the machine does not have is not taken: it ends
    when memory runs short for `limit_s`."""
    held: list[mmap.mmap] = []
    until_s = time.monotonic() + limit_s
    while len(held) * _CHUNK < size and time.monotonic() < until_s:
        available = memory_bytes()["MemAvailable"]
        if not held and available >= size + _SPARE:
            return available
        if available < _SPARE:
            time.sleep(_PAUSE_S)
            continue
        memory = mmap.mmap(-1, _CHUNK, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        np.frombuffer(memory, np.uint8)[:: mmap.PAGESIZE] = 1
        held.append(memory)
    for memory in held:
        memory.close()
    return memory_bytes()["MemAvailable"]


@contextlib.contextmanager
def tmpfs(at: Path, size: int) -> Generator[str]:
    """A tmpfs of `size` bytes at the folder `at`, until the end (root only). Yields why there is
    none, nothing if there is."""
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "c2cserve", str(at)]
    done = subprocess.run(mount, capture_output=True, text=True, timeout=20, check=False)
    if done.returncode:
        yield done.stderr.strip() or f"mount ended with {done.returncode}"
        return
    try:
        yield ""
    finally:
        subprocess.run(["umount", "--lazy", str(at)], check=True, timeout=60)
