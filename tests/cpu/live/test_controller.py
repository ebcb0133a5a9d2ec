"""Loops that break: how often one may, which request is at fault, and how a fresh policy begins."""

from collections import Counter
from collections.abc import Sequence
from typing import cast

import pytest

from c2cserve.core import events as ev
from c2cserve.core.actions import ClusterAction, Dispatch, Load
from c2cserve.core.machine import Slice
from c2cserve.core.model import ModelSpec, ModelState
from c2cserve.core.request import Delta, FinishReason, Job, Request, Sampling
from c2cserve.policy.cluster.policy import ClusterPolicy
from c2cserve.runtime.gateway import ModelFiles, Refused
from c2cserve.runtime.ports import no_record
from c2cserve.serving import loop_breaks
from c2cserve.serving.controller.controller import Controller
from c2cserve.serving.controller.directory import Directory, ModelRecord
from c2cserve.serving.controller.fleet import Fleet
from c2cserve.serving.controller.host import HostedModel, ModelHost
from c2cserve.serving.controller.jobs import JobTable, LiveJob
from c2cserve.serving.controller.loaded_models import LoadedModels
from c2cserve.serving.controller.restart import restart_ticks
from c2cserve.serving.controller.world import ControllerWorld
from c2cserve.serving.ipc import messages as msg


class Breaking:
    """A policy, the clock that it moves, and a world: each loop breaks after so many seconds."""

    wakeup = None

    def __init__(self, lives_s: Sequence[float], culprits: Sequence[bool] = ()) -> None:
        self._lives_s = iter(lives_s)
        self._culprits = iter(culprits)
        self.now = 0.0
        self.loops = 0

    @property
    def done(self) -> bool:
        self.loops += 1
        life_s = next(self._lives_s, None)
        if life_s is None:
            return True
        self.now += life_s
        raise KeyError("broken")

    def restart(self) -> bool:
        return next(self._culprits, False)

    def run(self, monkeypatch: pytest.MonkeyPatch) -> str | None:
        monkeypatch.setattr(loop_breaks.time, "monotonic", lambda: self.now)
        world = cast(ControllerWorld, self)
        return Controller(world, lambda _: (cast(ClusterPolicy, self), no_record)).run()


@pytest.mark.parametrize(
    ("lives_s", "ends"),
    [([1.0] * 4, None), ([1.0] * 5, "5 times within 60 s"), ([16.0] * 50, None)],
)
def test_a_loop_that_breaks_too_often_ends(
    monkeypatch: pytest.MonkeyPatch, lives_s: list[float], ends: str | None
) -> None:
    breaking = Breaking(lives_s)
    reason = breaking.run(monkeypatch)
    assert breaking.loops == len(lives_s) + (ends is None)
    assert reason is None if ends is None else ends in str(reason)


def test_breaks_by_the_fault_of_requests_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    breaking = Breaking([0.1] * 40, [False, True] * 20)
    assert breaking.run(monkeypatch) is None


def hosted(name: str) -> HostedModel:
    files = ModelFiles(name, "", 64, 64, (), 1.0, 0.1, 0, version=name)
    return HostedModel(ModelSpec(name, 100, 1, 512, 64), files, (), {}, "float32", {"id": name})


class Told:
    """A worker that takes note of what it is sent."""

    def __init__(self) -> None:
        self.slice = Slice("s0", "cpu", (0,))
        self.segments: dict[str, str] = {}

    def attach(self, message: msg.Attach) -> None:
        self.segments[message.spec.id] = message.segment

    def detach(self, model: str) -> None:
        self.segments.pop(model, None)


class Pool:
    """A host that numbers its segments."""

    budget_bytes = 1000

    def __init__(self) -> None:
        self.generation = 0
        self.held: dict[str, str] = {}

    def load(self, model: HostedModel) -> None:
        if model.spec.id == "broken":
            raise RuntimeError("can't start new thread")
        self.generation += 1
        self.held[model.spec.id] = f"segment.{self.generation}"

    def segment(self, model: str) -> str:
        return self.held[model]

    def evict(self, model: str) -> None:
        self.held.pop(model, None)


class Bench:
    def __init__(self) -> None:
        self.worker, self.pool, self.directory = Told(), Pool(), Directory()
        self.up = [self.worker]
        self.posted: list[ev.ClusterEvent] = []
        fleet, host = cast(Fleet, self), cast(ModelHost, self.pool)
        self.models = LoadedModels(fleet, host, self.directory, Counter(), self.posted.append)
        for name in ("a", "b", "broken"):
            self.directory.add(ModelRecord(hosted(name)))
            self.models.note(ev.ModelAdded(hosted(name).spec))

    def load(self, name: str) -> str:
        """Returns its segment."""
        self.models.load(name)
        assert self.models.note(ev.ModelUsable(name))
        return self.worker.segments[name]


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_an_attach_that_comes_too_late_is_not_held_against_newer_weights(bench: Bench) -> None:
    first = bench.load("a")
    bench.models.evict("a")
    stale = msg.Unusable("a", first, "no such file")
    assert bench.models.unusable("s0", stale) is None, "it has left the pool"
    second = bench.load("a")
    assert second != first
    bench.models.attached("s0", msg.Attached("a", first))
    assert bench.models.unusable("s0", stale) is None, "it is back, elsewhere"
    record = bench.directory.get("a")
    assert (record.state, record.attached) == (ModelState.LOADING, set())
    bench.models.attached("s0", msg.Attached("a", second))
    assert record.attached == {"s0"}
    failed = bench.models.unusable("s0", msg.Unusable("a", second, "bad manifest"))
    assert failed == ev.ModelFailed("a", "slice s0: bad manifest")
    assert record.state is ModelState.FAILED
    assert not bench.pool.held
    assert not bench.worker.segments


def test_the_end_of_a_load_that_was_given_up_is_not_told(bench: Bench) -> None:
    """It was on its way when a slice said that it cannot map the segment."""
    segment = bench.load("a")
    assert bench.models.unusable("s0", msg.Unusable("a", segment, "no room for a mapping"))
    assert not bench.models.note(ev.ModelLoaded("a", 100, 0.1))
    assert bench.directory.get("a").state is ModelState.FAILED


def test_a_load_that_cannot_begin_fails_its_model_alone(bench: Bench) -> None:
    bench.models.load("broken")
    [failed] = bench.posted
    assert isinstance(failed, ev.ModelFailed)
    assert "can't start new thread" in failed.reason
    assert bench.models.note(failed)
    assert bench.directory.get("broken").state is ModelState.FAILED


def live(name: str, slice_id: str | None, got: list[Delta | Refused]) -> LiveJob:
    request = Request(name, "a", 3, 8, arrival_s=0.0)
    return LiveJob(Job(request, (1, 2, 3), Sampling(seed=7)), got.append, slice_id)


def tick(
    policy: ClusterPolicy, now: float, events: Sequence[ev.ClusterEvent]
) -> Sequence[ClusterAction]:
    for event in events:
        policy.apply(event)
    return policy.decide(now)


def test_a_fresh_policy_goes_on_where_the_last_one_was(bench: Bench) -> None:
    bench.load("a")
    bench.models.note(ev.ModelLoaded("a", 100, 0.1))
    bench.models.load("b")
    got: list[Delta | Refused] = []
    jobs = JobTable()
    jobs.add(live("streaming", "s0", got))
    jobs.add(live("waiting", None, got))
    jobs.receive(Delta("streaming", (5, 6)), 1.0)
    assert jobs.withdraw_all() == ["streaming"]
    known = bench.models.announced
    entries = list(restart_ticks(1000, bench.directory, known, jobs, draining=True))
    assert [entry.job for entry in entries] == [None, "streaming", "waiting", None]
    policy, late = ClusterPolicy(), 1000.0
    loads: list[ClusterAction] = []
    for entry in entries:
        loads += tick(policy, late, entry.events)
    assert [one for one in loads if isinstance(one, Load)] == [Load("broken")], "b is loading"
    actions = tick(policy, late, [ev.SliceUp(Slice("s0", "cpu", (0,)))])
    assert Dispatch("streaming", "s0") in [*loads, *actions], "late, and draining: never refused"
    one = jobs.get("streaming")
    assert one is not None
    assert one.job.tokens == (1, 2, 3, 5, 6)
    assert (one.request.sent, one.request.max_new_tokens) == (2, 6)


def test_a_request_is_blamed_once_and_told() -> None:
    got: list[Delta | Refused] = []
    jobs = JobTable()
    jobs.add(live("r", "s0", got))
    assert jobs.blame("r", OverflowError("too large")) == [ev.Cancelled("r")]
    assert jobs.blame("r", OverflowError("too large")) == []
    assert got == [Delta("r", finish=FinishReason.ERROR, error="OverflowError: too large")]
