"""A live slice whose models take turns in its memory: all requests end, whatever is refused."""

from itertools import groupby
from random import Random

import pytest
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from slice_world import STREAM_STEPS, SliceTestWorld

from c2cserve.core.actions import Fetch, Move, Release, RunStep, SliceAction
from c2cserve.core.events import Activated, Fetched, SliceEvent, StepDone
from c2cserve.core.machine import GpuShare, Slice
from c2cserve.core.model import ModelSpec
from c2cserve.core.request import BLOCK_TOKENS, Request, Slo
from c2cserve.core.step import Step
from c2cserve.policy.slice.lanes import STREAMED_BYTES

SLAB = 4096


class KeptWorld(SliceTestWorld):
    """Weights have slabs of their own, above KV. There may be too few in spite of the books."""

    def __init__(
        self, slice_: Slice, seed: int, specs: list[ModelSpec], refuse: float, park: float,
        unkept: frozenset[str] = frozenset(),
    ) -> None:  # fmt: skip
        """`refuse`: how often a load is refused for no reason that the policy could know. The
        models `unkept` always stream."""
        super().__init__(slice_, seed, specs, 2, park, contents=slice_.host_kv_bytes > 0)
        self.slabs = slice_.kv_bytes // SLAB
        self.refuse = refuse
        self.unkept = unkept
        self.weights: dict[str, set[int]] = {}
        """Model -> slabs of its weights, loaded or loading."""
        self.state = {spec.id: "absent" for spec in specs}
        self.loads: dict[str, int] = {}
        """Model -> number of its last load."""
        self.load_ends_s: dict[str, float] = {}
        self.overlapped = 0
        """Steps that began while their weights were loaded."""
        self.pending: list[tuple[Fetched, int]] = []
        self.fetches = self.refusals = self.releases = self.displaced = 0

    def activate(self, when: float = 0.0) -> None:
        for spec in self.specs.values():
            self.at(when, Activated(spec, keep=spec.id not in self.unkept))

    def _act(self, action: SliceAction) -> None:
        match action:
            case Fetch(model, kv_end_bytes):
                assert self.state[model] in ("absent", "refused")
                assert kv_end_bytes is not None
                self._fetch(model, kv_end_bytes)
            case Release(model):
                assert self.state[model] in ("resident", "refused")
                assert all(step.model != model for step in self.flying.values()), "it is read"
                self.releases += 1
                self._leave(model, "absent")
            case RunStep(step):
                self._check_place(step)
                leaving = self.policy._weights._draining  # pyright: ignore
                assert step.model not in leaving
                assert step.kv_end_bytes is not None
                self._grow(step.kv_end_bytes)
                super()._act(action)
            case Move(direction="in", kv_end_bytes=kv_end_bytes):
                assert kv_end_bytes is not None
                self._grow(kv_end_bytes)
                super()._act(action)
            case _:
                super()._act(action)

    def _check_place(self, step: Step) -> None:
        """Its weights are here, or it streams: in the other lane, if there is one."""
        if step.model in self.unkept:
            assert step.lane == ("streaming" if self.slice.lanes == 2 else "resident")
            return
        streams = self.policy._weights._weights[step.model].state == "refused"  # pyright: ignore
        assert streams or self.state[step.model] != "absent"
        self.overlapped += self.state[step.model] == "loading"
        assert step.lane == ("streaming" if streams and self.slice.lanes == 2 else "resident")

    def _streamed_bytes(self, step: Step) -> int:
        return 0 if self.state[step.model] == "resident" else 2 * STREAMED_BYTES

    def _arrives_s(self, step: Step) -> float:
        return self.load_ends_s[step.model] if self.state[step.model] == "loading" else self.now

    def _slowness(self, step: Step) -> float:
        return STREAM_STEPS if step.lane == "streaming" else 1.0

    def _fetch(self, model: str, kv_end_bytes: int) -> None:
        self.fetches += 1
        self._grow(kv_end_bytes)
        wanted = -(-self.specs[model].weight_bytes // SLAB)
        taken = set[int]().union(*self.weights.values())
        free = [i for i in range(-(-kv_end_bytes // SLAB), self.slabs) if i not in taken]
        if len(free) < wanted or self.random.random() < self.refuse:
            self._refuse(model)
            return
        self.weights[model] = set(free[-wanted:])
        self.state[model] = "loading"
        self.loads[model] = number = self.loads.get(model, 0) + 1
        took_s = self.pace * self.random.uniform(0.001, 0.1)
        event = Fetched(model, took_s)
        self.pending.append((event, number))
        self.load_ends_s[model] = self.now + took_s
        self.at(self.now + took_s, event)

    def _grow(self, kv_end_bytes: int) -> None:
        for model, slabs in list(self.weights.items()):
            if min(slabs) * SLAB < kv_end_bytes:
                self.displaced += 1
                self._refuse(model)

    def _refuse(self, model: str) -> None:
        self.refusals += 1
        self._leave(model, "refused")
        self.loads[model] = self.loads.get(model, 0) + 1
        self.at(self.now, Fetched(model, 0.0, refused=True))

    def _leave(self, model: str, state: str) -> None:
        self.weights.pop(model, None)
        self.state[model] = state

    def _told(self, event: SliceEvent) -> bool:
        """Whether the policy is told: a load that was cancelled does not end."""
        if isinstance(event, Fetched) and not event.refused:
            number = next(number for one, number in self.pending if one is event)
            if self.loads[event.model] != number:
                return False
            self.state[event.model] = "resident"
        return True


@pytest.mark.parametrize("lanes", [1, 2])
@settings(max_examples=examples(150), deadline=None)
@given(seed=st.integers(0, 10**9), host_slabs=st.sampled_from((0, 4, 1 << 10)))
def test_all_requests_end_whatever_is_refused(lanes: int, seed: int, host_slabs: int) -> None:
    """With host memory KV rotates, and there may be more of it than the arena holds."""
    random = Random(seed)
    slabs = random.randint(30, 90)
    slice_ = Slice(
        "s", "gpu", kv_bytes=slabs * SLAB, slab_bytes=SLAB, max_batch=8, max_step_tokens=64,
        gpu=GpuShare("g", 1), hbm_bytes=slabs * SLAB, link="l", link_bytes_per_s=1e6, lanes=lanes,
        host_kv_bytes=host_slabs * SLAB,
    )  # fmt: skip
    # One in five may be as large as all memory, beside which little KV fits, or none.
    most = [random.choice((slabs // 3,) * 4 + (slabs,)) for _ in "abcd"]
    specs = [
        ModelSpec(name, random.randint(1, largest) * SLAB, 2, block, 4096)
        for name, block, largest in zip("abcd", (512, 1000, 2048, 4096), most, strict=True)
    ]
    unkept = frozenset("d" if lanes == 2 and random.random() < 0.5 else "")
    world = KeptWorld(slice_, seed, specs, random.choice((0.0, 0.0, 0.2, 1.0)), 0.05, unkept)
    world.activate()
    kv_slabs = 0
    for i in range(random.randint(1, 40)):
        one = Request(
            f"r{i}", random.choice("abcd"), random.randint(1, 120), random.randint(1, 40),
            random.uniform(0.0, 3.0), Slo(random.choice((0.1, 1.0, 8.0)), 0.1),
        )  # fmt: skip
        # What the controller promises: the two largest models fit beside all KV.
        blocks = -(-one.max_len // BLOCK_TOKENS) + 1
        kv_slabs += -(-blocks * world.specs[one.model].kv_block_bytes // SLAB) + 1
        if kv_slabs > slabs // (1 if host_slabs else 3):
            break
        world.submit_at(one.arrival_s, one, None, random.random() < 0.8)
        if random.random() < 0.15:
            world.withdraw(one.arrival_s + random.uniform(0.0, 1.0), one.id)
    world.run()
    assert [name for name, job in world.jobs.items() if not job.ended] == []
    assert world.policy.arena.held_bytes == 0
    kept = {job.request.model for job in world.jobs.values()} - unkept
    assert world.fetches > 0 or not kept or max(most) == slabs


@pytest.mark.parametrize("seed", range(8))
def test_a_model_that_computes_all_the_time_makes_room_in_time(seed: int) -> None:
    """One step or two of it are in flight at any time. It is far ahead of its client, and so leaves
    for a model that is due."""
    slice_ = Slice(
        "s", "gpu", kv_bytes=60 * SLAB, slab_bytes=SLAB, max_batch=8, max_step_tokens=64,
        gpu=GpuShare("g", 1), hbm_bytes=60 * SLAB, link="l", link_bytes_per_s=1e6,
    )  # fmt: skip
    specs = [ModelSpec("ahead", 35 * SLAB, 2, 512, 4096), ModelSpec("due", 35 * SLAB, 2, 512, 4096)]
    world = KeptWorld(slice_, seed, specs, 0.0, 0.0)
    world.activate()
    world.submit_at(0.0, Request("r1", "ahead", 20, 900, 0.0, Slo(60.0, 0.1)), None, True)
    world.submit_at(2.0, Request("r2", "due", 20, 20, 2.0, Slo(1.0, 0.1)), None, True)
    world.run()
    assert {job.ended for job in world.jobs.values()} == {"finished"}
    began_s = next(
        now for now, _, actions in world.log
        if any(isinstance(one, Fetch) and one.model == "due" for one in actions)
    )  # fmt: skip
    longest_s = max(done.compute_s for _, events, _ in world.log for done in events
                    if isinstance(done, StepDone))  # fmt: skip
    assert began_s <= 3.0 + 2 * longest_s
    assert (world.fetches, world.releases) == (3, 2)
    assert world.overlapped == 2, "first prompts use weights as they arrive, later tokens do not"


@pytest.mark.parametrize("lanes", [1, 2])
def test_a_request_that_does_not_fit_beside_the_weights_makes_its_model_stream(lanes: int) -> None:
    """A model as large as the arena is never loaded. One that leaves room for short requests is
    resident for them, streams while there is a long one, and is loaded again afterwards. It changes
    lanes with its weights."""
    slice_ = Slice(
        "s", "gpu", kv_bytes=20 * SLAB, slab_bytes=SLAB, max_batch=8, max_step_tokens=64,
        gpu=GpuShare("g", 1), hbm_bytes=20 * SLAB, link="l", link_bytes_per_s=1e6, lanes=lanes,
    )  # fmt: skip
    specs = [ModelSpec("a", 20 * SLAB, 2, 512, 4096), ModelSpec("b", 16 * SLAB, 2, 2048, 4096)]
    world = KeptWorld(slice_, 1, specs, 0.0, 0.0)
    world.activate()
    slo = Slo(8.0, 1.0)
    world.submit_at(0.0, Request("whole", "a", 20, 20, 0.0, slo), None, False)
    world.submit_at(5.0, Request("short", "b", 20, 20, 5.0, slo), None, False)
    world.submit_at(10.0, Request("long", "b", 120, 200, 10.0, slo), None, False)
    world.submit_at(60.0, Request("last", "b", 20, 20, 60.0, slo), None, False)
    world.run()
    assert {job.ended for job in world.jobs.values()} == {"finished"}
    assert (world.fetches, world.releases) == (2, 1)
    streaming = "streaming" if lanes == 2 else "resident"
    assert {step.lane for _, step in world.steps if step.model == "a"} == {streaming}
    lanes_of_b = [step.lane for _, step in world.steps if step.model == "b"]
    assert [lane for lane, _ in groupby(lanes_of_b)] == (
        ["resident", "streaming", "resident"] if lanes == 2 else ["resident"]
    )
    assert world.policy.arena.held_bytes == 0


@pytest.mark.parametrize("seed", [26, 119, 1, 2, 3])
def test_a_deadlock_of_resident_models_does_not_last_as_long_as_a_stream(seed: int) -> None:
    """Resident models find no free KV, because absent ones hold it (seeds 26 and 119). The stream
    beside them always has a step in flight, and goes on for much longer than all of their work."""
    random = Random(seed)
    slabs = random.randint(24, 60)
    slice_ = Slice(
        "s", "gpu", kv_bytes=slabs * SLAB, slab_bytes=SLAB, max_batch=8, max_step_tokens=64,
        gpu=GpuShare("g", 1), hbm_bytes=slabs * SLAB, link="l", link_bytes_per_s=1e6, lanes=2,
    )  # fmt: skip
    specs = [
        ModelSpec(name, random.randint(slabs // 4, slabs // 2) * SLAB, 2, block, 4096)
        for name, block in zip("abc", (1000, 2048, 4096), strict=True)
    ]
    specs.append(ModelSpec("d", SLAB, 2, 512, 4096))
    world = KeptWorld(slice_, seed, specs, 0.0, 0.0, frozenset("d"))
    world.activate()
    world.submit_at(0.0, Request("stream", "d", 16, 400, 0.0, Slo(8.0, 1.0)), None, True)
    for i in range(random.randint(4, 16)):
        one = Request(
            f"r{i}", random.choice("abc"), random.randint(1, 120), random.randint(1, 60),
            random.uniform(0.0, 3.0), Slo(random.choice((0.1, 1.0, 8.0)), 0.1),
        )  # fmt: skip
        world.submit_at(one.arrival_s, one, None, True)
    world.run()
    assert all(job.ended for job in world.jobs.values())
    last_s = {part.request_id: now for now, step in world.steps for part in step.seqs}
    assert max(last_s, key=lambda name: last_s[name]) == "stream"
