"""The executor under the real slice policy: short of KV memory, requests coming and going."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lane import LateModel
from late import LateOps
from tiny import make_checkpoint
from torch import Tensor

from c2cserve.core.actions import RunStep
from c2cserve.core.events import Activated, SliceEvent, Submitted, Withdrawn
from c2cserve.core.machine import Slice
from c2cserve.core.model import ModelSpec
from c2cserve.core.request import BLOCK_TOKENS, Delta, FinishReason, Job, Request, Sampling
from c2cserve.engine.cpu.arena import make_arena
from c2cserve.engine.executor import Executor
from c2cserve.engine.rotation import Copier, Copy, HostKv, copies_at_once
from c2cserve.kernels.cpu_ops import CpuOps
from c2cserve.policy.slice.policy import SlicePolicy

MAX_NEW = 12
SHARED = [17, 23, 42, 5] * 8


class World:
    """The policy's loop around the executor, one tick at a time."""

    def __init__(
        self, models: dict[str, LateModel], blocks: int, max_step_tokens: int,
        late: LateOps | None = None, host_blocks: int = 0,
    ) -> None:  # fmt: skip
        """`late`: steps overlap, and are done when it says so. `host_blocks`: requests rotate, and
        every copy takes two ticks."""
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
        self.deltas: list[Delta] = []
        self._events: list[SliceEvent] = []
        arena = make_arena(slice_.kv_bytes)
        self.host_kv = HostKv(slice_.host_kv_bytes, self._copier(arena, slice_.host_kv_bytes))
        self.executor = Executor(
            "s", late or CpuOps(1), arena, self._events.append, self.deltas.extend,
            lambda: self._now, host_kv=self.host_kv,
        )  # fmt: skip
        self._now = 0.0
        self.computed = 0
        """Tokens."""
        for name, model in models.items():
            self.executor.attach(name, model.decoder)
            self._events.append(Activated(specs[name]))

    def _copier(self, arena: Tensor, host_bytes: int) -> Copier:
        host = torch.empty(host_bytes, dtype=torch.uint8)

        def copy(copies: Sequence[Copy], *, inward: bool) -> Callable[[], bool]:
            """What leaves is read, and what comes written, at the last moment."""
            ended_s = self._now + 0.015
            at_once = copies_at_once(arena, host)
            over: list[bool] = []

            def done() -> bool:
                if not over and self._now > ended_s:
                    at_once(copies, inward=inward)
                    over.append(True)
                return bool(over)

            return done

        return copy

    def submit(self, job: Job) -> None:
        chained = self.executor.add(job)
        self._events.append(Submitted(job.request, chained))

    def withdraw(self, name: str) -> None:
        self._events.append(Withdrawn(name))

    def tick(self) -> None:
        self._now += 0.01
        self.executor.poll()
        events, self._events[:] = list(self._events), []
        for event in events:
            self.policy.apply(event)
        for action in self.policy.decide(self._now):
            if isinstance(action, RunStep):
                self.computed += action.step.tokens
            self.executor.submit(action)

    def of(self, name: str) -> list[Delta]:
        return [delta for delta in self.deltas if delta.request_id == name]

    def tokens(self, name: str) -> list[int]:
        return [token for delta in self.of(name) for token in delta.tokens]

    def ended(self, name: str) -> FinishReason | None:
        return next((d.finish for d in self.deltas if d.request_id == name and d.finish), None)


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


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_everyone_gets_the_text_of_an_idle_slice(
    models: dict[str, LateModel], data: st.DataObject
) -> None:
    blocks = data.draw(st.integers(8, 16), "blocks")
    chunk = data.draw(st.sampled_from([16, 40, 512]), "chunk")
    world = World(models, blocks, chunk, host_blocks=data.draw(st.sampled_from([0, 4, 64]), "host"))
    jobs: dict[str, Job] = {}
    for i in range(data.draw(st.integers(1, 8), "requests")):
        shared = SHARED[: data.draw(st.sampled_from([0, 16, 32]))]
        prompt = shared + data.draw(st.lists(st.integers(3, 159), min_size=1, max_size=30))
        name = f"r{i}"
        jobs[name] = job(name, data.draw(st.sampled_from(sorted(models))), prompt)
    gone = data.draw(st.sets(st.sampled_from(sorted(jobs))), "leave")
    for name in jobs:
        world.submit(jobs[name])
        for _ in range(data.draw(st.integers(0, 6))):
            world.tick()
    for name in gone:
        world.withdraw(name)
    for _ in range(2000):
        world.tick()
        if all(world.ended(name) for name in jobs if name not in gone):
            break
    for name in jobs.keys() - gone:
        assert world.ended(name) is FinishReason.LENGTH
        alone = World(models, 64, 512)
        alone.submit(dataclasses.replace(jobs[name]))
        while not alone.ended(name):
            alone.tick()
        assert world.tokens(name) == alone.tokens(name)
    world.tick()
    world.tick()
    assert len(world.executor) == 0, "nothing is kept for those who left"
    assert world.policy.arena.held_bytes == 0
    assert world.host_kv.used_bytes == 0


def test_preemption_and_prefix_reuse_do_happen_here(models: dict[str, LateModel]) -> None:
    """The property above is only worth something if these do."""
    world = World(models, 10, 512)
    names = [f"r{i}" for i in range(6)]
    for name, last in zip(names, itertools.count(3), strict=False):
        world.submit(job(name, "llama", [*SHARED, last]))
        world.tick()
    for _ in range(500):
        world.tick()
    assert all(world.ended(name) is FinishReason.LENGTH for name in names)
    assert world.policy.cached_tokens > 0
    tight = World(models, 8, 512)
    for name, last in zip(names, itertools.count(3), strict=False):
        tight.submit(job(name, "llama", [last] * 30))
    for _ in range(500):
        tight.tick()
    assert all(tight.ended(name) is FinishReason.LENGTH for name in names)
    assert tight.policy.preemptions > 0


@pytest.mark.parametrize("overlapped", [False, True])
def test_requests_that_do_not_fit_at_once_take_turns_and_compute_nothing_twice(
    models: dict[str, LateModel], overlapped: bool
) -> None:
    late = LateOps() if overlapped else None
    world = World(models, 8, 512, late, host_blocks=64)
    jobs = [job(f"r{i}", "llama", [3 + i] * 30) for i in range(6)]
    for one in jobs:
        world.submit(one)
        world.tick()
    for _ in range(600):
        before = world.computed
        world.tick()
        if late is not None and (len(late.samples) > 1 or world.computed == before):
            late.finish()  # one is always under way, unless the policy waits for it
    for one in jobs:
        alone = World(models, 64, 512)
        alone.submit(one)
        while not alone.ended(one.request.id):
            alone.tick()
        assert world.tokens(one.request.id) == alone.tokens(one.request.id)
        assert world.of(one.request.id)[0].cached_tokens == 0
    assert world.host_kv.counts.in_bytes > 0
    assert world.host_kv.used_bytes == 0
    assert world.computed == sum(30 + MAX_NEW - 1 for _ in jobs)
