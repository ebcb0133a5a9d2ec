"""The worker's engine half. Importing this module imports torch; the server never does."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from c2cserve.core.actions import RunStep, SliceAction
from c2cserve.core.machine import GpuShare, Slice
from c2cserve.core.model import ModelSpec
from c2cserve.core.request import Job
from c2cserve.engine.cpu.arena import make_arena
from c2cserve.engine.executor import Executor
from c2cserve.engine.models.config import ModelConfig, parse_config
from c2cserve.engine.models.decoder import Decoder
from c2cserve.engine.weights import Weights
from c2cserve.kernels.cpu_ops import CpuOps
from c2cserve.memory.segment import Segment
from c2cserve.policy.residency import Residency
from c2cserve.runtime.live.slice_world import SliceWorld

if TYPE_CHECKING:
    from c2cserve.devices.partitions import Partition
    from c2cserve.engine.gpu.segments import PinnedSegments
    from c2cserve.engine.gpu.setup import GpuParts
    from c2cserve.memory.hbm_cache import HbmCache

_SAMPLER_THREADS = 4
"""Of a GPU slice, for rows that its GPU does not draw itself."""


class Segments(Protocol):
    """Where an attached model's weights come from."""

    def open(self, path: Path) -> Segment: ...

    def close(self, path: Path) -> None: ...


class _MappedSegments:
    """For CPUs a mapping is all; it goes with the last tensor in it."""

    def open(self, path: Path) -> Segment:
        return Segment.open(path)

    def close(self, path: Path) -> None:
        pass


@dataclass(frozen=True, slots=True)
class _Backend:
    """What one kind of slice has in place of the other's."""

    executor: Executor
    isa: str
    segments: Segments
    warm: Callable[[ModelConfig], None]
    finish: Callable[[], None]
    device: torch.device | None
    cache: "HbmCache | None" = None
    """Weights kept near; None where they are near anyway."""


class NoEngine(Exception):
    """The slice can not compute here; the message is one line that says why and what helps."""


class WorkerEngine:
    """`runtime.live.slice_world.SliceEngine` of any kind of slice. Raises `NoEngine`."""

    def __init__(
        self, slice_: Slice, world: SliceWorld, *, shared: "SharedGpu | None" = None
    ) -> None:
        """`shared`: of the slices of one GPU that this process computes for."""
        torch.set_num_threads(1)  # the kernels have threads of their own
        torch.set_grad_enabled(False)
        share = slice_.gpu
        if share is None:
            self._backend = _cpu(slice_, world)
        else:
            self._backend = _gpu(slice_, share, world, shared or SharedGpu(share))
        self._executor = self._backend.executor
        self._paths: dict[str, Path] = {}
        self.isa = self._backend.isa

    def attach(self, spec: ModelSpec, segment: str, config: dict[str, object], dtype: str) -> None:
        parsed = parse_config(config, dtype)
        self._backend.warm(parsed)
        path = Path(segment)
        opened = self._backend.segments.open(path)
        self._paths[spec.id] = path
        if self._backend.cache is not None:
            self._backend.cache.add(spec.id, opened.data.ctypes.data, opened.data.nbytes)
        weights = Weights(opened)
        decoder = Decoder(parsed, weights, spec.max_context, self._backend.device)
        self._executor.attach(spec.id, decoder)

    def detach(self, model: str) -> None:
        self._executor.detach(model)
        path = self._paths.pop(model, None)
        if path is not None:
            self._backend.finish()
            if self._backend.cache is not None:
                self._backend.cache.forget(model)
            self._backend.segments.close(path)

    def add(self, job: Job) -> bool:
        return self._executor.add(job)

    def submit(self, action: SliceAction) -> None:
        cache = self._backend.cache
        if cache is not None and isinstance(action, RunStep):
            cache.begin_step(action.step.model, time.monotonic(), action.step.kv_end_bytes)
        self._executor.submit(action)

    def poll(self) -> None:
        self._executor.poll()

    @property
    def parked(self) -> bool:
        return self._executor.parked


def _cpu(slice_: Slice, world: SliceWorld) -> _Backend:
    ops = CpuOps(len(slice_.cpus), slice_.cpus)
    arena = make_arena(slice_.kv_bytes)
    executor = Executor(slice_.id, ops, arena, world.emit, world.deliver, time.monotonic)
    return _Backend(executor, ops.isa, _MappedSegments(), lambda _: None, lambda: None, None)


class SharedGpu:
    """What a process does once for a GPU, however many slices it has there. Thread-safe."""

    def __init__(self, share: GpuShare) -> None:
        self._share = share
        self._lock = threading.Lock()
        self._device: int | None = None
        self._partitions: list[Partition] = []
        self.segments: PinnedSegments | None = None

    def open(
        self, slice_: Slice, share: GpuShare, sampler: CpuOps, ring: Callable[[], None]
    ) -> "GpuParts":
        """One slice's parts; the calling thread becomes the slice's. Raises `NoEngine`."""
        # Triton and the CUDA bindings come with the `gpu` extra: a CPU slice does without.
        from c2cserve.devices.binding import BindingError, bind
        from c2cserve.devices.partitions import PartitionError, split_sms
        from c2cserve.engine.gpu.segments import PinnedSegments
        from c2cserve.engine.gpu.setup import SETUP_ERRORS, open_gpu

        with self._lock:
            try:
                if self._device is None:
                    self._device = bind(self._share)
                    self.segments = PinnedSegments()
                if share.parts and not self._partitions:
                    self._partitions = split_sms(self._device, share.sms, share.parts)
                partition = self._partitions[share.part] if share.parts else None
                return open_gpu(
                    self._device, slice_.kv_bytes, sampler.sample, partition=partition,
                    profile=share.profile, ring=ring, keeper=Residency(slice_.kv_bytes),
                )  # fmt: skip
            except (BindingError, PartitionError, *SETUP_ERRORS) as error:
                raise NoEngine(str(error)) from error


def _gpu(slice_: Slice, share: GpuShare, world: SliceWorld, shared: SharedGpu) -> _Backend:
    from c2cserve.engine.gpu.setup import FATAL

    sampler = CpuOps(min(_SAMPLER_THREADS, len(slice_.cpus)))
    gpu = shared.open(slice_, share, sampler, world.ring)
    assert shared.segments is not None
    executor = Executor(
        slice_.id, gpu.ops, gpu.arena, world.emit, world.deliver, time.monotonic, place=gpu.place,
        fatal=FATAL,
    )  # fmt: skip
    isa = f"{torch.cuda.get_device_name(gpu.device)}, {gpu.lane.sms} SMs"
    return _Backend(executor, isa, shared.segments, gpu.warm, gpu.finish, gpu.device, gpu.cache)
