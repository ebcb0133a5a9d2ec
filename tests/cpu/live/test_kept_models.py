"""A worker whose model is kept: its weights are loaded, then it computes; also in the record."""

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from c2cserve.core.actions import EngineAction, Fetch, Release, RunStep, SliceAction
from c2cserve.core.events import (
    Fetched,
    SeqOutcome,
    SliceEvent,
    StepDone,
    StepParked,
)
from c2cserve.core.machine import GpuShare, Slice
from c2cserve.core.model import ModelSpec
from c2cserve.core.request import Job, Request, Sampling, Slo
from c2cserve.policy.slice.policy import SlicePolicy
from c2cserve.runtime.driver import tick
from c2cserve.runtime.record import Record
from c2cserve.runtime.replay import replay
from c2cserve.runtime.slice_stats import SliceStats
from c2cserve.serving.ipc import messages as msg
from c2cserve.serving.ipc.channel import Channel
from c2cserve.serving.ipc.status_page import StatusPage
from c2cserve.serving.worker.slice_engine import EngineState
from c2cserve.serving.worker.world import WorkerWorld

SLAB = 1 << 10
SLICE = Slice(
    "s", "gpu", kv_bytes=100 * SLAB, slab_bytes=SLAB, gpu=GpuShare("g", 1), hbm_bytes=100 * SLAB,
    link="l", link_bytes_per_s=1e9,
)  # fmt: skip
SPEC = ModelSpec("m", 40 * SLAB, 1, 512, 4096)
OTHER = ModelSpec("n", 50 * SLAB, 1, 512, 4096)


class Engine:
    """Loads and steps are over when the test says so."""

    def __init__(self, world: WorkerWorld) -> None:
        self._world = world
        self.stats = SliceStats()
        self.told: list[EngineAction] = []
        self.over: list[SliceEvent] = []

    def attach(self, spec: ModelSpec, segment: str, config: dict[str, object], dtype: str) -> None:
        pass

    def detach(self, model: str) -> None:
        pass

    def prepare(self, job: Job) -> bool:
        return True

    def forget(self, request_id: str) -> bool:
        return False

    def add(self, job: Job) -> bool:
        return True

    def submit(self, action: EngineAction) -> None:
        self.told.append(action)

    def poll(self) -> EngineState:
        while self.over:
            self._world.report(self.over.pop(0), ())
        return EngineState(parked=False)


class Worker:
    def __init__(self, folder: Path) -> None:
        self.controller, self.channel = map(Channel, socket.socketpair())
        self.policy = SlicePolicy(SLICE, 2)
        page = StatusPage(folder / "page", create=True)
        self.world = WorkerWorld(self.channel, page, SliceStats, list)
        self.engine = Engine(self.world)
        arguments = {"slice": SLICE, "max_in_flight": 2}
        self.path = folder / "record"
        self.record: Record = Record(self.path, "s/1", "slice", arguments)
        self.world.start(self.engine, "", 1)
        self.heard()

    def tell(self, *messages: msg.ToWorker) -> None:
        for message in messages:
            self.controller.send(msg.encode(message))

    def heard(self) -> list[msg.ToController]:
        return [msg.decode_to_controller(data) for data in self.controller.receive()]

    def run(self, *over: SliceEvent) -> list[EngineAction]:
        """One tick, after these events; return what the engine was told in it."""
        self.engine.told.clear()
        self.engine.over += over
        now, events = self.world.wait(time.monotonic() + 10.0)
        tick(self.policy, now, events, self.world, self._recorded)
        return list(self.engine.told)

    def _recorded(
        self, now: float, events: "list[SliceEvent]", actions: "list[SliceAction]"
    ) -> None:
        self.record(now, events, actions)

    def activate(self, *specs: ModelSpec, keep: bool = True) -> None:
        for spec in specs:
            self.tell(msg.Attach(spec, f"segment.{spec.id}", {}, ""))
            self.tell(msg.Switch(spec.id, active=True, keep=keep))

    def ask(self, name: str, model: str, slo: Slo | None = None, new: int = 3) -> None:
        request = Request(name, model, 20, new, time.monotonic(), slo or Slo())
        self.tell(msg.Submit(Job(request, (1,) * 20, Sampling(0))))


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    worker = Worker(tmp_path)
    yield worker
    worker.record.close()
    worker.world.stop()
    worker.controller.close()
    worker.channel.close()
    result = replay(worker.path)
    assert result.equal, result
    assert result.streams[0].ticks > 0


def steps(actions: list[EngineAction]) -> list[int]:
    return [action.step.id for action in actions if isinstance(action, RunStep)]


def first_step(worker: Worker, *over: SliceEvent) -> int:
    """The step that begins with the load of its model, and waits for it."""
    fetch, step = [one for one in worker.run(*over) if not isinstance(one, Release)]
    assert isinstance(fetch, Fetch)
    assert isinstance(step, RunStep)
    assert step.step.model == fetch.model
    assert fetch.kv_end_bytes == step.step.kv_end_bytes == SLAB, "its KV lies below its weights"
    assert worker.run(StepParked(step.step.id)) == []
    return step.step.id


def test_a_kept_model_computes_while_it_is_fetched(worker: Worker) -> None:
    worker.activate(SPEC)
    worker.ask("r", "m")
    step = first_step(worker)
    worker.heard()
    assert not steps(worker.run(Fetched("m", 0.5))), "its step is under way"
    assert msg.Ready("m", 0.5) in worker.heard()
    done = StepDone(step, (SeqOutcome("r", 1, finished=True),), 0.01)
    worker.run(done)
    worker.tell(msg.Switch("m", active=False))
    assert worker.run() == [Release("m")]


def test_others_that_come_meanwhile_follow_when_the_step_is_over(worker: Worker) -> None:
    worker.activate(SPEC)
    worker.ask("r", "m")
    step = first_step(worker)
    worker.ask("s", "m")
    assert worker.run() == [], "the model has a step that is parked"
    worker.run(Fetched("m", 0.5))
    assert steps(worker.run(StepDone(step, (SeqOutcome("r", 1, finished=False),), 0.01)))


def test_the_time_of_a_step_beside_its_load_teaches_nothing(worker: Worker) -> None:
    worker.activate(SPEC)
    worker.ask("r", "m")
    step = first_step(worker)
    worker.run(Fetched("m", 0.5))
    again = steps(worker.run(StepDone(step, (SeqOutcome("r", 1, finished=False),), 0.01)))
    assert worker.policy.step_times()["m"].prefill_token_s == 0.0
    worker.run(StepDone(again[0], (SeqOutcome("r", 1, finished=False),), 0.002))
    assert worker.policy.step_times()["m"].decode_step_s(1) == 0.002


def test_a_model_that_is_refused_places_streams(worker: Worker) -> None:
    """Its first step reads what has not arrived where it is."""
    worker.activate(SPEC)
    worker.ask("r", "m", new=9)
    step = first_step(worker)
    for _ in range(2):
        assert not steps(worker.run(Fetched("m", 0.0, refused=True))), "it asks again"
    assert not steps(worker.run(Fetched("m", 0.0, refused=True))), "its step is under way"
    assert msg.Ready("m", 0.0) in worker.heard(), "the controller waits for it no more"
    assert steps(worker.run(StepDone(step, (SeqOutcome("r", 1, finished=False),), 0.01)))


def test_a_model_that_is_not_kept_computes_at_once(worker: Worker) -> None:
    worker.activate(SPEC, keep=False)
    worker.ask("r", "m")
    assert steps(worker.run())
    worker.tell(msg.Switch("m", active=False))
    assert worker.run() == []


def test_an_idle_model_leaves_for_one_with_requests(worker: Worker) -> None:
    large = ModelSpec("n", 70 * SLAB, 1, 512, 4096)
    worker.activate(SPEC, large)
    worker.ask("a", "m")
    step = first_step(worker)
    worker.run(Fetched("m", 0.5))
    worker.run(StepDone(step, (SeqOutcome("a", 1, finished=True),), 0.01))
    worker.ask("b", "n")
    told = worker.run()
    assert told[:2] == [Release("m"), Fetch("n", SLAB)]
    assert len(steps(told)) == 1


def test_a_busy_model_drains_before_its_weights_leave(worker: Worker) -> None:
    """Two steps of it are in flight. There is no third, and the load begins after both."""
    large = ModelSpec("n", 70 * SLAB, 1, 512, 4096)
    worker.activate(SPEC, large)
    worker.ask("a", "m", Slo(60.0, 60.0), new=50)
    step = first_step(worker)
    worker.run(Fetched("m", 0.5))
    [step] = steps(worker.run(StepDone(step, (SeqOutcome("a", 1, finished=False),), 0.001)))
    told = worker.run(StepDone(step, (SeqOutcome("a", 1, finished=False),), 0.001))
    flying = steps(told)
    while len(flying) < 2:
        flying += steps(worker.run())
    worker.ask("b", "n", Slo(0.01, 0.1))
    assert worker.run() == []
    first, second = flying
    assert worker.run(StepDone(first, (SeqOutcome("a", 1, finished=False),), 0.001)) == []
    over = StepDone(second, (SeqOutcome("a", 1, finished=False),), 0.001)
    told = worker.run(over)
    assert told[:2] == [Release("m"), Fetch("n", 2 * SLAB)]
    assert len(steps(told)) == 1


@pytest.mark.parametrize("again", [False, True])
def test_weights_of_a_deactivated_model_stay_until_its_last_step_has_ended(
    worker: Worker, again: bool
) -> None:
    """Its steps may not have begun yet: they would stream all of its weights."""
    large = ModelSpec("n", 70 * SLAB, 1, 512, 4096)
    worker.activate(SPEC, large)
    worker.ask("a", "m")
    step = first_step(worker)
    worker.run(Fetched("m", 0.5))
    worker.tell(msg.Withdraw("a"), msg.Switch("m", active=False))
    worker.ask("b", "n")
    assert not {Release("m"), Fetch("n", 0)} & set(worker.run())
    if again:  # only a withdrawn step still reads them, and these books are of the new instance
        worker.tell(msg.Switch("m", active=True, keep=True))
        assert worker.run()[0] == Release("m")
    told = worker.run(StepDone(step, (SeqOutcome("a", 1, finished=False),), 0.001))
    assert (Release("m") in told) != again
    assert again or any(isinstance(action, Fetch) for action in told)


@pytest.mark.parametrize("ended", [False, True])
def test_a_reset_drops_the_weights_of_resident_models(worker: Worker, ended: bool) -> None:
    """Those of a model whose step is under way leave when it has ended."""
    worker.activate(SPEC, OTHER)
    worker.ask("a", "m")
    step = first_step(worker)
    worker.run(Fetched("m", 0.5))
    over = StepDone(step, (SeqOutcome("a", 1, finished=True),), 0.001)
    if ended:
        worker.run(over)
    worker.tell(msg.Reset(1))
    told = worker.run()
    assert (Release("m") in told) == ended
    if not ended:
        assert Release("m") in worker.run(over)
    assert worker.policy.arena.free_slabs == 100
