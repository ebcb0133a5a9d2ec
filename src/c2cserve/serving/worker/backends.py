"""The parts of a worker's engine that differ between the kinds of slices; those of CPU slices."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch

from c2cserve.core.actions import Fetch
from c2cserve.core.machine import Slice
from c2cserve.core.model import ModelSpec
from c2cserve.core.step import Step
from c2cserve.engine.cpu.arena import make_arena
from c2cserve.engine.executor import Executor
from c2cserve.engine.guides import Guides
from c2cserve.engine.models.config import ModelConfig
from c2cserve.engine.models.decoder import Decoder
from c2cserve.engine.rotation import HostKv, copies_at_once, no_copies
from c2cserve.engine.weights import Weights
from c2cserve.kernels.cpu_ops import CpuOps
from c2cserve.memory.segment import Segment
from c2cserve.runtime.slice_stats import SliceStats
from c2cserve.serving.worker.world import WorkerWorld


class Backend(Protocol):
    """The parts that differ between the kinds of slices."""

    executor: Executor
    guides: Guides
    isa: str

    @property
    def device(self) -> torch.device | None:
        """The device of small tensors; None for the host."""
        ...

    def warm(self, config: ModelConfig) -> None: ...

    def open(self, spec: ModelSpec, path: Path, config: ModelConfig) -> Weights: ...

    def close(self, model: str, path: Path) -> None: ...

    def begin(self, step: Step) -> None:
        """Note that the step is about to be submitted."""
        ...

    def polled(self, *, computing: bool) -> None:
        """Note whether a step is under way after the executor was polled."""
        ...

    def make_room(self, kv_end_bytes: int | None) -> None:
        """Prepare for KV that is about to be copied back, somewhere below `kv_end_bytes`."""
        ...

    def fetch(self, fetch: Fetch, decoder: Decoder | None) -> None:
        """Begin to load a model, of which `decoder` knows the weights (None: not attached)."""
        ...

    def release(self, model: str) -> None:
        """Drop the weights of a model that was fetched, or cancel its load."""
        ...

    def set_alpha(self, model: str, alpha: float) -> None:
        """Set how a model's hybrid GEMMs are split, from its next step on."""
        ...

    @property
    def waiting(self) -> bool:
        """Whether a load waits for weights that are being loaded into the pool, or registered."""
        ...

    def unusable(self) -> Sequence[tuple[str, str]]:
        """Return (model, reason) of models whose weights turned out to be unreadable, each once."""
        ...

    @property
    def stats(self) -> SliceStats:
        """The engine's rows of which only this kind of slice knows the values."""
        ...


class CpuBackend:
    """A CPU slice: weights are read where they are mapped. A mapping ends with its last tensor."""

    device: torch.device | None = None
    stats = SliceStats()
    waiting = False

    def __init__(self, slice_: Slice, world: WorkerWorld) -> None:
        ops = CpuOps(len(slice_.cpus), slice_.cpus)
        arena = make_arena(slice_.kv_bytes)
        self.isa = ops.isa
        host_kv = HostKv(0, no_copies)
        if slice_.host_kv_bytes:
            copier = copies_at_once(arena, make_arena(slice_.host_kv_bytes))
            host_kv = HostKv(slice_.host_kv_bytes, copier)
        self.guides = Guides(world.notify)
        self.executor = Executor(
            slice_.id, ops, arena, world.report, time.monotonic, host_kv=host_kv,
            guides=self.guides,
        )  # fmt: skip

    def warm(self, config: ModelConfig) -> None:
        pass

    def open(self, spec: ModelSpec, path: Path, config: ModelConfig) -> Weights:
        return Weights(Segment.open(path))

    def close(self, model: str, path: Path) -> None:
        pass

    def begin(self, step: Step) -> None:
        pass

    def polled(self, *, computing: bool) -> None:
        pass

    def make_room(self, kv_end_bytes: int | None) -> None:
        pass

    def fetch(self, fetch: Fetch, decoder: Decoder | None) -> None:
        raise AssertionError(f"{fetch.model}: a CPU slice reads weights in place")

    def release(self, model: str) -> None:
        raise AssertionError(f"{model}: a CPU slice reads weights in place")

    def unusable(self) -> Sequence[tuple[str, str]]:
        return ()

    def set_alpha(self, model: str, alpha: float) -> None:
        raise AssertionError(f"{model}: a CPU slice has no hybrid GEMMs")
