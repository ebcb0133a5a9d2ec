"""Where registrations of host memory meet, and how copies are cut there.

    address   0        64 MiB      128 MiB     192 MiB
    memory         | piece | piece     | piece     | piece |
    one copy           |---+-----------+---|               becomes three

Segments of the pool are registered with CUDA in pieces (`memory.gradual_pinning`). A copy by a copy
engine whose host range lies in two registrations fails with cudaErrorInvalidValue, in either
direction and in batches too. A kernel may read and write across.

All registrations begin and end at multiples of `BORDER_BYTES`, but for the two ends of the memory.
So a copy is cut by its address alone, whatever is registered.
"""

from collections.abc import Iterator

BORDER_BYTES = 64 << 20
"""Addresses of borders are multiples of it, and a piece has at most so many bytes.

Measured on an H200, 4 GB with 2 ms between pieces: streams stand still for 6 ms at most, and all
takes 0.35 s. Registered at once it takes 0.21 s, and all of that is a standstill.
"""


def cut_at_borders(
    address: int, size: int, border_bytes: int = BORDER_BYTES
) -> Iterator[tuple[int, int]]:
    """Yield (offset, size) of the parts of host memory from `address` on. None has a border
    within."""
    offset = 0
    while offset < size:
        part = min(size - offset, border_bytes - (address + offset) % border_bytes)
        yield offset, part
        offset += part
