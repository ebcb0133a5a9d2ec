"""The GPUs of this machine as a `transfers_rig.Rig`."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from relay_launch import RelayLaunch
from torch import Tensor
from transfers_run import Buffers, make_buffers, native, opened

from c2cserve.engine.gpu.kv_copies import KvCopies
from c2cserve.engine.rotation import HostKv
from c2cserve.kernels.gpu.aot.variants import RELAY
from c2cserve.kernels.gpu.driver import new_stream
from c2cserve.transfer.engine import TransferEngine
from c2cserve.transfer.moves import Segment


class Gpus:
    def __init__(self, gpus: int, size: int) -> None:
        self.gpus = gpus
        self.buffers: Buffers = make_buffers(gpus, size)
        self._computing = new_stream(0)

    @property
    def arena(self) -> Tensor:
        return self.buffers.gpu[0]

    def opened(self, gpus: int, **settings: Any) -> AbstractContextManager[TransferEngine]:
        return opened(gpus, **settings)

    def native(self, segments: Sequence[Segment]) -> Callable[[], None]:
        return native(segments)

    def by_kernel(self, *lists: Sequence[Segment]) -> Callable[[], None]:
        lanes: list[tuple[RelayLaunch, torch.cuda.Stream, list[list[tuple[int, int, int]]]]] = []
        for segments in lists:
            all_ = [(one.target, one.source, one.size) for one in segments]
            launches = [all_[at : at + RELAY.pieces] for at in range(0, len(all_), RELAY.pieces)]
            # A flag is of the launches of one stream, and two may run at a time.
            lanes += [(RelayLaunch(0), new_stream(0), launches[lane::2]) for lane in range(2)]

        def run() -> None:
            for turn in range(max(len(launches) for _, _, launches in lanes)):
                for relay, stream, launches in lanes:
                    if turn < len(launches):
                        relay.launch(launches[turn], stream.cuda_stream)
            for _, stream, _ in lanes:
                stream.synchronize()

        return run

    def host_kv(self, engine: TransferEngine, size: int) -> HostKv:
        b = self.buffers
        copies = KvCopies(
            engine, self.arena, b.host_target, b.pinned[1], self._computing, lambda: None
        )
        return HostKv(size, copies)

    def synchronize(self) -> None:
        for gpu in range(self.gpus):
            torch.cuda.synchronize(gpu)
