"""Registering host memory with CUDA beside running steps: in pieces, by a thread, with pauses.

    thread   piece 3 | pause | piece 4 | pause | ...     each piece: pages mapped, then registered
    steps      still | go on |   still | go on | ...     of 64 MiB: for some milliseconds
    reader           can read the bytes of pieces 0 to 3

The thread holds no lock of Python's while it registers, so steps wait for nothing but the driver.
Without steps there is no pause. A piece that has been registered can be read at once, and pieces
come in the order in which a first token needs them. Memory that a step waits for comes first.

A piece that CUDA refuses ends its region's registering: the region has a `fault`, and its users
close it. Closing takes pieces back in the same way, so that nothing stays registered.
"""

import threading
import time
from collections.abc import Callable, Sequence

from c2cserve.kernels.gpu.host_borders import BORDER_BYTES
from c2cserve.memory.pinning import CudaRegistrar, PinningError, Registrar, page_pieces

PAUSE_S = 0.002
"""What steps have between two pieces. `BORDER_BYTES` has the measurement."""

Map = Callable[[int, int], None]
"""Maps the pages of (address, size), so that the driver need not. Raises OSError."""
Span = tuple[int, int]
"""(start, stop), counted from a region's address."""


class GradualRegion:
    """Memory that a `Pinner` registers. Any thread may ask what can be read."""

    def __init__(
        self, address: int, size: int, map_pages: Map, order: Sequence[Span], piece_bytes: int
    ) -> None:
        """`order`: spans in the order in which they are needed; what is in none comes last."""
        self.address = address
        self._map_pages = map_pages
        self._pieces = list(page_pieces(address, size, piece_bytes, piece_bytes))
        self._piece_bytes = piece_bytes
        self._first = self._pieces[0][0] // piece_bytes
        self._registered = bytearray(len(self._pieces))
        every = [number for span in order for number in self._within(span)]
        self._order = list(dict.fromkeys([*every, *range(len(self._pieces))]))
        self._next = 0
        self.fault = ""
        """Why not all of it can be registered."""
        self.wanted = False
        """Whether a step or a load waits for it."""
        self.closing = False
        self.changed = threading.Condition()
        """Notified when all is registered, at a fault, and when the region is closed."""

    @property
    def complete(self) -> bool:
        """Whether all of it can be read."""
        return self._next == len(self._order) and not self.closing

    def readable(self, span: Span) -> bool:
        """Return whether these bytes can be read by GPUs."""
        return all(self._registered[number] for number in self._within(span))

    def wait(self) -> None:
        """Wait until all of it is registered. Raises `PinningError`."""
        with self.changed:
            self.changed.wait_for(lambda: self.complete or self.fault or self.closing)
        if not self.complete:
            raise PinningError(self.fault or "it was closed meanwhile")

    def _within(self, span: Span) -> range:
        """Return the numbers of the pieces that have some of the span."""
        start, stop = span
        if start >= stop:
            return range(0)
        first = (self.address + start) // self._piece_bytes
        last = (self.address + stop - 1) // self._piece_bytes
        return range(first - self._first, last + 1 - self._first)

    # ---- the pinner's thread --------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do for it now."""
        if self.closing:
            return not self._next
        return bool(self.fault) or self.complete

    def advance(self, registrar: Registrar) -> None:
        """Register the next piece, or take the last one back if the region is closing."""
        if self.closing:
            self._take_back(registrar)
            return
        number = self._order[self._next]
        address, size = self._pieces[number]
        try:
            self._map_pages(address, size)
            registrar.register(address, size)
        except (OSError, RuntimeError) as fault:  # the thread goes on with other regions
            self.fault = str(fault)
            self._notify()
            return
        self._registered[number] = 1
        self._next += 1
        if self.complete:
            self._notify()

    def _take_back(self, registrar: Registrar) -> None:
        self._next -= 1
        number = self._order[self._next]
        self._registered[number] = 0
        registrar.unregister(self._pieces[number][0])

    def _notify(self) -> None:
        with self.changed:
            self.changed.notify_all()


class Pinner:
    """A thread that registers regions and takes them back, a piece at a time. Thread-safe."""

    def __init__(
        self, registrar: Registrar | None = None, computes: Callable[[], bool] = lambda: True, *,
        device: int | None = None, piece_bytes: int = BORDER_BYTES,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:  # fmt: skip
        """`computes` tells whether steps are in flight: only then there are pauses. `registrar`:
        CUDA on the GPU `device`, by default."""
        self._registrar: Registrar = registrar or CudaRegistrar(device)
        self._computes = computes
        self._piece_bytes = piece_bytes
        self._sleep = sleep
        self._lock = threading.Condition()
        self._regions: list[GradualRegion] = []
        """Those with something to do, in the order in which they came."""
        self._thread: threading.Thread | None = None

    def open(
        self, address: int, size: int, map_pages: Map, order: Sequence[Span] = ()
    ) -> GradualRegion:  # fmt: skip
        """Begin to register memory, which stays mapped until `close` has taken it back."""
        region = GradualRegion(address, size, map_pages, order, self._piece_bytes)
        with self._lock:
            self._regions.append(region)
            self._started()
            self._lock.notify_all()
        return region

    def close(self, region: GradualRegion) -> None:
        """Begin to take a region back. No kernel or copy reads it any more."""
        with self._lock:
            region.closing = True
            if region not in self._regions:
                self._regions.append(region)
            self._started()
            self._lock.notify_all()
        with region.changed:
            region.changed.notify_all()

    def finish(self) -> None:
        """Wait until there is nothing to do."""
        with self._lock:
            self._lock.wait_for(lambda: not self._regions)

    def _started(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="pinner", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        while True:
            self._take().advance(self._registrar)
            if self._computes():
                self._sleep(PAUSE_S)

    def _take(self) -> GradualRegion:
        """Wait for a region that has something to do, those first that are wanted."""
        with self._lock:
            while True:
                self._regions = [one for one in self._regions if not one.idle]
                if self._regions:
                    wanted = (one for one in self._regions if one.wanted and not one.closing)
                    return next(wanted, self._regions[0])
                self._lock.notify_all()
                self._lock.wait()
