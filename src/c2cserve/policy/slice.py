"""The fast loop: which model runs next on a slice, which of its requests, and where their KV lies.

Every iteration picks the model whose most urgent request has least headroom (SLINFER section 6) and
batches all its running decodes with prefill chunks in order of urgency.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from c2cserve.core.actions import Drop, RunStep, SliceAction, Truncate
from c2cserve.core.events import (
    Activated,
    Deactivated,
    SeqOutcome,
    SliceEvent,
    StepDone,
    StepParked,
    Submitted,
    Withdrawn,
)
from c2cserve.core.machine import Slice
from c2cserve.core.request import BLOCK_TOKENS, Request
from c2cserve.core.step import SeqStep, Step
from c2cserve.policy.estimate import StepTime
from c2cserve.policy.headroom import headroom_s
from c2cserve.policy.kv import KvArena

_CHUNK_MIN = 16


@dataclass(slots=True)
class Seq:
    """A request on this slice. `issued` tokens are computed or in flight, `computed` confirmed."""

    request: Request
    length: int
    """Known tokens: prompt and drawn."""
    computed: int = 0
    issued: int = 0
    blocks: list[int] = field(default_factory=list[int])
    unsent: int = 0
    """Blocks at the end of `blocks` that the executor has not been told of."""
    started: bool = False
    fresh: bool = True
    withdrawn: bool = False

    @property
    def in_flight(self) -> bool:
        return self.issued != self.computed

    @property
    def decoding(self) -> bool:
        return self.started and self.issued == self.length - 1

    @property
    def tokens_out(self) -> int:
        return self.request.sent + self.length - self.request.prompt_len


@dataclass(slots=True)
class _Model:
    seqs: dict[str, Seq] = field(default_factory=dict[str, Seq])
    time: StepTime = field(default_factory=StepTime)
    active: bool = True
    in_flight: int | None = None
    """Id of its step under way; at most one, because a decode needs the token before."""


@dataclass(slots=True)
class _Flight:
    step: Step
    decodes: int
    parked: bool = False


class SlicePolicy:
    """`runtime.ports.Policy[SliceEvent, SliceAction]`."""

    def __init__(self, slice_: Slice, max_in_flight: int = 1) -> None:
        """`max_in_flight`: un-parked steps at a time (of different models)."""
        self._slice = slice_
        self._max_in_flight = max_in_flight
        self.arena = KvArena(slice_.kv_bytes, slice_.slab_bytes)
        self._models: dict[str, _Model] = {}
        self._model_of: dict[str, str] = {}
        self._flights: dict[int, _Flight] = {}
        self._next_step = 1
        self._actions: list[SliceAction] = []
        self.cached_tokens = 0
        self.preemptions = 0

    @property
    def done(self) -> bool:
        return False

    @property
    def wakeup(self) -> float | None:
        return None

    @property
    def running(self) -> int:
        return sum(seq.started for model in self._models.values() for seq in model.seqs.values())

    @property
    def waiting(self) -> int:
        return len(self._model_of) - self.running

    def step_times(self) -> dict[str, StepTime]:
        return {name: model.time for name, model in self._models.items()}

    # ---- events ---------------------------------------------------------------------------------

    def apply(self, event: SliceEvent) -> None:
        match event:
            case Activated(spec):
                model = self._models.get(spec.id)
                if model is None:
                    self.arena.add_model(spec.id, spec.kv_block_bytes)
                    model = self._models[spec.id] = _Model()
                model.active = True
            case Deactivated(name):
                self._models[name].active = False
                self._retire(name)
            case Submitted(request):
                self._models[request.model].seqs[request.id] = Seq(request, request.prompt_len)
                self._model_of[request.id] = request.model
            case Withdrawn(request_id):
                self._withdraw(request_id)
            case StepDone():
                self._step_done(event)
            case StepParked(step_id):
                self._flights[step_id].parked = True

    def _retire(self, name: str) -> None:
        model = self._models[name]
        if not model.active and not model.seqs and model.in_flight is None:
            self.arena.remove_model(name)
            del self._models[name]

    def _withdraw(self, request_id: str) -> None:
        name = self._model_of.get(request_id)
        if name is None:
            return  # it ended by itself while the word was on its way
        seq = self._models[name].seqs[request_id]
        if seq.in_flight:
            seq.withdrawn = True
            return
        self._actions.append(Drop(request_id))
        self._remove(name, seq)

    def _remove(self, name: str, seq: Seq) -> None:
        self.arena.release(name, seq.blocks)
        del self._models[name].seqs[seq.request.id]
        del self._model_of[seq.request.id]
        self._retire(name)

    def _step_done(self, event: StepDone) -> None:
        flight = self._flights.pop(event.step_id)
        name = flight.step.model
        model = self._models[name]
        model.in_flight = None
        prefill = flight.step.tokens - flight.decodes
        model.time.learn(flight.decodes, prefill, event.compute_s)
        outcomes = {outcome.request_id: outcome for outcome in event.outcomes}
        for part in flight.step.seqs:
            seq = model.seqs[part.request_id]
            self._confirm(name, seq, outcomes.get(part.request_id))
        self._retire_if_known(name)

    def _retire_if_known(self, name: str) -> None:
        if name in self._models:
            self._retire(name)

    def _confirm(self, name: str, seq: Seq, outcome: SeqOutcome | None) -> None:
        failed = outcome is not None and outcome.failed
        if not failed:
            hashes = seq.request.prefix_hashes
            first, last = seq.computed // BLOCK_TOKENS, seq.issued // BLOCK_TOKENS
            for index in range(first, min(last, len(hashes))):
                self.arena.seal(name, seq.blocks[index], hashes[index])
        seq.computed = seq.issued
        if outcome is not None:
            seq.length += outcome.drawn
        if outcome is not None and outcome.finished:
            self._remove(name, seq)
        elif seq.withdrawn:
            self._actions.append(Drop(seq.request.id))
            self._remove(name, seq)

    # ---- decisions ------------------------------------------------------------------------------

    def decide(self, now: float) -> Sequence[SliceAction]:
        flying = sum(not flight.parked for flight in self._flights.values())
        tried: set[str] = set()
        while flying < self._max_in_flight:
            name = self._most_urgent(now, tried)
            if name is None:
                break
            tried.add(name)
            if self._launch(name, now):
                flying += 1
        actions, self._actions = self._actions, []
        return actions

    def _most_urgent(self, now: float, tried: set[str]) -> str | None:
        best: tuple[float, str] | None = None
        for name, model in self._models.items():
            if model.in_flight is not None or not model.seqs or name in tried:
                continue
            least = min(headroom_s(s.request, s.tokens_out, now) for s in model.seqs.values())
            if best is None or (least, name) < best:
                best = (least, name)
        return None if best is None else best[1]

    def _launch(self, name: str, now: float) -> bool:
        model = self._models[name]
        parts: list[SeqStep] = []
        decodes = self._add_decodes(name, model, now, parts)
        budget = model.time.chunk(
            decodes, self._allowed_s(now), _CHUNK_MIN, self._slice.max_step_tokens
        )
        self._add_prefills(name, model, now, parts, budget)
        if not parts:
            return False
        step = Step(self._next_step, name, tuple(parts))
        self._next_step += 1
        self._flights[step.id] = _Flight(step, decodes)
        model.in_flight = step.id
        self._actions.append(RunStep(step))
        return True

    def _allowed_s(self, now: float) -> float:
        """How long a step may take without making a running request of any model late: at least
        its time per token, more if it is ahead."""
        slack = [
            max(seq.request.slo.tpot_s, headroom_s(seq.request, seq.tokens_out, now))
            for model in self._models.values() for seq in model.seqs.values() if seq.decoding
        ]  # fmt: skip
        return min(slack, default=float("inf"))

    def _add_decodes(self, name: str, model: _Model, now: float, parts: list[SeqStep]) -> int:
        ready = [seq for seq in model.seqs.values() if seq.decoding]
        ready.sort(key=lambda s: headroom_s(s.request, s.tokens_out, now))
        for seq in ready:
            if len(parts) == self._slice.max_batch:
                break
            if not seq.started:
                continue  # preempted by one of those before it
            if self._make_room(name, seq, seq.issued + 1, now):
                parts.append(self._issue(seq, 1))
        return len(parts)

    def _add_prefills(
        self, name: str, model: _Model, now: float, parts: list[SeqStep], budget: int
    ) -> None:
        waiting = [s for s in model.seqs.values() if not s.decoding and not s.in_flight]
        waiting.sort(key=lambda s: (not s.started, headroom_s(s.request, s.tokens_out, now)))
        for seq in waiting:
            if budget <= 0 or len(parts) >= self._slice.max_batch:
                break
            if not seq.started and not self._admit(name, seq):
                break
            tokens = min(budget, seq.length - seq.issued)
            if not self._make_room(name, seq, seq.issued + tokens, now):
                continue
            parts.append(self._issue(seq, tokens))
            budget -= tokens

    def _admit(self, name: str, seq: Seq) -> bool:
        """Start a request if its whole prompt fits beside a block of growth for each running one;
        reuse what of its prefix is cached (never its last token: that one draws the next)."""
        needed = -(-seq.length // BLOCK_TOKENS)
        others = self.running
        if needed > self.arena.capacity(name):
            self._truncate(name, seq)
            return False
        if others and self.arena.available(name) < needed + others:
            return False
        usable = seq.request.prefix_hashes[: (seq.length - 1) // BLOCK_TOKENS]
        seq.blocks = self.arena.match(name, usable)
        seq.unsent = len(seq.blocks)
        seq.computed = seq.issued = len(seq.blocks) * BLOCK_TOKENS
        self.cached_tokens += seq.issued
        seq.started = seq.fresh = True
        return True

    def _make_room(self, name: str, seq: Seq, tokens: int, now: float) -> bool:
        """Blocks for `tokens` tokens, preempting requests with more headroom if need be."""
        needed = -(-tokens // BLOCK_TOKENS) - len(seq.blocks)
        if needed <= 0:
            return True
        while (blocks := self.arena.allocate(name, needed)) is None:
            victim = self._victim(seq, now)
            if victim is not None:
                self._preempt(*victim)
            elif not self._others_fly(seq):
                self._truncate(name, seq)
                return False
            else:
                return False
        seq.blocks += blocks
        seq.unsent += needed
        return True

    def _others_fly(self, seq: Seq) -> bool:
        return any(
            other is not seq and other.started
            for model in self._models.values() for other in model.seqs.values()
        )  # fmt: skip

    def _victim(self, seq: Seq, now: float) -> tuple[str, Seq] | None:
        """The started request with most headroom that is not in flight; none with less than the
        asking one, so that two requests never preempt each other in turn."""
        own = headroom_s(seq.request, seq.tokens_out, now)
        candidates = [
            (headroom_s(other.request, other.tokens_out, now), other.request.id, name, other)
            for name, model in self._models.items() for other in model.seqs.values()
            if other is not seq and other.started and not other.in_flight
        ]  # fmt: skip
        best = max(candidates, key=lambda c: c[:2], default=None)
        if best is None or best[0] < own:
            return None
        return best[2], best[3]

    def _preempt(self, name: str, seq: Seq) -> None:
        self.arena.release(name, seq.blocks)
        seq.blocks = []
        seq.unsent = seq.computed = seq.issued = 0
        seq.started = False
        self.preemptions += 1
        self._actions.append(Drop(seq.request.id, requeued=True))

    def _truncate(self, name: str, seq: Seq) -> None:
        self._actions.append(Truncate(seq.request.id))
        self._remove(name, seq)

    @staticmethod
    def _issue(seq: Seq, tokens: int) -> SeqStep:
        new = tuple(seq.blocks[len(seq.blocks) - seq.unsent :]) if seq.unsent else ()
        part = SeqStep(
            seq.request.id, seq.issued, tokens, new, seq.fresh,
            emits=seq.issued + tokens == seq.length,
        )  # fmt: skip
        seq.issued += tokens
        seq.unsent = 0
        seq.fresh = False
        return part
