"""A worker's loop where steps end by themselves: it sleeps until the engine notifies it, and the
status page says what computes."""

import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from c2cserve.core.actions import Fetch, GiveUp, Recover, Return, RunStep, SliceAction
from c2cserve.core.events import (
    Activated,
    Deactivated,
    Fetched,
    RecallAsked,
    SeqOutcome,
    SliceEvent,
    StepDone,
    StepFailed,
    StepParked,
    Submitted,
    Withdrawn,
)
from c2cserve.core.model import ModelSpec
from c2cserve.core.request import Delta, FinishReason, Job, Request, Sampling
from c2cserve.core.step import Lane, Step
from c2cserve.runtime.slice_stats import SliceStats
from c2cserve.serving.ipc import messages as msg
from c2cserve.serving.ipc.channel import Channel
from c2cserve.serving.ipc.status_page import Field, StatusPage
from c2cserve.serving.worker.slice_engine import EngineState, Unusable
from c2cserve.serving.worker.world import WorkerWorld

SPEC = ModelSpec("m", 1, 1, 512, 64)


class Engine:
    """Steps are over when `finish` is called, from any thread."""

    parked = False
    stats = SliceStats(
        weights_kept_bytes=3, weights_hit_bytes=5, weights_streamed_bytes=7, graph_steps=2,
        flash_steps=23, flash_missed_steps=29, weights_lent_bytes=11, weights_peer_bytes=6,
        kv_host_bytes=13, kv_out_bytes=17, kv_in_bytes=19, parts_rebuilt=37,
    )  # fmt: skip

    def __init__(self, world: WorkerWorld) -> None:
        self._world = world
        self._steps: deque[int] = deque()
        self._over: deque[SliceEvent] = deque()
        self.polls = 0
        self.told: list[SliceAction] = []
        self.preparing: set[str] = set()
        """Requests that take a while to prepare,"""
        self.prepared: dict[str, Job] = {}
        """and those of them that are ready."""
        self._waiting: dict[str, Job] = {}
        self.unusable: list[Unusable] = []

    def attach(self, spec: ModelSpec, segment: str, config: dict[str, object], dtype: str) -> None:
        if segment == "gone":
            raise FileNotFoundError(segment)

    def detach(self, model: str) -> None:
        if model == "stuck":
            raise RuntimeError("it does not let go")

    def prepare(self, job: Job) -> bool:
        if job.request.id == "wrong":
            raise ValueError("it cannot be prepared")
        if job.request.id in self.preparing:
            self._waiting[job.request.id] = job
        return job.request.id not in self.preparing

    def ready(self, name: str) -> None:
        self.prepared[name] = self._waiting.pop(name)

    def forget(self, request_id: str) -> bool:
        one = self._waiting.pop(request_id, None) or self.prepared.pop(request_id, None)
        return one is not None

    def add(self, job: Job) -> bool:
        self.forget(job.request.id)
        if 1 << 31 in job.tokens:
            raise OverflowError("no token is that large")
        return job.sampling.temperature == 0.0

    def submit(self, action: SliceAction) -> None:
        if isinstance(action, RunStep):
            self._steps.append(action.step.id)
        else:
            self.told.append(action)

    def poll(self) -> bool:
        self.polls += 1
        while self._over:
            self._world.report(self._over.popleft(), ())
        unusable, self.unusable = self.unusable, []
        return EngineState(self.parked, list(self.prepared.values()), unusable)

    def finish(self) -> None:
        self._over.append(StepDone(self._steps.popleft(), (), 0.25))
        self._world.notify()

    def fail(self) -> None:
        self._over.append(StepFailed(self._steps.popleft(), "no"))

    def park(self) -> None:
        self._over.append(StepParked(self._steps[-1]))


class Bench:
    def __init__(self, folder: Path) -> None:
        ends = socket.socketpair()
        self.controller, self.channel = map(Channel, ends)
        self.page = StatusPage(folder / "page", create=True)
        self.policy_stats = SliceStats(step_retries=41, retries_failed=43)
        self.world = WorkerWorld(self.channel, self.page, lambda: self.policy_stats, list)
        self.engine = Engine(self.world)
        self.world.start(self.engine, "", 1)
        self.tell(msg.Attach(SPEC, "segment.1", {}, ""), msg.Switch("m", active=True))

    def tell(self, *messages: msg.ToWorker) -> None:
        for message in messages:
            self.controller.send(msg.encode(message))

    def run(self, step: int, lane: Lane = "resident") -> None:
        self.world.submit(RunStep(Step(step, "m", (), lane=lane)))

    def wait(self, limit_s: float = 10.0) -> list[SliceEvent]:
        return list(self.world.wait(time.monotonic() + limit_s)[1])


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    assert bench.wait(0.05) == [Activated(SPEC)]
    yield bench
    bench.world.stop()
    bench.controller.close()
    bench.channel.close()


def test_it_sleeps_until_a_step_is_over(bench: Bench) -> None:
    bench.run(1)
    polls = bench.engine.polls
    threading.Timer(0.2, bench.engine.finish).start()
    begin_s = time.monotonic()
    assert bench.wait() == [StepDone(1, (), 0.25)]
    assert 0.15 < time.monotonic() - begin_s < 5.0
    assert bench.engine.polls - polls <= 3, "it was not asked over and over"


def test_a_step_that_is_over_before_it_sleeps_is_not_missed(bench: Bench) -> None:
    bench.run(1)
    bench.engine.finish()
    assert bench.wait() == [StepDone(1, (), 0.25)]
    bench.run(2)
    bench.engine.finish()
    assert bench.wait() == [StepDone(2, (), 0.25)]


def test_a_step_ends_with_one_report(bench: Bench) -> None:
    """Its tokens go to the server at once, its end to the policy."""
    bench.tell(msg.Submit(job("r")))
    bench.wait()
    heard(bench)
    bench.run(1)
    delta, done = Delta("r", (5,)), StepDone(1, (SeqOutcome("r", 1, finished=False),), 0.25)
    bench.world.report(done, [delta])
    assert heard(bench) == [msg.Output((delta,))]
    assert bench.wait() == [done]
    assert bench.page.stats().output_tokens == 1


def test_the_page_tells_what_computes(bench: Bench) -> None:
    page = bench.page
    assert page[Field.STEP_STARTED_S] == 0.0
    bench.run(1)
    first_s = page[Field.STEP_STARTED_S]
    assert first_s > 0.0
    bench.run(2)
    assert page[Field.STEP_STARTED_S] == first_s
    bench.engine.finish()
    bench.wait()
    assert page[Field.STEP_STARTED_S] > first_s, "the second one computes since then"
    bench.engine.park()
    bench.wait()
    assert page[Field.STEP_STARTED_S] == 0.0, "a parked step does not"
    bench.engine.finish()
    bench.wait()
    stats = page.stats()
    assert (stats.steps, page[Field.BUSY_S]) == (2, 0.5)
    assert stats.weights_kept_bytes == 3
    assert (stats.weights_hit_bytes, stats.weights_streamed_bytes) == (5, 7)
    assert (stats.flash_steps, stats.flash_missed_steps) == (23, 29)
    assert (stats.weights_lent_bytes, stats.weights_peer_bytes) == (11, 6)
    assert stats.graph_steps == 2
    assert (stats.kv_host_bytes, stats.kv_out_bytes, stats.kv_in_bytes) == (13, 17, 19)


def test_the_engine_says_whose_tokens_are_chained(bench: Bench) -> None:
    for name, temperature in (("a", 0.0), ("b", 1.0)):
        job = Job(Request(name, "m", 1, 1, 0.0), (1,), Sampling(0, temperature))
        bench.controller.send(msg.encode(msg.Submit(job)))
    events: list[SliceEvent] = []
    while len(events) < 2:
        events += bench.wait()
    assert [(e.request.id, e.chained) for e in events if isinstance(e, Submitted)] == [
        ("a", True), ("b", False),
    ]  # fmt: skip


def heard(bench: Bench) -> list[msg.ToController]:
    return [msg.decode_to_controller(data) for data in bench.controller.receive()]


def test_a_request_that_can_not_be_taken_fails_alone(bench: Bench) -> None:
    for name, token in (("bad", 1 << 31), ("good", 1)):
        job = Job(Request(name, "m", 1, 1, 0.0), (token,), Sampling(0))
        bench.controller.send(msg.encode(msg.Submit(job)))
    assert bench.wait() == [Submitted(Request("good", "m", 1, 1, 0.0))]
    error = "OverflowError: no token is that large"
    failed = Delta("bad", finish=FinishReason.ERROR, error=error)
    assert heard(bench)[-1] == msg.Output((failed,))


def test_a_failed_step_is_counted_and_is_no_progress(bench: Bench) -> None:
    page = bench.page
    bench.policy_stats = SliceStats(running=1, step_retries=41, retries_failed=43)
    bench.wait(0.01)
    before_s = page[Field.PROGRESS_S]
    bench.run(1)
    bench.engine.fail()
    assert bench.wait() == [StepFailed(1, "no")]
    stats = page.stats()
    assert stats.step_failures == 1
    assert (stats.steps, page[Field.STEP_STARTED_S]) == (0, 0.0)
    assert page[Field.PROGRESS_S] == before_s
    assert (stats.step_retries, stats.retries_failed, stats.parts_rebuilt) == (41, 43, 37)
    bench.run(2)
    bench.engine.finish()
    bench.wait()
    assert page[Field.PROGRESS_S] > before_s
    before_s = page[Field.PROGRESS_S]
    bench.wait(0.01)
    assert page[Field.PROGRESS_S] == before_s, "its request waits, and nothing is done"
    bench.engine.parked = True
    bench.wait(0.01)
    assert page[Field.PROGRESS_S] > before_s, "for weights that are on their way"


def test_progress_of_a_lane_does_not_hide_that_the_other_one_hangs(bench: Bench) -> None:
    page = bench.page
    bench.policy_stats = SliceStats(running=2)
    bench.wait(0.01)
    for step in (1, 2):
        bench.run(step)
    bench.engine.finish()
    bench.wait()
    one_lane_s = page[Field.PROGRESS_S]
    bench.run(3, "streaming")
    hangs_since_s = time.monotonic()
    for step in (4, 5, 6):
        bench.engine.finish()
        bench.wait()
        bench.run(step)
        assert one_lane_s <= page[Field.PROGRESS_S] <= hangs_since_s
        bench.engine._steps.rotate(1)  # the stream's step stays behind the others


def test_what_the_policy_says_of_models_and_requests_is_passed_on(bench: Bench) -> None:
    heard(bench)
    bench.world.submit(GiveUp("m", "no", True))
    bench.world.submit(Return("r"))
    bench.world.submit(Recover("m"))
    assert bench.engine.told == [Return("r")]
    assert heard(bench) == [msg.Failed("m", "no", True), msg.Returned("r"), msg.Recovered("m")]


def job(name: str, tokens: tuple[int, ...] = (1,), model: str = "m") -> Job:
    return Job(Request(name, model, len(tokens), 1, 0.0), tokens, Sampling(0))


def test_a_request_that_does_not_decode_fails_alone(bench: Bench) -> None:
    bad = msgspec.to_builtins(msg.Submit(job("bad")))
    bad["job"]["request"]["prompt_len"] = 0
    bench.controller.send(msgspec.msgpack.encode(bad))
    bench.tell(msg.Submit(job("good")))
    [submitted] = bench.wait()
    assert isinstance(submitted, Submitted)
    assert submitted.request.id == "good"
    said = heard(bench)[-1]
    assert isinstance(said, msg.Output)
    assert [(one.request_id, one.finish) for one in said.deltas] == [("bad", FinishReason.ERROR)]


def test_a_request_of_a_model_that_is_not_active_fails_alone(bench: Bench) -> None:
    bench.tell(msg.Switch("unknown", active=True), msg.Submit(job("r", model="unknown")))
    bench.tell(msg.Switch("unknown", active=False), msg.Detach("unknown"), msg.Submit(job("s")))
    [submitted] = bench.wait()
    assert isinstance(submitted, Submitted)
    assert submitted.request.id == "s"
    said = heard(bench)[-1]
    assert isinstance(said, msg.Output)
    assert [one.request_id for one in said.deltas] == ["r"]


def test_a_request_that_is_recalled_is_given_back_when_the_policy_says_so(bench: Bench) -> None:
    heard(bench)
    bench.tell(msg.Submit(job("r")), msg.Recall("r"))
    [_, asked] = bench.wait()
    assert asked == RecallAsked("r")
    assert heard(bench) == []
    bench.world.submit(Return("r"))
    assert heard(bench) == [msg.Returned("r")]


def test_a_model_that_cannot_be_attached_or_detached_is_no_others_trouble(bench: Bench) -> None:
    heard(bench)
    gone = ModelSpec("gone", 1, 1, 512, 64)
    bench.tell(msg.Attach(gone, "gone", {}, ""), msg.Detach("stuck"), msg.Submit(job("r")))
    [submitted] = bench.wait()
    assert isinstance(submitted, Submitted)
    assert heard(bench) == [msg.Unusable("gone", "gone", "gone")]


def test_a_model_that_turns_out_to_be_unreadable_is_reported_once(bench: Bench) -> None:
    """It was attached before all of it could be read. The controller has it detached."""
    heard(bench)
    bench.engine.unusable = [Unusable("m", "segment.1", "CUDA refuses it")]
    assert bench.wait(0.05) == []
    assert heard(bench) == [msg.Unusable("m", "segment.1", "CUDA refuses it")]
    assert bench.wait(0.05) == []
    assert heard(bench) == []
    bench.run(1)
    bench.engine.finish()
    assert bench.wait() == [StepDone(1, (), 0.25)], "the slice goes on"


def test_a_reset_is_done_when_no_step_can_draw_for_the_requests_any_more(bench: Bench) -> None:
    bench.tell(msg.Submit(job("a")), msg.Submit(job("ended")), msg.Submit(job("withdrawn")))
    bench.tell(msg.Withdraw("withdrawn"))
    assert len(bench.wait()) == 4
    bench.world.report(None, [Delta("ended", (1,), finish=FinishReason.STOP)])
    bench.run(1)
    bench.policy_stats = SliceStats(running=1)
    bench.tell(msg.Reset(1), msg.Switch("m", active=True), msg.Submit(job("a")), msg.Reset(2))
    heard(bench)
    assert bench.wait() == [Withdrawn("a"), Deactivated("m")]
    assert bench.wait(0.05) == []
    bench.engine.finish()
    assert bench.wait() == [StepDone(1, (), 0.25)]
    assert bench.wait(0.05) == []
    assert heard(bench) == [], "the policy still holds it"
    bench.policy_stats = SliceStats()
    events = bench.wait()
    assert heard(bench) == [msg.ResetDone(1)]
    assert [type(event).__name__ for event in events] == [
        "Activated", "Submitted", "Withdrawn", "Deactivated",
    ]  # fmt: skip
    bench.wait(0.05)
    assert heard(bench) == [msg.ResetDone(2)]


def test_every_second_of_the_thread_and_of_its_requests_is_counted(bench: Bench) -> None:
    began_s, before = time.monotonic(), bench.page.stats()
    bench.wait(0.03)
    assert bench.page.stats().bubble_seconds == 0.0, "there are no requests"
    bench.tell(msg.Submit(job("r")))
    bench.wait()
    bench.wait(0.03)
    bench.world.submit(Fetch("m", 0))
    bench.wait(0.03)
    bench.world.report(Fetched("m", 0.03), ())
    bench.run(1)
    bench.wait()
    threading.Timer(0.05, bench.engine.finish).start()
    bench.wait()
    bench.world.report(None, [Delta("r", (1,), finish=FinishReason.STOP)])
    bench.wait(0.03)
    took_s, stats = time.monotonic() - began_s, bench.page.stats()
    assert stats.in_flight_seconds >= 0.04
    assert stats.bubble_seconds >= stats.loading_bubble_seconds + 0.025
    assert stats.loading_bubble_seconds >= 0.025
    assert stats.in_flight_seconds + stats.bubble_seconds <= took_s
    laps = ("policy_seconds", "submit_seconds", "action_seconds", "poll_seconds", "sleep_seconds")
    risen = [getattr(stats, name) - getattr(before, name) for name in laps]
    assert all(seconds > 0.0 for seconds in risen)
    assert sum(risen) == pytest.approx(took_s, abs=0.02)


def test_the_engines_figures_are_not_made_for_every_step(bench: Bench) -> None:
    """They cost as much as a part of a step; they are on the page when the slice comes to rest."""
    made = 0

    class Counting(Engine):
        @property
        def stats(self) -> SliceStats:  # pyright: ignore[reportIncompatibleVariableOverride]
            nonlocal made
            made += 1
            return SliceStats(graph_steps=made)

    bench.engine.__class__ = Counting
    bench.run(0)
    for step in range(1, 51):
        bench.run(step)
        bench.engine.finish()
        bench.wait()
    before, began_s = made, bench.world._publishing._published_s
    bench.engine.finish()
    bench.wait()
    bench.wait(0.01)
    assert before <= 2 + (time.monotonic() - began_s + 50 * 0.05) / 0.05
    assert made > before
    assert bench.page.stats().graph_steps == made


def test_a_request_is_shown_to_the_policy_when_it_is_prepared(bench: Bench) -> None:
    bench.engine.preparing = {"slow"}
    bench.tell(msg.Submit(job("slow")), msg.Submit(job("fast")))
    assert [event.request.id for event in bench.wait() if isinstance(event, Submitted)] == ["fast"]
    assert bench.wait(0.05) == []
    bench.engine.ready("slow")
    assert [event.request.id for event in bench.wait() if isinstance(event, Submitted)] == ["slow"]
    assert bench.wait(0.05) == []


def test_a_request_leaves_while_it_is_prepared(bench: Bench) -> None:
    bench.engine.preparing = {"withdrawn", "recalled", "reset", "late"}
    for name in ("withdrawn", "recalled", "reset"):
        bench.tell(msg.Submit(job(name)))
    bench.tell(msg.Withdraw("withdrawn"), msg.Recall("recalled"))
    assert bench.wait(0.05) == []
    assert heard(bench)[-1] == msg.Returned("recalled")
    bench.tell(msg.Reset(1), msg.Switch("m", active=True))
    assert bench.wait() == [Deactivated("m")]
    assert bench.wait() == [Activated(SPEC)]
    assert heard(bench) == [msg.ResetDone(1)]
    assert not any(bench.engine.forget(name) for name in ("withdrawn", "recalled", "reset"))


@pytest.mark.parametrize("left", ["", "withdrawn", "reset"])
def test_a_request_that_had_to_leave_the_steps_comes_back(bench: Bench, left: str) -> None:
    """Its output goes on, unless it was withdrawn before the loop heard of it."""
    bench.tell(msg.Submit(job("r")))
    bench.wait()
    if left:
        bench.tell(msg.Withdraw("r") if left == "withdrawn" else msg.Reset(1))
        assert Withdrawn("r") in bench.wait()
    bench.engine.prepared["r"] = job("r")
    expected = [] if left else ["r"]
    assert [one.request.id for one in bench.wait(0.1) if isinstance(one, Submitted)] == expected
    assert not bench.engine.forget("r")


def test_a_request_whose_preparation_fails_fails_alone(bench: Bench) -> None:
    bench.tell(msg.Submit(job("wrong")), msg.Submit(job("good")))
    assert len(bench.wait()) == 1
    failed = Delta(
        "wrong", finish=FinishReason.ERROR, error="ValueError: it cannot be prepared"
    )  # fmt: skip
    assert msg.Output((failed,)) in heard(bench)
