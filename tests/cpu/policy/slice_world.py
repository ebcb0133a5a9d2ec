"""A slice in virtual time: an executor that knows only lengths, and that checks every step it is
given against what a real one relies on."""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count, pairwise
from random import Random

from kv_contents import KvContents

from c2cserve.core.actions import (
    BringPrefix,
    Drop,
    DropPrefix,
    Fail,
    GiveUp,
    Move,
    Return,
    RunStep,
    SavePrefix,
    SliceAction,
    Truncate,
)
from c2cserve.core.events import (
    Activated,
    Deactivated,
    MoveDone,
    PrefixMoved,
    SeqOutcome,
    SliceEvent,
    StepDone,
    StepFailed,
    StepParked,
    Submitted,
    Withdrawn,
)
from c2cserve.core.machine import Slice
from c2cserve.core.model import ModelSpec
from c2cserve.core.request import BLOCK_TOKENS, Request
from c2cserve.core.step import Lane, Step
from c2cserve.policy.slice.lanes import STREAMED_BYTES
from c2cserve.policy.slice.policy import SlicePolicy

_MOVES = 0.2
"""How often a step ends with its model's weights having come or gone."""
STREAM_STEPS = 20.0
"""A step that streams takes so many times as long as another."""
Tick = tuple[float, list[SliceEvent], list[SliceAction]]


@dataclass
class Job:
    request: Request
    stop_after: int
    """Tokens it draws before it stops by itself."""
    length: int
    chained: bool = False
    blocks: list[int] = field(default_factory=list)
    issued: int = 0
    """Tokens with KV, reused ones and those of steps in flight included."""
    computed: int = 0
    """Those of steps that are done."""
    drawn: int = 0
    flights: int = 0
    drawing: int = 0
    """Tokens that steps in flight draw."""
    ended: str = ""
    recomputed: int = 0
    poison: bool = False
    """Every step that it has a part in fails."""
    away: bool = False
    """Its KV went to the host, and no step has run since."""
    lost: bool = False
    """A step of it failed, and it has not begun anew."""
    failures: int = 0
    suspect: bool = False
    """It has drawn nothing since."""

    @property
    def owed(self) -> int:
        return min(self.stop_after, self.request.max_new_tokens)


class SliceTestWorld:
    """`runtime.ports.Source` and `Executor`. Steps run one after the other, take random times and
    sometimes park first. A step ends after all steps before it that share a request with it, as in
    `engine.executor`: it reads the KV that they write."""

    def __init__(
        self,
        slice_: Slice,
        seed: int,
        specs: Iterable[ModelSpec],
        max_in_flight: int = 1,
        park: float = 0.0,
        fail: float = 0.0,
        fault: float = 0.0,
        token_s: float = 0.0,
        contents: bool = False,
    ) -> None:
        """`fail`: how often values are not numbers; `fault`: how often a step raises. `token_s`: a
        step takes so long for each of its tokens, instead of some random time. `contents`: follow
        the KV in each block (`kv_contents`), which takes long where there are many."""
        self.slice = slice_
        self.random = Random(seed)
        self.specs = {spec.id: spec for spec in specs}
        self.policy = SlicePolicy(slice_, max_in_flight)
        self.max_in_flight = max_in_flight
        self.park, self.fail, self.fault = park, fail, fault
        self.token_s = token_s
        self.given_up: list[str] = []
        self.now = 0.0
        self.pace = self.random.choice([1.0, 10.0])
        self.told: list[SliceEvent] = []
        self.jobs: dict[str, Job] = {}
        self.flying: dict[int, Step] = {}
        self.parked: set[int] = set()
        """Steps that wait for weights."""
        self.ends_s: dict[int, float] = {}
        """When steps in flight will be done."""
        self.contents: dict[int, tuple[str, int]] = {}
        """Block -> (model, hash) as sealed by a confirmed step: what a reader of it may expect."""
        self.saved: dict[int, tuple[str, int] | None] = {}
        """The same of blocks of prefixes on the host, by number."""
        self.kv = KvContents(slice_, checks=contents)
        self.log: list[Tick] = []
        self.steps: list[tuple[float, Step]] = []
        self.surplus = 0
        """Parts of steps for requests that had ended when the step was done."""
        self._heap: list[tuple[float, int, SliceEvent | None]] = []
        self._order = count()
        self._free_s: dict[Lane, float] = {}
        """When all steps of a lane that are not parked will be done."""
        self._streaming: dict[str, bool] = {}
        """Whether steps of a model read its weights over a link now. Only where there are lanes."""

    def at(self, when: float, event: SliceEvent | None) -> None:
        """None: nothing happens but that the policy is asked."""
        heapq.heappush(self._heap, (when, next(self._order), event))

    def submit_at(
        self, when: float, request: Request, stop_after: int | None = None, chained: bool = False
    ) -> None:
        owed = request.max_new_tokens if stop_after is None else stop_after
        self.jobs[request.id] = Job(request, owed, request.prompt_len, chained)
        self.at(when, Submitted(request, chained))

    def run(self, until: float = 1e6, max_ticks: int = 200_000) -> None:
        for _ in range(max_ticks):
            if not self._heap or self._heap[0][0] > until:
                return
            self.now = self._heap[0][0]
            events: list[SliceEvent] = []
            while self._heap and self._heap[0][0] <= self.now:
                event = heapq.heappop(self._heap)[2]
                if isinstance(event, MoveDone):
                    ended = bool(self.jobs[event.request_id].ended)
                    self.kv.end_move(event.request_id, ended=ended)
                elif isinstance(event, PrefixMoved):
                    for one, offset in self.kv.end_prefix(event.move):
                        self.contents[offset] = self.saved[one]
                if event is not None and self._told(event):
                    events.append(self._done(event) if isinstance(event, StepDone) else event)
            self.told += events
            for event in events:
                self.policy.apply(event)
            actions = list(self.policy.decide(self.now))
            self.log.append((self.now, events, actions))
            for action in actions:
                self._act(action)
            self.check_memory()
            wakeup = self.policy.wakeup
            if wakeup is not None:
                assert wakeup > self.now, "asks to be asked without end"
                if not self._heap or wakeup < self._heap[0][0]:
                    self.at(wakeup, None)
        raise AssertionError("the world does not come to an end")

    def _told(self, event: SliceEvent) -> bool:
        """Whether the policy is told of an event that was to come."""
        return True

    # ---- executor -------------------------------------------------------------------------------

    def _act(self, action: SliceAction) -> None:
        match action:
            case RunStep(step):
                self._start(step)
            case Drop(request_id, requeued):
                job = self.jobs[request_id]
                assert not job.flights
                assert not job.ended
                assert not self.kv.moving(request_id)
                job.blocks, job.issued, job.computed, job.away = [], 0, 0, False
                self.kv.forget(request_id)
                if not requeued:
                    job.ended = "dropped"
            case Fail(request_id) | Return(request_id):
                job = self.jobs[request_id]
                assert not job.flights
                assert not job.ended
                job.ended = "fault" if isinstance(action, Fail) else "returned"
                self.kv.forget(request_id)
            case Move():
                self._move(action)
            case SavePrefix() | BringPrefix():
                self.kv.begin_prefix(action)
                for one, offset in zip(action.ids, action.blocks, strict=True):
                    if isinstance(action, SavePrefix):
                        self.saved[one] = self.contents.get(offset)
                took_s = self.pace * self.random.uniform(0.001, 0.03)
                self.at(self.now + took_s, PrefixMoved(action.move, took_s))
            case DropPrefix():
                self.kv.drop_prefix(action)
            case GiveUp(model):
                self.given_up.append(model)
            case Truncate(request_id):
                job = self.jobs[request_id]
                assert not job.flights
                assert not job.ended
                job.ended = "truncated"
                self.kv.forget(request_id)

    def _move(self, move: Move) -> None:
        """KV moves beside what computes."""
        job = self.jobs[move.request_id]
        assert not job.ended
        assert move.direction == "copy" or not job.flights
        if move.direction == "out":
            job.away, job.blocks = True, []
        self.kv.begin_move(move, self.specs[job.request.model].kv_block_bytes)
        done = self.now + self.pace * self.random.uniform(0.001, 0.03)
        self.at(done, MoveDone(move.request_id, move.direction))

    def _start(self, step: Step) -> None:
        assert step.seqs
        assert len(step.seqs) <= self.slice.max_batch
        flying = [
            s for i, s in self.flying.items() if i not in self.parked and s.lane == step.lane
        ]  # fmt: skip
        assert len(flying) < self.max_in_flight
        assert all(s.lane == step.lane for s in self.flying.values() if s.model == step.model), (
            "a model is in two lanes"
        )
        told = {event.step_id for event in self.told if isinstance(event, StepParked)}
        assert all(self.flying[i].model != step.model for i in self.parked if i in told)
        prefill = sum(part.tokens for part in step.seqs if part.tokens > 1)
        assert prefill <= self.slice.max_step_tokens
        written: set[int] = set()
        self.kv.begin_step(step.kv_end_bytes)
        for part in step.seqs:
            job = self.jobs[part.request_id]
            assert job.request.model == step.model
            assert not job.ended
            assert not job.lost or part.fresh
            assert not job.suspect or len(step.seqs) == 1, "it is not alone"
            assert not job.drawing or job.chained, "a token is read that nobody knows"
            if part.fresh:
                assert not job.flights
                job.blocks, job.lost = [], False
                assert not job.away or part.start == job.issued, "it did not stop here"
                job.recomputed += job.issued - part.start if job.away else job.issued
                job.issued = job.computed = part.start
                if not job.away:
                    reused = part.new_blocks[: part.start // BLOCK_TOKENS]
                    self._check_reuse(job, reused, part.start)
                job.away = False
            assert not job.away, "its KV is not here"
            job.blocks += part.new_blocks
            assert part.tokens >= 1
            assert part.start == job.issued, "a token is skipped or repeated"
            end = part.start + part.tokens
            assert end <= job.length + job.drawing
            assert end <= job.request.max_len
            assert end <= len(job.blocks) * BLOCK_TOKENS
            assert part.emits == (end == job.length + job.drawing)
            own = {
                job.blocks[i]
                for i in range(part.start // BLOCK_TOKENS, (end - 1) // BLOCK_TOKENS + 1)
            }
            assert not own & written, "two sequences write one block"
            written |= own
            size = self.specs[step.model].kv_block_bytes
            self.kv.compute(step.id, job.request, job.blocks, size, part.start, end)
            job.flights += 1
            job.issued = end
            job.drawing += part.emits
            assert job.drawn + job.drawing <= job.request.max_new_tokens, "a step for nothing"
        for offset in written:
            self.contents.pop(offset, None)
        names = [part.request_id for part in step.seqs]
        self.steps.append((self.now, step))
        took = self.pace * self.random.uniform(0.001, 0.01) + 1e-4 * step.tokens
        if self.token_s:
            took = self.token_s * step.tokens
        before = [
            i for i, other in self.flying.items()
            if {part.request_id for part in other.seqs} & set(names)
        ]  # fmt: skip
        arrives_s = self._arrives_s(step)
        waits = arrives_s > self.now or not self.parked.isdisjoint(before)
        if waits or self.random.random() < self.park:
            after_s = max([arrives_s, self.now, *(self.ends_s[i] for i in before)])
            done = after_s + took + self.random.uniform(0.0, 0.2)
            self.at(self.now, StepParked(step.id))
            self.parked.add(step.id)
        else:
            took *= self._slowness(step)
            done = self._free_s[step.lane] = max(self.now, self._free_s.get(step.lane, 0.0)) + took
        self.flying[step.id] = step
        self.ends_s[step.id] = done
        outcomes = ()  # drawn when it is done
        self.at(done, StepDone(step.id, outcomes, took, 1, self._streamed_bytes(step)))

    def _streamed_bytes(self, step: Step) -> int:
        """A model's weights come and go, as others' do."""
        if self.slice.lanes == 1:
            return 0
        streams = self._streaming.get(step.model, True)
        if self.random.random() < _MOVES:
            self._streaming[step.model] = not streams
        return 2 * STREAMED_BYTES if streams else 0

    def _arrives_s(self, step: Step) -> float:
        """When the last of the weights is there that it waits for."""
        return self.now

    def _slowness(self, step: Step) -> float:
        return STREAM_STEPS if self._streaming.get(step.model, False) else 1.0

    def _check_reuse(self, job: Job, reused: tuple[int, ...], start: int) -> None:
        assert start % BLOCK_TOKENS == 0
        assert start < job.length, "the last token is not computed"
        for offset, value in zip(reused, job.request.prefix_hashes, strict=False):
            sealed = self.contents.get(offset)
            assert sealed == (job.request.model, value), "a stale block is reused"

    def _faulty(self, step: Step) -> bool:
        poisoned = any(self.jobs[part.request_id].poison for part in step.seqs)
        return poisoned or (self.fault > 0.0 and self.random.random() < self.fault)

    def _failed(self, step: Step) -> StepFailed:
        for part in step.seqs:
            job = self.jobs[part.request_id]
            job.flights -= 1
            job.drawing -= part.emits
            if not job.ended:
                job.lost = job.suspect = True
                job.failures += 1
        return StepFailed(step.id, "an injected fault")

    def _done(self, event: StepDone) -> StepDone | StepFailed:
        step = self.flying.pop(event.step_id)
        self.parked.discard(event.step_id)
        del self.ends_s[event.step_id]
        for part in step.seqs:
            self.kv.end_step(step.id, part.request_id)
        if self._faulty(step):
            return self._failed(step)
        outcomes: list[SeqOutcome] = []
        failing = self.random.random() < self.fail
        for part in step.seqs:
            job = self.jobs[part.request_id]
            job.flights -= 1
            job.drawing -= part.emits
            if job.ended:
                self.surplus += 1
                continue
            if job.lost:
                continue
            if failing:
                job.ended = "failed"
                for offset in job.blocks:
                    self.contents.pop(offset, None)
                self.kv.forget(part.request_id)
                outcomes.append(SeqOutcome(part.request_id, 0, finished=True, failed=True))
                continue
            first = part.start // BLOCK_TOKENS
            assert part.start == job.computed, "a step ends before one whose KV it reads"
            job.computed = part.start + part.tokens
            for index in range(first, job.computed // BLOCK_TOKENS):
                if index < len(job.request.prefix_hashes):
                    value = job.request.prefix_hashes[index]
                    self.contents[job.blocks[index]] = (step.model, value)
            if part.emits:
                job.length += 1
                job.drawn += 1
                job.suspect = False
                finished = job.drawn >= job.owed
                outcomes.append(SeqOutcome(part.request_id, 1, finished))
                if finished:
                    job.ended = "finished"
                    self.kv.forget(part.request_id)
        done = tuple(outcomes)
        return StepDone(step.id, done, event.compute_s, 1, event.streamed_bytes)

    # ---- invariants -----------------------------------------------------------------------------

    def check_memory(self) -> None:
        """Blocks lie in the arena, apart from each other; only full computed prompt blocks are
        shared, by sequences of one model with the same hash there."""
        owners: dict[int, tuple[str, int, int | None]] = {}
        intervals: dict[int, int] = {}
        for job in self.jobs.values():
            if job.ended and not job.flights:
                continue
            size = self.specs[job.request.model].kv_block_bytes
            for index, offset in enumerate(job.blocks):
                assert offset >= 0
                assert offset + size <= self.slice.kv_bytes
                full = (index + 1) * BLOCK_TOKENS <= job.computed
                hashes = job.request.prefix_hashes
                value = hashes[index] if full and index < len(hashes) else None
                mine = (job.request.model, index, value)
                if offset in owners:
                    assert value is not None, "a block has two owners"
                    assert owners[offset] == mine, "a block has two contents"
                owners[offset] = mine
                intervals[offset] = size
        spans = sorted(intervals.items())
        for (a, size), (b, _) in pairwise(spans):
            assert a + size <= b, "blocks overlap"
        assert self.policy.arena.held_bytes >= sum(intervals.values())
        tier, rotation = self.policy.prefixes, self.policy._rotation
        if tier is not None and rotation is not None:
            assert tier.used_bytes == self.kv.prefix_bytes
            assert tier.used_bytes + rotation.host_bytes <= self.slice.host_kv_bytes
        for name, seq in self.policy._seqs.items():
            assert seq.length == self.jobs[name].length, "a drawn token is lost or counted twice"

    def check_end(self) -> None:
        """All requests have ended, and hold nothing."""
        for job in self.jobs.values():
            assert job.ended
            if job.ended == "finished":
                assert job.drawn == job.owed
        assert self.policy.running == self.policy.waiting == 0
        assert self.policy.arena.held_bytes == 0

    def activate(self, when: float = 0.0) -> None:
        for spec in self.specs.values():
            self.at(when, Activated(spec))

    def withdraw(self, when: float, request_id: str) -> None:
        self.at(when, Withdrawn(request_id))

    def deactivate(self, when: float, model: str) -> None:
        self.at(when, Deactivated(model))
