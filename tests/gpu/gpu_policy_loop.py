"""A GPU slice as the worker runs it: its policy and its executor."""

import time

from engine_case import EngineReports, LateModel

from c2cserve.core.actions import RunStep
from c2cserve.core.events import Activated, Submitted
from c2cserve.core.machine import GpuShare, Slice
from c2cserve.core.model import ModelSpec
from c2cserve.core.request import Job, Request, Sampling, Slo
from c2cserve.engine.executor import Executor
from c2cserve.engine.gpu.setup import GpuParts
from c2cserve.engine.guides import Guides
from c2cserve.grammars.outputs import Grammars
from c2cserve.policy.slice.policy import SlicePolicy

GREEDY = Sampling(seed=0, temperature=0.0)


class Loop(EngineReports):
    """Runs two steps at a time, or one."""

    def __init__(
        self, gpu: GpuParts, model: LateModel, max_in_flight: int, kv_bytes: int = 512 << 20,
        max_step_tokens: int = 512, link_bytes_per_s: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__()
        layout = model.decoder.kv
        slice_ = Slice(
            "s", "gpu", kv_bytes=kv_bytes, gpu=GpuShare("GPU", 0), max_step_tokens=max_step_tokens,
            host_kv_bytes=gpu.host_kv.size, link_bytes_per_s=link_bytes_per_s,
        )  # fmt: skip
        self.policy = SlicePolicy(slice_, max_in_flight)
        self.grammars = Grammars(gpu.masks)
        self.guides = Guides(grammars=self.grammars)
        self.executor = Executor(
            "s", gpu.ops, gpu.arena, self.report, time.monotonic, to_device=gpu.to_device,
            host_kv=gpu.host_kv, guides=self.guides,
        )  # fmt: skip
        self.executor.attach("m", model.decoder)
        self.events.append(
            Activated(ModelSpec("m", 1, model.config.layers, layout.block_bytes, 1024))
        )
        self.ahead = 0
        """Steps that were launched while one ran."""

    def submit(self, name: str, prompt: list[int], new: int, sampling: Sampling = GREEDY) -> None:
        request = Request(name, "m", len(prompt), new, time.monotonic(), Slo(60.0, 60.0))
        self.add(Job(request, tuple(prompt), sampling))

    def add(self, job: Job) -> None:
        self.events.append(Submitted(job.request, self.executor.add(job)))

    def tick(self) -> None:
        self.executor.poll()
        events, self.events = self.events, []
        for event in events:
            self.policy.apply(event)
        for action in self.policy.decide(time.monotonic()):
            running = self.policy._in_flight.running
            self.executor.submit(action)
            self.ahead += isinstance(action, RunStep) and running > 1

    def finish(self, *names: str) -> None:
        end_s = time.monotonic() + 60
        while not all(self.ended(name) for name in names):
            self.tick()
            assert time.monotonic() < end_s
        while self.policy._in_flight:
            self.tick()
