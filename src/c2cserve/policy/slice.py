"""The fast loop: which model runs next on a slice, which of its requests, and where their KV lies.

Every iteration picks a model by the headroom of its most urgent request (SLINFER section 6) and
batches all its running decodes with prefill chunks in order of urgency.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from c2cserve.core import events as ev
from c2cserve.core.actions import Drop, RunStep, SliceAction, Truncate
from c2cserve.core.machine import Slice
from c2cserve.core.model import ModelSpec
from c2cserve.core.request import BLOCK_TOKENS
from c2cserve.core.step import SeqStep, Step
from c2cserve.policy.batching import ActiveModel, Seq, chunk_tokens
from c2cserve.policy.estimate import StepTime
from c2cserve.policy.headroom import next_turn
from c2cserve.policy.kv import KvArena


@dataclass(slots=True)
class _Flight:
    model: ActiveModel
    seqs: list[Seq]
    """In the step's order: the decodes first."""
    decodes: int
    prefill_tokens: int
    parked: bool = False


class SlicePolicy:
    """`runtime.ports.Policy[SliceEvent, SliceAction]`. Never done: its process is ended."""

    done = False
    wakeup: float | None = None

    def __init__(self, slice_: Slice, max_in_flight: int = 1) -> None:
        """`max_in_flight`: un-parked steps at a time (of different models)."""
        self._slice = slice_
        self._max_in_flight = max_in_flight
        self.arena = KvArena(slice_.kv_bytes, slice_.slab_bytes)
        self._models: dict[str, ActiveModel] = {}
        self._leaving: list[ActiveModel] = []
        self._seqs: dict[str, Seq] = {}
        self._flights: dict[int, _Flight] = {}
        self._flying = 0
        """Flights that are not parked."""
        self._times: dict[str, StepTime] = {}
        """Of all models that ever were active here."""
        self._step_ids = count(1)
        self._keys = count(1)
        self._late_ran = False
        self._first_in_line: Seq | None = None
        """The most urgent request that waits for memory."""
        self._actions: list[SliceAction] = []
        self.running = 0
        """Requests that have started (and so hold KV)."""
        self.cached_tokens = 0
        self.preemptions = 0

    @property
    def waiting(self) -> int:
        return len(self._seqs) - self.running

    def step_times(self) -> dict[str, StepTime]:
        return {name: model.time for name, model in self._models.items()}

    # ---- events ---------------------------------------------------------------------------------

    def apply(self, event: ev.SliceEvent) -> None:
        match event:
            case ev.Activated(spec):
                self._activate(spec)
            case ev.Deactivated(name):
                model = self._models.pop(name)
                self._leaving.append(model)
                self._retire(model)
            case ev.Submitted(request):
                self._seqs[request.id] = self._models[request.model].add(request)
            case ev.Withdrawn(request_id):
                self._withdraw(request_id)
            case ev.StepDone():
                self._step_done(event)
            case ev.StepParked(step_id):
                flight = self._flights[step_id]
                self._flying -= not flight.parked
                flight.parked = True
            case ev.MoveDone() | ev.GemmsMeasured():
                pass

    def _activate(self, spec: ModelSpec) -> None:
        if spec.id not in self._models:
            time = self._times.setdefault(spec.id, StepTime())
            model = ActiveModel(spec.id, f"{spec.id}#{next(self._keys)}", time)
            self._models[spec.id] = model
            self.arena.add_model(model.key, spec.kv_block_bytes)

    def _retire(self, model: ActiveModel) -> None:
        """A deactivated model's memory goes with its last request and step."""
        if model in self._leaving and not model.seqs and model.in_flight is None:
            self._leaving.remove(model)
            self.arena.remove_model(model.key)

    def _withdraw(self, request_id: str) -> None:
        seq = self._seqs.get(request_id)
        if seq is None:
            return  # it ended by itself while the word was on its way
        if seq.in_flight:
            seq.withdrawn = True  # its blocks are being written: they go when the step is done
        else:
            self._actions.append(Drop(request_id))
            self._remove(seq)

    def _remove(self, seq: Seq) -> None:
        self._stop(seq)
        if self._first_in_line is seq:
            self._first_in_line = None
        del seq.model.seqs[seq.request.id], self._seqs[seq.request.id]
        self._retire(seq.model)

    def _stop(self, seq: Seq) -> None:
        """Take its memory away."""
        if seq.started:
            seq.model.started -= 1
            self.running -= 1
            self.arena.release(seq.model.key, seq.blocks)
            seq.restart()

    def _step_done(self, event: ev.StepDone) -> None:
        flight = self._flights.pop(event.step_id)
        self._flying -= not flight.parked
        model = flight.model
        model.in_flight = None
        model.time.learn(flight.decodes, flight.prefill_tokens, event.compute_s)
        outcomes = {outcome.request_id: outcome for outcome in event.outcomes}
        for seq in flight.seqs:
            self._confirm(seq, outcomes.get(seq.request.id))
        self._retire(model)

    def _confirm(self, seq: Seq, outcome: ev.SeqOutcome | None) -> None:
        if outcome is not None and outcome.failed:
            self._remove(seq)
            return
        # What the step filled of its prompt's blocks can be reused from now on.
        first, hashes = seq.computed // BLOCK_TOKENS, seq.request.prefix_hashes
        if first < len(hashes):
            for index in range(first, min(seq.issued // BLOCK_TOKENS, len(hashes))):
                self.arena.seal(seq.model.key, seq.blocks[index], hashes[index])
        seq.computed = seq.issued
        if outcome is not None:
            seq.drew(outcome.drawn)
        if outcome is not None and outcome.finished:
            self._remove(seq)
        elif seq.withdrawn:
            self._actions.append(Drop(seq.request.id))
            self._remove(seq)

    # ---- decisions ------------------------------------------------------------------------------

    def decide(self, now: float) -> Sequence[SliceAction]:
        tried: set[str] = set()
        while self._flying < self._max_in_flight:
            candidates = (
                (model.most_urgent_due_s(), model.last_step, name)
                for name, model in self._models.items()
                if model.seqs and model.in_flight is None and name not in tried
            )
            turn = next_turn(candidates, now, self._late_ran)
            if turn is None:
                break
            late, name = turn
            freed = len(self._actions)
            if self._launch(self._models[name], now):
                self._late_ran = late
            elif len(self._actions) > freed:
                tried.clear()  # a request ended or was preempted: others may have room now
            tried.add(name)
        actions, self._actions = self._actions, []
        return actions

    def _launch(self, model: ActiveModel, now: float) -> bool:
        """Start the model's next step. False: nothing of it can run now."""
        decodes, prefills = model.line_up()
        seqs: list[Seq] = []
        parts: list[SeqStep] = []
        budget = 0
        if prefills and len(decodes) < self._slice.max_batch:
            most = self._slice.max_step_tokens
            budget = chunk_tokens(model.time, len(decodes), self._models.values(), now, most)
        for seq in decodes:
            # Not started any more: one of those before it has preempted it.
            if seq.started and self._make_room(seq):
                seqs.append(seq)
                parts.append(seq.issue(1))
        decoding, left = len(parts), budget
        for seq in prefills:
            if left <= 0 or len(parts) == self._slice.max_batch:
                break
            if seq.started or self._admit(seq):
                tokens = min(left, seq.length - seq.issued)
                seqs.append(seq)
                parts.append(seq.issue(tokens))
                left -= tokens
        if not parts:
            return False
        step = Step(next(self._step_ids), model.name, tuple(parts))
        self._flights[step.id] = _Flight(model, seqs, decoding, budget - left)
        self._flying += 1
        model.in_flight = model.last_step = step.id
        self._actions.append(RunStep(step))
        return True

    # ---- memory ---------------------------------------------------------------------------------

    def _admit(self, seq: Seq) -> bool:
        """Start a request: blocks for all tokens known of it, reusing what of its prefix is cached
        (never its last token: that one draws the next). One block for each running request stays
        free, so that they can go on for a while; and nobody overtakes a more urgent request that
        waits for memory, however little he needs himself."""
        model, first = seq.model, self._first_in_line
        needed = -(-seq.length // BLOCK_TOKENS)
        if needed > self.arena.capacity(model.key):
            self._truncate(seq)
            return False
        if model.started == self._slice.max_batch:
            return False
        if first is not None and first.due_s < seq.due_s and not self._parked(first.model):
            return False
        if self.running and self.arena.available(model.key) < needed + self.running:
            if first is None or seq.due_s < first.due_s:
                self._first_in_line = seq
            return False
        if first is seq:
            self._first_in_line = None
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

    def _parked(self, model: ActiveModel) -> bool:
        return model.in_flight is not None and self._flights[model.in_flight].parked

    def _make_room(self, seq: Seq) -> bool:
        """A block for the next token, if it needs one, preempting others if need be."""
        if seq.issued < len(seq.blocks) * BLOCK_TOKENS:
            return True
        while (block := self.arena.allocate(seq.model.key, 1)) is None:
            victim = self._victim(seq)
            if victim is not None:
                self._stop(victim)
                self.preemptions += 1
                self._actions.append(Drop(victim.request.id, requeued=True))
            elif self.running > 1:
                return False  # the others are more urgent, or in flight: it waits for them
            else:
                self._truncate(seq)
                return False
        seq.blocks += block
        return True

    def _victim(self, seq: Seq) -> Seq | None:
        """The running request with most headroom (SLINFER section 7 D), of the same model if there
        is one, because a block of another model seldom empties a slab. Never one that is more
        urgent than `seq`, so that two never preempt each other in turn."""
        candidates = [
            other for other in self._seqs.values()
            if other.started and not other.in_flight and other.due_s >= seq.due_s
            and other is not seq
        ]  # fmt: skip
        return max(
            candidates,
            key=lambda other: (other.model is seq.model, other.due_s, other.request.id),
            default=None,
        )

    def _truncate(self, seq: Seq) -> None:
        """Not even the whole arena would hold its next token."""
        self._actions.append(Truncate(seq.request.id))
        self._remove(seq)
