"""Shared memory into which grammar processes write masks, and which a device may read.

    region   [ ready | places .......... | mask | mask | ... ]     int32
             1 once    written by the      written by the
             complete  worker, a row each  process

A process writes `ready` last. A device that waits for that word reads masks which are made while
its work is launched, and no thread of the worker takes part. A process may end, or stand still.
Then the worker *abandons* the region: it writes `ready` itself, and what was sampled by it is not
used.
"""

import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from weakref import ref

import numpy as np
from numpy.typing import NDArray

_MEMORY_BYTES = 256 << 20
"""Only pages that have been written take memory."""
REGISTERED_BYTES = 32 << 20
"""The part that a device reads: four steps of 512 rows of a vocabulary of 128,000 tokens. Masks
that find no room there are waited for on the host."""
PLACES = 2044
"""The rows of a step whose masks a device may wait for."""
PLACES_AT = 4
"""The word with the place of the first row's mask."""
HEAD_WORDS = PLACES_AT + PLACES
"""The words before the masks, which begin at a multiple of 16 bytes."""
_ALIGNED_WORDS = 16
_PATIENCE_S = 1.0
"""How long a device waits for masks, which take milliseconds."""
_POLL_S = 0.05

Numbers = NDArray[np.int32]

_registered: list[mmap.mmap] = []
"""Mappings that a device may read. They stay for as long as the process."""


class Region:
    """A part of the memory, taken until nothing refers to it."""

    __slots__ = ("__weakref__", "_begin", "_memory", "abandoned", "address", "masks", "words")

    def __init__(
        self, memory: "MaskMemory", begin: int, words: Numbers, shape: tuple[int, int], address: int
    ) -> None:
        self._memory = memory
        self._begin = begin
        self.words = words
        """All of it."""
        self.masks = words[HEAD_WORDS : HEAD_WORDS + shape[0] * shape[1]].reshape(shape)
        self.address = address
        """Where a device reads it; 0 if none does."""
        self.abandoned = False
        """The masks did not come in time. A device that waited has gone on without them."""
        words[0] = 0

    def __del__(self) -> None:
        self.words[0] = 1  # its user has failed, if a device waits for it still
        self._memory.free(self._begin)

    @property
    def ready_at(self) -> int:
        """The offset of `ready` in the memory, in bytes,"""
        return 4 * self._begin

    @property
    def masks_at(self) -> int:
        """and of the masks."""
        return 4 * (self._begin + HEAD_WORDS)

    @property
    def ready(self) -> bool:
        return bool(self.words[0])

    def place(self, places: list[int]) -> None:
        """Say where the mask of each row of a step is, -1 for rows without."""
        self.words[PLACES_AT : PLACES_AT + len(places)] = places

    def abandon(self) -> None:
        """End the wait for the masks."""
        self.abandoned = True
        self.words[0] = 1


class MaskMemory:
    """The memory of a slice's masks. One thread takes regions; any thread drops them."""

    def __init__(self, patience_s: float = _PATIENCE_S) -> None:
        """`patience_s`: how long a device waits for masks."""
        self.file = os.memfd_create("masks")
        os.ftruncate(self.file, _MEMORY_BYTES)
        self._mapping = mmap.mmap(self.file, _MEMORY_BYTES)
        self._words = np.frombuffer(self._mapping, np.int32)
        self._taken: dict[int, int] = {}
        """Begin -> size, in words."""
        self._address = 0
        self._watch = _Watch(patience_s)

    def __del__(self) -> None:
        os.close(self.file)

    def register(self, pin: Callable[[NDArray[np.uint8]], int]) -> None:
        """Have a device read the first part of the memory. `pin` registers it, and returns the
        address by which the device does. Raises what `pin` does."""
        self._address = pin(self._words.view(np.uint8)[:REGISTERED_BYTES])
        _registered.append(self._mapping)

    def take(self, count: int, words: int) -> Region | None:
        """Take a region for so many masks of so many words; None if there is no room."""
        need = -(-(HEAD_WORDS + count * words) // _ALIGNED_WORDS) * _ALIGNED_WORDS
        begin = 0
        for at, size in sorted(self._taken.copy().items()):  # other threads drop regions
            if at - begin >= need:
                break
            begin = at + size
        stop = begin + need
        if stop > len(self._words):
            return None
        self._taken[begin] = need
        reached = bool(self._address) and 4 * stop <= REGISTERED_BYTES
        address = self._address + 4 * begin if reached else 0
        return Region(self, begin, self._words[begin:stop], (count, words), address)

    def free(self, begin: int) -> None:
        self._taken.pop(begin)

    def watch(self, region: Region, alive: Callable[[], bool]) -> None:
        """Have a region abandoned if its masks do not come. A device is about to wait for them.
        `alive`: whether the process that writes them has not ended."""
        self._watch.add(region, alive)


class _Watch:
    """Abandons regions on a thread of its own: the worker's may itself wait for the device."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._pending: deque[tuple[ref[Region], Callable[[], bool], float]] = deque()
        self._some = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, region: Region, alive: Callable[[], bool]) -> None:
        if self._thread is None:  # a device has waited for no masks before
            self._thread = threading.Thread(target=self._run, name="mask-watch", daemon=True)
            self._thread.start()
        self._pending.append((ref(region), alive, time.monotonic() + self._patience_s))
        if not self._some.is_set():
            self._some.set()

    def _run(self) -> None:
        while True:
            self._some.wait()
            time.sleep(_POLL_S)
            self._some.clear()
            self._poll()
            if self._pending:
                self._some.set()

    def _poll(self) -> None:
        now = time.monotonic()
        for _ in range(len(self._pending)):
            pending = self._pending.popleft()
            region = pending[0]()
            if region is None or region.ready:
                continue
            _, alive, until_s = pending
            if now > until_s or not alive():
                region.abandon()
            else:
                self._pending.append(pending)
