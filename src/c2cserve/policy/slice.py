"""The fast loop: which model runs next on a slice, which of its requests, and where their KV lies.

Every iteration picks a model by the headroom of its most urgent request (SLINFER section 6) and
batches all its running decodes with prefill chunks in order of urgency. Where steps may overlap,
the next one is planned shortly before the last one ends, of the same sequences if their tokens are
drawn where the next step reads them. Where a slice has host memory for KV, requests rotate through
its own (`policy.rotary`).
"""

from collections.abc import Sequence
from itertools import count

from c2cserve.core import events as ev
from c2cserve.core.actions import Drop, RunStep, SliceAction, Truncate
from c2cserve.core.machine import Slice
from c2cserve.core.model import ModelSpec
from c2cserve.core.request import BLOCK_TOKENS
from c2cserve.core.step import SeqStep, Step
from c2cserve.policy.ahead import Limits, decide_ahead, plan
from c2cserve.policy.alpha import AlphaBank
from c2cserve.policy.batching import (
    BY_ARRIVAL,
    BY_HEADROOM,
    ActiveModel,
    Flight,
    Seq,
    prefill_budget,
    to_preempt,
)
from c2cserve.policy.estimate import StepTime
from c2cserve.policy.flights import Flights
from c2cserve.policy.kv import KvArena
from c2cserve.policy.presets import C2CSERVE, Preset
from c2cserve.policy.rotary import Rotary
from c2cserve.policy.shifts import EASE_S, Shifts

_LOOKAHEAD_SCARCE = 8
"""Steps decided at once while a model waits for memory."""


class SlicePolicy:
    """`runtime.ports.Policy[SliceEvent, SliceAction]`. Never done: its process is ended."""

    done = False
    wakeup: float | None = None

    def __init__(
        self, slice_: Slice, max_in_flight: int = 1, preset: Preset = C2CSERVE, lookahead: int = 1
    ) -> None:
        """`max_in_flight`: steps at a time that are not parked. They run in the order of their
        launch; more than one or two only make newcomers wait. `lookahead`: see `policy.ahead`."""
        self._slice = slice_
        self._max_in_flight = max_in_flight
        self._preset = preset
        # On GPUs what KV leaves of the arena is a cache of weights.
        cached_bytes = None if slice_.gpu is None else slice_.kv_bytes // 2
        self.arena = KvArena(slice_.kv_bytes, slice_.slab_bytes, cached_bytes)
        rotation = preset.rotation if slice_.host_kv_bytes else None
        self._rotary = None if rotation is None else Rotary(self.arena, slice_, rotation)
        self._shifts = Shifts(self.arena, slice_, rotates=preset.keeps)
        self._lookahead = 1 if self._rotary is not None else lookahead
        self._alphas = AlphaBank() if preset.alpha else None
        self._models: dict[str, ActiveModel] = {}
        self._leaving: list[ActiveModel] = []
        self._seqs: dict[str, Seq] = {}
        self._flights = Flights()
        self._times: dict[str, StepTime] = {}
        """Of all models that ever were active here."""
        self._step_ids = count(1)
        self._keys = count(1)
        self._late_ran = False
        self._first_in_line: Seq | None = None
        """The most urgent request that waits for memory."""
        self._now = 0.0
        self._short_of_room = False
        """A running request found no block for its next token."""
        self._actions: list[SliceAction] = []
        self.running = 0
        """Requests that have started (and so hold KV, here or on the host)."""
        self.cached_tokens = 0
        self.preemptions = 0

    @property
    def waiting(self) -> int:
        return sum(not seq.started for seq in self._seqs.values())

    def step_times(self) -> dict[str, StepTime]:
        return {name: model.time for name, model in self._models.items()}

    # ---- events ---------------------------------------------------------------------------------

    def apply(self, event: ev.SliceEvent) -> None:
        match event:
            case ev.Activated(spec, keep):
                self._activate(spec, keep)
            case ev.Fetched(name, took_s):
                self._shifts.fetched(name, took_s)
            case ev.Deactivated(name):
                model = self._models.pop(name)
                self._shifts.deactivated(name)
                self._leaving.append(model)
                self._retire(model)
            case ev.Submitted(request, chained):
                self._seqs[request.id] = self._models[request.model].add(request, chained)
                self._shifts.asked(request.model, request.arrival_s)
            case ev.Withdrawn(request_id):
                self._withdraw(request_id)
            case ev.StepDone():
                self._step_done(event)
            case ev.StepParked(step_id):
                self._flights.park(step_id)
            case ev.MoveDone(request_id):
                self._moved(request_id)
            case ev.GemmsMeasured(name) if self._alphas is not None and name in self._models:
                self._actions += self._alphas.sample(event, self._models[name].tpot_s)
            case ev.GemmsMeasured():
                pass

    def _activate(self, spec: ModelSpec, keep: bool) -> None:
        if spec.id not in self._models:
            time = self._times.setdefault(spec.id, StepTime())
            key = f"{spec.id}#{next(self._keys)}"
            rank = BY_ARRIVAL if self._preset.turn == "arrival" else BY_HEADROOM
            model = ActiveModel(spec.id, key, spec.kv_block_bytes, time, rank)
            self._models[spec.id] = model
            self.arena.add_model(model.key, spec.kv_block_bytes)
            if keep:
                self._shifts.activated(model, spec)

    def _retire(self, model: ActiveModel) -> None:
        """A deactivated model's memory goes with its last request and step."""
        moving = self._rotary is not None and self._rotary.moving(model)
        if model in self._leaving and not model.seqs and not self._flights.of(model) and not moving:
            self._leaving.remove(model)
            self.arena.remove_model(model.key)

    def _withdraw(self, request_id: str) -> None:
        seq = self._seqs.get(request_id)
        if seq is not None:  # else it ended by itself while the word was on its way
            seq.withdrawn = True
            self._leave(seq)

    def _leave(self, seq: Seq) -> None:
        """No more steps of it; its memory goes at once, or when nothing writes to it any more."""
        if self._first_in_line is seq:
            self._first_in_line = None
        del seq.model.seqs[seq.request.id], self._seqs[seq.request.id]
        if not seq.busy:
            self._forget(seq)
            self._retire(seq.model)

    def _forget(self, seq: Seq) -> None:
        if seq.withdrawn and not seq.ended:
            self._actions.append(Drop(seq.request.id))
        self._stop(seq)

    def _stop(self, seq: Seq) -> None:
        """Take its memory away."""
        if self._rotary is not None:
            self._rotary.forget(seq)
        if seq.started:
            seq.model.started -= 1
            self.running -= 1
            self.arena.release(seq.model.key, seq.blocks)
            seq.restart()

    def _step_done(self, event: ev.StepDone) -> None:
        flight = self._flights.landed(event.step_id)
        if times := event.times:
            flight.model.time.learn(flight.decodes, flight.prefill_tokens, event.compute_s / times)
        outcomes = {outcome.request_id: outcome for outcome in event.outcomes}
        for part, seq in zip(flight.step.seqs, flight.seqs, strict=True):
            self._land(seq, part, outcomes.get(part.request_id), times)
        self._retire(flight.model)

    def _land(self, seq: Seq, part: SeqStep, outcome: ev.SeqOutcome | None, times: int) -> None:
        seq.flights -= 1
        if not seq.ended:
            hashed = BLOCK_TOKENS * len(seq.request.prefix_hashes)
            if part.start < hashed and (outcome is None or not outcome.failed):
                self._seal(seq, part)
            seq.land(part, 0 if outcome is None else outcome.drawn, times)
            seq.ended = outcome is not None and outcome.finished
            if seq.ended and not seq.withdrawn:
                self._leave(seq)
                return
        if (seq.ended or seq.withdrawn) and not seq.busy:
            self._forget(seq)

    def _moved(self, request_id: str) -> None:
        assert self._rotary is not None
        seq = self._rotary.moved(request_id)
        if not seq.busy and (seq.ended or seq.withdrawn):
            self._forget(seq)
            self._retire(seq.model)

    def _seal(self, seq: Seq, part: SeqStep) -> None:
        """What the step filled of its prompt's blocks can be reused from now on."""
        hashes = seq.request.prefix_hashes
        end = min((part.start + part.tokens) // BLOCK_TOKENS, len(hashes))
        for index in range(part.start // BLOCK_TOKENS, end):
            self.arena.seal(seq.model.key, seq.blocks[index], hashes[index])

    # ---- decisions ------------------------------------------------------------------------------

    def decide(self, now: float) -> Sequence[SliceAction]:
        self._short_of_room = False
        self._now = now
        tried: set[str] = set()
        self._actions += self._shifts.plan(now, self._flights.models())
        self.wakeup = self._shifts.wakeup
        if self._rotary is not None and self._may_launch(now):
            self._actions += self._rotary.plan(self._seqs.values(), now)
        if self._lookahead > 1 and not self._flights:
            self._launch_ahead(now)
        while self._may_launch(now):
            candidates = [
                (model.first(), model.last_step, name)
                for name, model in self._models.items()
                if model.seqs and name not in tried and self._shifts.computes(name)
                and not any(flight.holds_up for flight in self._flights.of(model))
            ]  # fmt: skip
            turn = self._shifts.turn(candidates, now, self._late_ran)
            if turn is None:
                break
            late, name = turn
            freed = len(self._actions)
            if self._launch(self._models[name], now):
                self._late_ran = late
                continue
            if len(self._actions) > freed:
                tried.clear()  # a request ended or was preempted: others may have room now
            tried.add(name)
            if self._flights.flying and self._short_of_room:
                break  # who could be preempted has to land first
        if not self._flights:
            self._actions += self._shifts.insist()
        actions, self._actions = self._actions, []
        return actions

    def _may_launch(self, now: float) -> bool:
        """Steps do not overlap while requests compete for memory: only between steps can they
        change places."""
        contended = self._rotary is not None and self._rotary.contended
        most = 1 if contended else self._max_in_flight
        return self._flights.flying < most and self._is_time(now)

    def _launch_ahead(self, now: float) -> None:
        """Launch as many decode steps at once as would come of single decisions too."""
        models = [m for m in self._models.values() if m.seqs and self._shifts.computes(m.name)]
        steps = min(self._lookahead, _LOOKAHEAD_SCARCE) if self._shifts.scarce else self._lookahead
        limits = Limits(steps, self._slice.max_batch, self._preset.turn == "headroom")
        name = self._shifts.favourite([model.name for model in models], now)
        favourite = None if name is None else (name, EASE_S)
        order = plan(models, now, limits, self._late_ran, favourite)
        ahead = decide_ahead(models, order, self.arena, self._step_ids) if len(order) > 1 else None
        if ahead is not None:
            self._flights.launched(ahead.flights)
            self._late_ran = models[order[-1]].first() < now
            self._actions.append(ahead.run)

    def _is_time(self, now: float) -> bool:
        begin_s = self._flights.next_plan_s(now)
        if now < begin_s < float("inf"):
            self.wakeup = begin_s if self.wakeup is None else min(begin_s, self.wakeup)
        return now >= begin_s

    def _launch(self, model: ActiveModel, now: float) -> bool:
        """Start the model's next step. False: nothing of it can run now."""
        decodes, prefills = model.line_up()
        if self._flights.of(model) and self._lacks_room(model, decodes):
            return False
        seqs: list[Seq] = []
        parts: list[SeqStep] = []
        budget = 0
        if prefills and len(decodes) < self._slice.max_batch:
            budget = prefill_budget(
                self._preset.chunks, self._models.values(), model, prefills[0], now,
                len(decodes), self._slice.max_step_tokens,
            )  # fmt: skip
        for seq in decodes[: self._slice.max_batch]:
            # Paused or not started any more: one of those before it has preempted it.
            room = seq.issued < len(seq.blocks) * BLOCK_TOKENS
            if seq.started and not seq.paused and (room or self._make_room(seq)):
                seqs.append(seq)
                parts.append(seq.issue(1))
        decoding, left = len(parts), budget
        for seq in prefills:
            if left <= 0 or len(parts) == self._slice.max_batch:
                break
            if not seq.paused and (seq.started or self._admit(seq)):
                tokens = min(left, seq.expected - seq.issued)
                seqs.append(seq)
                parts.append(seq.issue(tokens))
                left -= tokens
        if not parts:
            return False
        step = Step(next(self._step_ids), model.name, tuple(parts), self.arena.end_bytes)
        expected_s = model.time.step_s(decoding, budget - left)
        flight = Flight(step, model, seqs, decoding, budget - left, expected_s)
        self._flights.launched((flight,))
        model.last_step = step.id
        self._actions.append(RunStep(step))
        return True

    def _lacks_room(self, model: ActiveModel, decodes: list[Seq]) -> bool:
        """Whether decodes of a model with a step in flight need more blocks than there are. They
        wait then until it has landed: nobody could be preempted for them before."""
        needed = sum(seq.issued == len(seq.blocks) * BLOCK_TOKENS for seq in decodes)
        short = needed > 0 and self.arena.available(model.key) < needed
        self._short_of_room |= short
        return short

    # ---- memory ---------------------------------------------------------------------------------

    def _admit(self, seq: Seq) -> bool:
        """Start a request: blocks for all tokens known of it, reusing what of its prefix is cached
        (never its last token: that one draws the next). One block for each running request stays
        free, so that they can go on for a while; and nobody overtakes a more urgent request that
        waits for memory, however little he needs himself."""
        model = seq.model
        needed = -(-seq.length // BLOCK_TOKENS)
        if needed > self._shifts.capacity(model):
            self._truncate(seq)
            return False
        if self._rotary is not None:
            if seq.request.id not in self._rotary.welcome:
                return False
            if self.arena.available(model.key) < needed:
                return False
        elif not self._may_start(seq, needed):
            return False
        reusable = seq.request.prefix_hashes[: (seq.length - 1) // BLOCK_TOKENS]
        seq.blocks = self.arena.match(model.key, reusable)
        seq.computed = seq.issued = len(seq.blocks) * BLOCK_TOKENS
        rest = self.arena.allocate(model.key, needed - len(seq.blocks))
        assert rest is not None, "room was promised"
        seq.blocks += rest
        seq.started = True
        model.started += 1
        self.running += 1
        self.cached_tokens += seq.issued
        return True

    def _may_start(self, seq: Seq, needed: int) -> bool:
        model, first, rank = seq.model, self._first_in_line, seq.model.rank
        if model.started == self._slice.max_batch:
            return False
        if first is not None and rank(first) < rank(seq) and self._could_run(first.model):
            return False
        while self.arena.available(model.key) < needed + self.running and self._make_way(model):
            pass
        if self.arena.available(model.key) < needed + self.running:
            if first is None or rank(seq) < rank(first):
                self._first_in_line = seq
            return False
        if first is seq:
            self._first_in_line = None
        return True

    def _could_run(self, model: ActiveModel) -> bool:
        return self._shifts.computes(model.name) and not self._flights.parked(model)

    def _make_room(self, seq: Seq) -> bool:
        """One more block, for the next token, preempting others if need be."""
        while (block := self.arena.allocate(seq.model.key, 1)) is None:
            if self._make_way(seq.model):
                continue
            victim = to_preempt(seq, self._seqs.values())
            if victim is None and len(seq.blocks) >= self._shifts.capacity(seq.model):
                self._truncate(seq)
                return False
            if victim is None or not self._put_aside(victim):
                self._short_of_room = True
                return False  # the others are more urgent, or in flight: it waits for them
        seq.blocks += block
        return True

    def _make_way(self, model: ActiveModel) -> bool:
        """Other models' weights go for its KV. False: there are none that can."""
        gone = self._shifts.make_way(model, self._flights.models(), self._now)
        self._actions += gone
        return bool(gone)

    def _put_aside(self, victim: Seq) -> bool:
        """Preempt it. False: what it held is free only when it has been moved."""
        self.preemptions += 1
        held = len(victim.blocks)
        move = None if self._rotary is None else self._rotary.pause(victim, self._now)
        if move is None:
            self._stop(victim)
            self._actions.append(Drop(victim.request.id, requeued=True))
            return True
        self._actions.append(move)
        return len(move.blocks) < held

    def _truncate(self, seq: Seq) -> None:
        """Not even the whole arena would hold its next token."""
        self._actions.append(Truncate(seq.request.id))
        self._leave(seq)
