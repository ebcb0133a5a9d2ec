"""A `transfers_rig.Rig` without a GPU: its memories are this process's, its links are a thread."""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import torch
from called_links import CalledEngine
from thread_links import ThreadLinks
from torch import Tensor
from transfers_run import Buffers, fill_sources

from c2cserve.engine.gpu.kv_copies import KvCopies
from c2cserve.engine.rotation import HostKv
from c2cserve.transfer.engine import TransferEngine
from c2cserve.transfer.moves import Segment
from c2cserve.transfer.settings import RelayShape, Settings


class DryRig:
    def __init__(self, gpus: int, size: int) -> None:
        self.gpus = gpus
        memory = [torch.zeros(size, dtype=torch.uint8) for _ in range(gpus + 3)]
        pinned: Any = [SimpleNamespace(address=one.data_ptr()) for one in memory[:2]]
        self.buffers = Buffers(size, memory[0], memory[1], memory[3:], memory[2], pinned)
        fill_sources(memory[0], memory[2])
        self._links: list[ThreadLinks] = []

    @property
    def arena(self) -> Tensor:
        return self.buffers.gpu[0]

    @contextmanager
    def opened(
        self, gpus: int, *, own: RelayShape | None = None, **settings: Any
    ) -> Generator[TransferEngine]:
        links = ThreadLinks()
        self._links.append(links)
        chosen = Settings(**{"one_path_bytes": 0, "stall_s": 100.0, **settings})
        engine = CalledEngine(gpus, chosen, links, threaded=True)
        try:
            yield engine
        finally:
            engine.stop()  # notifiers may still wait for tickets
            links.close()

    def native(self, segments: Sequence[Segment]) -> Callable[[], None]:
        links = self._links[-1] if self._links else ThreadLinks()

        def run() -> None:
            links.copy([cast("Any", one) for one in segments])

        return run

    def split(self, whole: Segment, relayed: int, task_bytes: int) -> Callable[[], None]:
        assert 0 < relayed < whole.size
        assert task_bytes > 0
        return self.native([whole])

    def host_kv(self, engine: TransferEngine, size: int) -> HostKv:
        arena = SimpleNamespace(device=torch.device("cuda", 0), data_ptr=self.arena.data_ptr)
        stream = self._links[-1].streams.make()
        parts = [cast("Any", one) for one in (arena, self.buffers.host_target, None, stream)]
        copies = KvCopies(engine, parts[0], parts[1], parts[2], parts[3], lambda: None)
        return HostKv(size, copies)

    def synchronize(self) -> None: ...
