"""The worker's engine half. Importing this module imports torch; the server never does."""

import time
from pathlib import Path

import torch

from c2cserve.core.actions import SliceAction
from c2cserve.core.machine import Slice
from c2cserve.core.model import ModelSpec
from c2cserve.core.request import Job
from c2cserve.engine.cpu.arena import make_arena
from c2cserve.engine.executor import Executor
from c2cserve.engine.models.config import parse_config
from c2cserve.engine.models.decoder import Decoder
from c2cserve.engine.weights import Weights
from c2cserve.kernels.cpu_ops import CpuOps
from c2cserve.memory.segment import Segment
from c2cserve.runtime.live.slice_world import SliceWorld


class WorkerEngine:
    """`runtime.live.slice_world.SliceEngine` over the CPU executor."""

    def __init__(self, slice_: Slice, world: SliceWorld) -> None:
        torch.set_num_threads(1)  # the kernels have threads of their own
        torch.set_grad_enabled(False)
        ops = CpuOps(len(slice_.cpus), slice_.cpus)
        self.isa = ops.isa
        arena = make_arena(slice_.kv_bytes)
        self._executor = Executor(slice_.id, ops, arena, world.emit, world.deliver, time.monotonic)

    def attach(self, spec: ModelSpec, segment: str, config: dict[str, object], dtype: str) -> None:
        weights = Weights(Segment.open(Path(segment)))
        decoder = Decoder(parse_config(config, dtype), weights, spec.max_context)
        self._executor.attach(spec.id, decoder)

    def detach(self, model: str) -> None:
        self._executor.detach(model)

    def add(self, job: Job) -> None:
        self._executor.add(job)

    def submit(self, action: SliceAction) -> None:
        self._executor.submit(action)

    def poll(self) -> None:
        self._executor.poll()

    @property
    def parked(self) -> bool:
        return self._executor.parked
