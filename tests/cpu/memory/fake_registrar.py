"""Stands in for CUDA: what is registered, and in which order it came."""

import threading

from c2cserve.memory.pinning import PinningError


class FakeRegistrar:
    """Refuses what overlaps, and from the piece `fails_at` on everything."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.fails_at = fails_at
        self.registered: dict[int, int] = {}
        self.log: list[tuple[int, int]] = []
        """(address, size) of all that was registered."""
        self.gate = threading.Semaphore(1 << 30)
        """How many more pieces may be registered."""

    def register(self, address: int, size: int) -> None:
        self.gate.acquire()
        if self.fails_at is not None and len(self.log) >= self.fails_at:
            raise PinningError(f"cudaHostRegister of {size} bytes: cudaErrorMemoryAllocation")
        for start, other in self.registered.items():
            assert address + size <= start or start + other <= address, "registered twice"
        self.registered[address] = size
        self.log.append((address, size))

    def unregister(self, address: int) -> None:
        del self.registered[address]

    @property
    def bytes(self) -> int:
        return sum(self.registered.values())
