"""The executor under the real slice policy, without a worker."""

import atexit
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from engine_reports import EngineReports
from lane import LateModel
from late import LateOps
from tiny import make_checkpoint
from torch import Tensor

from c2cserve.core.actions import Direction, RunStep
from c2cserve.core.events import Activated, Submitted, Withdrawn
from c2cserve.core.machine import Slice
from c2cserve.core.model import ModelSpec
from c2cserve.core.request import BLOCK_TOKENS, Job, Request, Sampling
from c2cserve.engine.cpu.arena import make_arena
from c2cserve.engine.executor import Executor
from c2cserve.engine.guides import Guides
from c2cserve.engine.rotation import Copier, HostKv, copies_at_once
from c2cserve.grammars.memory import MaskMemory
from c2cserve.grammars.outputs import Grammars
from c2cserve.kernels.cpu_ops import CpuOps
from c2cserve.memory.host_blocks import CopyRun
from c2cserve.policy.slice.policy import SlicePolicy

MAX_NEW = 12
GRAMMARS = Grammars(MaskMemory(patience_s=60.0))
"""Of all loops: a grammar process takes a while to start."""
GRAMMARS.memory.register(lambda data: data.ctypes.data)  # operators that chain wait for masks
atexit.register(GRAMMARS.close)
SHARED = [17, 23, 42, 5] * 8


class PolicyLoop(EngineReports):
    """The policy's loop around the executor, one tick at a time."""

    def __init__(
        self, models: dict[str, LateModel], blocks: int, max_step_tokens: int,
        late: LateOps | None = None, host_blocks: int = 0,
    ) -> None:  # fmt: skip
        """`late`: steps overlap, and are done when it says so. `host_blocks`: requests rotate, and
        every copy takes two ticks."""
        super().__init__()
        specs = {
            name: ModelSpec(name, 1, model.config.layers, model.config.kv_block_bytes, 256)
            for name, model in models.items()
        }
        slab = max(spec.kv_block_bytes for spec in specs.values())
        slice_ = Slice(
            "s", "cpu", kv_bytes=blocks * slab, slab_bytes=slab, max_step_tokens=max_step_tokens,
            host_kv_bytes=host_blocks * slab,
        )  # fmt: skip
        self.policy = SlicePolicy(slice_, 1 if late is None else 2)
        arena = make_arena(slice_.kv_bytes)
        self.host_kv = HostKv(slice_.host_kv_bytes, self._copier(arena, slice_.host_kv_bytes))
        self.guides = Guides(grammars=GRAMMARS)
        self.executor = Executor(
            "s", late or CpuOps(1), arena, self.report, lambda: self._now, host_kv=self.host_kv,
            guides=self.guides,
        )  # fmt: skip
        self._now = 0.0
        self.computed = 0
        """Tokens."""
        for name, model in models.items():
            self.executor.attach(name, model.decoder)
            self.events.append(Activated(specs[name]))

    def _copier(self, arena: Tensor, host_bytes: int) -> Copier:
        host = torch.empty(host_bytes, dtype=torch.uint8)

        def copy(copies: Sequence[CopyRun], direction: Direction) -> Callable[[], bool]:
            """What leaves is read, and what comes written, at the last moment."""
            ended_s = self._now + 0.015
            at_once = copies_at_once(arena, host)
            over: list[bool] = []

            def done() -> bool:
                if not over and self._now > ended_s:
                    at_once(copies, direction)
                    over.append(True)
                return bool(over)

            return done

        return copy

    def submit(self, job: Job) -> None:
        chained = self.executor.add(job)
        self.events.append(Submitted(job.request, chained))

    def withdraw(self, name: str) -> None:
        self.events.append(Withdrawn(name))

    def tick(self) -> None:
        self._now += 0.01
        self.executor.poll()
        events, self.events = self.events, []
        for event in events:
            self.policy.apply(event)
        for action in self.policy.decide(self._now):
            if isinstance(action, RunStep):
                self.computed += action.step.tokens
            self.executor.submit(action)


def hashes(tokens: list[int]) -> tuple[int, ...]:
    ends = range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS)
    return tuple(hash(tuple(tokens[:end])) & (2**63 - 1) for end in ends)


def job(name: str, model: str, prompt: list[int]) -> Job:
    request = Request(name, model, len(prompt), MAX_NEW, 0.0, prefix_hashes=hashes(prompt))
    sampling = Sampling(seed=sum(prompt), temperature=0.8, top_p=0.95, presence_penalty=0.2)
    return Job(request, tuple(prompt), sampling)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LateModel]:
    made: dict[str, LateModel] = {}
    for case in ("llama", "qwen3-moe"):
        directory: Path = tmp_path_factory.mktemp(case)
        make_checkpoint(directory, case)
        made[case] = LateModel(directory).load_all()
    return made
