"""The GPUs of this machine as a `transfers_rig.Rig`."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from transfers_run import Buffers, make_buffers, native, opened, split

from c2cserve.engine.gpu.kv_copies import KvCopies
from c2cserve.engine.rotation import HostKv
from c2cserve.kernels.gpu.driver import new_stream
from c2cserve.transfer.engine import TransferEngine
from c2cserve.transfer.moves import Segment
from c2cserve.transfer.settings import RelayShape


class Gpus:
    def __init__(self, gpus: int, size: int, buffers: Buffers | None = None) -> None:
        self.gpus = gpus
        self.buffers: Buffers = buffers or make_buffers(gpus, size)
        self._computing = new_stream(0)

    @property
    def arena(self) -> Tensor:
        return self.buffers.gpu[0]

    def opened(
        self, gpus: int, *, own: RelayShape | None = None, **settings: Any
    ) -> AbstractContextManager[TransferEngine]:
        return opened(gpus, own=own, **settings)

    def native(self, segments: Sequence[Segment]) -> Callable[[], None]:
        return native(segments)

    def split(self, whole: Segment, relayed: int, task_bytes: int) -> Callable[[], None]:
        return split(whole, relayed, task_bytes, self.gpus - 1)

    def host_kv(self, engine: TransferEngine, size: int) -> HostKv:
        b = self.buffers
        copies = KvCopies(
            engine, self.arena, b.host_target, b.pinned[1], self._computing, lambda: None
        )
        return HostKv(size, copies)

    def synchronize(self) -> None:
        for gpu in range(self.gpus):
            torch.cuda.synchronize(gpu)
