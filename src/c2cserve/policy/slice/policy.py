"""The fast loop: which model runs next on a slice, which of its requests, and where their KV lies.

Every iteration picks a model by the headroom of its most urgent request (SLINFER section 6). It
batches all the model's running decodes with prefill chunks in order of urgency. Where steps may
overlap, the next one is planned shortly before the last one ends. It may have the same sequences,
if their tokens are sampled where it reads them. Where a slice has host memory for KV, requests
rotate through its own (`policy.slice.kv_rotation`)."""

from collections.abc import Sequence
from math import inf

from c2cserve.core import events as ev
from c2cserve.core.actions import Drop, Fail, Fetch, Return, RunStep, SliceAction
from c2cserve.core.machine import Slice
from c2cserve.core.model import ModelSpec
from c2cserve.core.policy import Policy
from c2cserve.core.request import BLOCK_TOKENS
from c2cserve.core.step import Lane, SeqStep, Step
from c2cserve.policy.slice.batching import ActiveModel, Seq, StepInFlight, spare_tokens
from c2cserve.policy.slice.estimate import StepTime
from c2cserve.policy.slice.faults import Faults, groups, set_apart
from c2cserve.policy.slice.in_flight import Lookahead, StepNumbers, outcomes_of
from c2cserve.policy.slice.lanes import Lanes
from c2cserve.policy.slice.slice_memory import SliceMemory, with_kv_end
from c2cserve.policy.slice.strategies import ExtraT, SliceStrategies, live_strategies


class SlicePolicy(SliceMemory[ExtraT], Policy[ev.SliceEvent, SliceAction | ExtraT]):
    """A slice's policy. It is never done: its process is ended. Without `strategies` it is what a
    server runs, and has no actions of the type `ExtraT`."""

    def __init__(
        self, slice_: Slice, max_in_flight: int = 1,
        strategies: SliceStrategies[ExtraT] | None = None,
    ) -> None:  # fmt: skip
        """Build the policy of one slice. `max_in_flight`: steps at a time of one lane that are not
        parked. They run in the order of their launch; more than two only make newcomers wait."""
        strategies = strategies or live_strategies(slice_)
        super().__init__(slice_, strategies)
        self._max_in_flight = max_in_flight
        self._strategies = strategies
        self._lookahead = strategies.lookahead
        self._models: dict[str, ActiveModel] = {}
        self._lanes = Lanes(slice_.lanes)
        self._times: dict[tuple[str, Lane], StepTime] = {}
        """Step times of all models that ever were active here, in each lane."""
        self._came: list[Seq] = []
        """Requests since the last decision: no clock is read in between."""
        self._faults = Faults()
        self._step_ids = StepNumbers()
        self._activated = 0
        self.retries = 0
        """Requests whose step failed and that ran again,"""
        self.given_up = 0
        """and those that failed again, alone."""

    @property
    def done(self) -> bool:
        return False

    @property
    def wakeup(self) -> float | None:
        return self._wakeup

    @property
    def turns(self) -> int:
        return self._weights.turns

    @property
    def waiting(self) -> int:
        return sum(not seq.started for seq in self._seqs.values())

    def step_times(self) -> dict[str, StepTime]:
        return {name: model.time for name, model in self._models.items()}

    # ---- events ---------------------------------------------------------------------------------

    def apply(self, event: ev.SliceEvent) -> None:
        if isinstance(event, ev.StepDone):  # `match` looks names up; most events are this one
            self._step_done(event)
            return
        if isinstance(event, ev.Submitted):
            self._submitted(event)
            return
        match event:
            case ev.StepParked():
                self._in_flight.park(event.step_id)
            case ev.Fetched() if event.refused:
                self._weights.refused(event.model)
            case ev.Fetched():
                self._weights.fetched(event.model, event.took_s)
            case ev.Activated():
                self._activate(event.spec, event.keep)
            case ev.Deactivated():
                model = self._models.pop(event.model)
                self._idle(model)
                self._deactivated.append(model)
                self._retire(model)
            case ev.Withdrawn(request_id):
                self._withdraw(request_id)
            case ev.RecallAsked(request_id, running):
                self._recall(request_id, running=running)
            case ev.StepFailed(step_id, reason):
                self._step_failed(step_id, reason)
            case ev.MoveDone() | ev.PrefixMoved():
                self._moved(event)
            case ev.GemmsMeasured(name):
                control, active = self._strategies.gemm_control, self._models.get(name)
                if control is not None and active is not None:
                    self._actions += control.sample(event, active.tpot_s)
            case ev.ChunksProfiled():
                if self._strategies.chunk_table is not None:
                    self._strategies.chunk_table.take(event)

    def _submitted(self, event: ev.Submitted) -> None:
        request = event.request
        model = self._models[request.model]
        seq = self._seqs[request.id] = model.add(request, event.chained)
        self._came.append(seq)
        self._busies(model)
        self._shares.entered(request.tenant)
        self._weights.requested(request.model, request.arrival_s)
        if model.given_up:
            self._give_back(seq)
        else:
            self._truncate_if_too_long(seq)

    def _activate(self, spec: ModelSpec, keep: bool) -> None:
        if spec.id not in self._models:
            lane = self._lanes.of(spec.id, False if keep else None)
            self._activated += 1
            key, time = f"{spec.id}#{self._activated}", self._time(spec.id, lane)
            model = ActiveModel(
                spec.id, key, spec.kv_block_bytes, time, self._strategies.rank, self._activated,
                self._strategies.whole_prompts,
            )  # fmt: skip
            self._models[spec.id] = model
            self.arena.add_model(model.key, spec.kv_block_bytes)
            for before in self._deactivated:  # a withdrawn step of it may be left
                self._actions += self._weights.ended(before) if before.name == spec.id else ()
            self._weights.opened(model, spec)
            if keep:
                self._weights.activated(model, spec)

    def _lane_of(self, name: str) -> Lane:
        only = self._lanes.only
        return self._lanes.of(name, self._weights.streams(name)) if only is None else only

    def _time(self, name: str, lane: Lane) -> StepTime:
        if (time := self._times.get((name, lane))) is None:
            time = self._times[name, lane] = StepTime()
        return time

    def _withdraw(self, request_id: str) -> None:
        seq = self._seqs.get(request_id)
        if seq is not None:  # else it ended by itself while the word was on its way
            seq.withdrawn = True
            self._leave(seq)

    def _recall(self, request_id: str, *, running: bool) -> None:
        seq = self._seqs.get(request_id)  # None: it has ended meanwhile
        if seq is not None and running:
            seq.recalled = seq.stopping = True
            self._settle(seq)
        elif seq is not None and not (seq.started or seq.busy or seq.stopping or seq.failures):
            self._give_back(seq)

    def _step_done(self, event: ev.StepDone) -> None:
        flight, times = self._in_flight.landed(event.step_id), event.times
        if times and not all(seq.ended for seq in flight.seqs):  # else nothing ran
            kept = self._weights.streams(flight.step.model) is not None
            if not (flight.parked and kept):  # else most of it ran while its weights arrived
                took_s = event.compute_s / times
                flight.model.time.learn(flight.decodes, flight.prefill_tokens, took_s)
            self._lanes.landed(flight.step.model, event.streamed_bytes)
        outcomes = outcomes_of(flight.step, event)
        for part, seq, outcome in zip(flight.step.seqs, flight.seqs, outcomes, strict=True):
            self._land(seq, part, outcome, times)
        self._retire(flight.model)

    def _step_failed(self, step_id: int, reason: str) -> None:
        flight = self._in_flight.landed(step_id)
        self._lanes.forget()
        for part, seq in zip(flight.step.seqs, flight.seqs, strict=True):
            seq.in_flight -= 1
            if not seq.ended:
                seq.fail(part)
                seq.stopping = True
                if len(flight.seqs) == 1 and seq.suspect:
                    seq.at_fault = reason
            self._settle(seq)
        self._retire(flight.model)

    def _settle(self, seq: Seq) -> None:
        """Do what had to wait until the request was in no step and no move."""
        if seq.busy:
            return
        if seq.ended or seq.withdrawn:
            self._forget(seq)
        elif seq.at_fault:
            self._end_at_fault(seq)
        elif seq.recalled or (seq.stopping and seq.model.given_up):
            self._give_back(seq)
        elif seq.stopping:
            self.retries += 1
            self._stop(seq)
            set_apart(seq)
            self._actions.append(Drop(seq.request.id, requeued=True))

    def _end_at_fault(self, seq: Seq) -> None:
        """End a request that is at fault. If it is one of too many in a row, give its model up."""
        model = seq.model
        self.given_up += 1
        self._actions.append(Fail(seq.request.id, seq.at_fault))
        self._leave(seq)
        verdict = self._faults.at_fault(model.name, seq.at_fault)
        if verdict is not None and not model.given_up:
            model.given_up = True
            self._actions.append(verdict)
            for other in list(model.seqs.values()):
                other.stopping = True
                self._settle(other)

    def _give_back(self, seq: Seq) -> None:
        self._actions.append(Return(seq.request.id))
        self._leave(seq)

    def _land(self, seq: Seq, part: SeqStep, outcome: ev.SeqOutcome | None, times: int) -> None:
        seq.in_flight -= 1
        if not seq.ended:
            hashed = BLOCK_TOKENS * len(seq.request.prefix_hashes)
            failed = seq.stopping or (outcome is not None and outcome.failed)
            if outcome is not None and outcome.failed:
                self._unseal(seq)  # earlier steps' KV may be the cause
            elif part.start < hashed and not failed:
                assert part.start == seq.computed, "a step ends before one whose KV it reads"
                self._seal(seq, part)
            seq.land(part, 0 if outcome is None else outcome.drawn, times)
            seq.ended = outcome is not None and outcome.finished
            if self._faults and not failed and (recovery := self._faults.landed(seq)) is not None:
                self._actions.append(recovery)
            if seq.ended and not seq.withdrawn:
                self._leave(seq)
                return
            if not (seq.withdrawn or seq.stopping):
                self._truncate_if_too_long(seq)
                return
        self._settle(seq)

    def _moved(self, event: ev.MoveDone | ev.PrefixMoved) -> None:
        seq = self._end_move(event)
        if seq is not None:
            self._settle(seq)
            self._retire(seq.model)

    # ---- decisions ------------------------------------------------------------------------------

    def decide(self, now: float) -> Sequence[SliceAction | ExtraT]:
        self._now = now
        for seq in self._came:
            seq.sent_s = now
        self._came.clear()
        self._shares.refresh(now)
        if self._weights.plans:
            self._actions += self._weights.plan(now, self._in_flight.models())
        self._wakeup = self._weights.wakeup
        lanes = self._lanes.in_order()
        if self._rotation is not None and any(self._may_launch(lane, now) for lane in lanes):
            seqs = self._in_hbm_or_ready()
            self._make_way_for(self._rotation.plan(seqs, now, self._weights.needed_bytes))
        if self._lookahead is not None and not self._in_flight and not self._shares.greedy:
            self._launch_several(self._lookahead, now)
        self._lanes.short = None
        for lane in lanes:
            if not self._fill(lane, now):
                self._lanes.short = lane
                break
        if self._stuck():
            self._actions += self._weights.break_deadlock()
            self._wake_by(self._weights.wakeup)
        actions, self._actions = self._actions, []
        fetches = any(isinstance(action, Fetch) for action in actions)
        return with_kv_end(actions, self.arena.end_bytes) if fetches else actions

    def _stuck(self) -> bool:
        """Return whether resident models cannot run, and will not by themselves. KV that is on its
        way may let them."""
        moving = self._rotation is not None and self._rotation.under_way
        goes_on = not self._seqs or (self._lanes.only is not None and bool(self._in_flight))
        if goes_on or moving or (self.prefixes is not None and self.prefixes.bringing):
            return False
        return self._lanes.stuck(self._in_flight.steps(), self._weights.streams)

    def _fill(self, lane: Lane, now: float) -> bool:
        """Launch the lane's next steps, if it is time. Return False if a decode finds no block, and
        the requests that could be preempted are in a step: its end comes first."""
        self._short_of_room = False
        tried: set[str] = set()
        while self._may_launch(lane, now) and (turn := self._turn(lane, tried, now)) is not None:
            late, name = turn
            model, freed = self._models[name], len(self._actions)
            model.time = self._time(name, lane)
            if self._launch(model, lane, now):
                self._lanes.late_ran[lane] = late
                self._shares.ran(model)
                continue
            if len(self._actions) > freed:
                tried.clear()  # a request was preempted: all may have room now
            else:
                tried.add(name)
            if self._in_flight.running and self._short_of_room:
                return False
        return True

    def _turn(self, lane: Lane, tried: set[str], now: float) -> tuple[bool, str] | None:
        """Return which of the lane's models runs next. A model changes lanes between steps."""
        candidates = [
            (model.first(), model.last_step, model.name)
            for model in self._busy
            if model.name not in tried and self._weights.computes(model.name)
            and self._lane_of(model.name) == lane and not self._in_flight.holds_up(model, lane)
        ]  # fmt: skip
        allowed = self._shares.candidates(candidates, self._models)
        return self._weights.turn(allowed, now, self._lanes.late_ran[lane])

    def _may_launch(self, lane: Lane, now: float) -> bool:
        """Steps of a lane do not overlap while requests compete for memory: only between steps can
        they change places."""
        contended = self._rotation is not None and self._rotation.contended
        most = 1 if contended else self._max_in_flight
        return self._in_flight.running_in(lane) < most and self._is_time(lane, now)

    def _launch_several(self, lookahead: Lookahead, now: float) -> None:
        """Launch several decode steps at once, where single decisions would come to the same."""
        models = [one for one in self._busy if self._weights.computes(one.name)]
        assert len(self._lanes.late_ran) == 1, "lanes end in any order, which none foresees"
        late_ran = self._lanes.late_ran["resident"]
        steps = lookahead.decide(models, self._step_ids, now, late_ran)
        if steps is not None:
            self._in_flight.launched(steps.in_flight)
            self._lanes.late_ran["resident"] = steps.late
            self._actions.append(steps.run)

    def _is_time(self, lane: Lane, now: float) -> bool:
        begin_s = self._in_flight.next_plan_s(now, lane)
        if now < begin_s < inf:
            self._wake_by(begin_s)
        return now >= begin_s

    def _launch(self, model: ActiveModel, lane: Lane, now: float) -> bool:
        """Start the model's next step. Return False if nothing of it can run now."""
        before = len(self._actions)
        for line, limit_s in self._shares.lines(model, model.line_up(now), self._models):
            short = self._in_flight.of(model) and self._lacks_room(model, line[0])
            if short or len(self._actions) > before:
                return False
            for decodes, prefills in groups(model, line):
                if self._launch_group(model, lane, decodes, prefills, now, limit_s):
                    return True
        return False

    def _launch_group(
        self, model: ActiveModel, lane: Lane, decodes: list[Seq], prefills: list[Seq],
        now: float, limit_s: float | None,
    ) -> bool:  # fmt: skip
        seqs: list[Seq] = []
        parts: list[SeqStep] = []
        left = 0
        if prefills and len(decodes) < self._slice.max_batch:
            beside = [one for one in self._busy if self._lane_of(one.name) == lane]
            left = self._strategies.prefill_budget(
                beside, model, prefills[0], now, len(decodes), self._slice.max_step_tokens
            )
        for seq in decodes[: self._slice.max_batch]:
            # Paused or not started any more: one of those before it has preempted it.
            room = seq.issued < len(seq.blocks) * BLOCK_TOKENS
            if seq.started and not seq.paused and (room or self._make_room(seq)):
                seqs.append(seq)
                parts.append(seq.issue(1))
        decoding = len(parts)
        for seq in prefills:
            if limit_s is not None and self._shares.is_greedy(seq):
                left = min(left, spare_tokens(model.time, parts, decoding, limit_s))
            if left <= 0 or len(parts) == self._slice.max_batch:
                break
            if not seq.paused and (seq.started or self._admit(seq)):
                seqs.append(seq)
                parts.append(seq.issue(min(left, seq.expected - seq.issued)))
                left -= parts[-1].tokens
        if not parts:
            return False
        step = Step(self._step_ids.take(), model.name, tuple(parts), self.arena.end_bytes, lane)
        prefilling = sum(part.tokens for part in parts[decoding:])
        expected_s = model.time.step_s(decoding, prefilling)
        launched = StepInFlight(step, model, seqs, decoding, prefilling, expected_s)
        self._in_flight.launched((launched,))
        model.last_step = step.id
        self._actions.append(RunStep(step))
        return True
