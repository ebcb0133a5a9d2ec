"""What benchmarks of transfers need of a machine; in tests, a machine whose links are a thread."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor

from c2cserve.engine.rotation import HostKv
from c2cserve.transfer.engine import TransferEngine
from c2cserve.transfer.moves import Segment
from c2cserve.transfer.settings import RelayShape


class RigBuffers(Protocol):
    """`transfers_run.Buffers`."""

    @property
    def size(self) -> int: ...

    def inward(self, gpu: int = 0, size: int | None = None, at: int = 0) -> Segment: ...

    def outward(self, size: int | None = None, at: int = 0) -> Segment: ...

    def clear(self, size: int | None = None) -> None: ...

    def fill(self, memory: Tensor) -> None:
        """Fill memory with words that are all different."""
        ...

    def check_inward(self, gpu: int = 0, size: int | None = None) -> None: ...

    def check_blocks(self, block: int, size: int) -> None:
        """Compare every second block of both targets with its source; all others are zero."""
        ...


class Rig(Protocol):
    """GPUs with buffers; the first one's target is an arena of KV, too."""

    @property
    def gpus(self) -> int: ...

    @property
    def buffers(self) -> RigBuffers: ...

    @property
    def arena(self) -> Tensor: ...

    def opened(
        self, gpus: int, *, own: RelayShape | None = None, **settings: Any
    ) -> AbstractContextManager[TransferEngine]:
        """An engine over the first GPUs' links. Settings are those of `transfer.settings`."""
        ...

    def native(self, segments: Sequence[Segment]) -> Callable[[], None]:
        """Plain copies, at once, and a wait for all of them."""
        ...

    def split(self, whole: Segment, relayed: int, task_bytes: int) -> Callable[[], None]:
        """A transfer whose first bytes go through the last GPU, in shares that are fixed."""
        ...

    def host_kv(self, engine: TransferEngine, size: int) -> HostKv:
        """KV of the arena on the host, as a slice has it. The host memory is one for all."""
        ...

    def synchronize(self) -> None: ...
