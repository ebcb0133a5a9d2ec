"""A slice's requests, and the step that is made of one model's: all decodes plus prefill chunks."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from operator import attrgetter

from c2cserve.core.actions import RunStep
from c2cserve.core.request import Request
from c2cserve.core.step import SeqStep, Step
from c2cserve.policy.headroom import due_s
from c2cserve.policy.slice.estimate import StepTime, allowed_step_s


@dataclass(slots=True, eq=False)
class Seq:
    """A request on this slice. `issued` tokens are computed or in flight, `computed` confirmed."""

    request: Request
    model: "ActiveModel"
    chained: bool
    """`events.Submitted.chained`."""
    length: int
    """Known tokens: prompt and drawn."""
    due_s: float
    """When the next token that no step is drawing yet is late."""
    sent_s: float = inf
    """When it was seen here first."""
    excused_s: float = 0.0
    """How long its model was loaded while it waited, where its targets excuse that."""
    drawing: int = 0
    """Tokens that steps in flight will draw."""
    computed: int = 0
    issued: int = 0
    in_flight: int = 0
    """Steps in flight that it has a part in."""
    moves: int = 0
    """Moves of its KV under way."""
    paused: bool = False
    """Its KV is in host memory, or on its way there or back (`policy.slice.kv_rotation`)."""
    since_s: float = 0.0
    """When it began to run or was paused, whichever was later. Only where KV is rotated."""
    first_s: float | None = None
    """When it was first seen to have a token of its own. Only where KV is rotated."""
    blocks: list[int] = field(default_factory=list[int])
    notified: int = 0
    """Blocks that the executor was notified of; 0 before the first step since the (re)start."""
    started: bool = False
    withdrawn: bool = False
    failures: int = 0
    """Failed steps that it had a part in."""
    alone_until: int = 0
    """The length up to which it runs alone after a failed step."""
    stopping: bool = False
    """It leaves what it holds once nothing has it in hand: a step of it failed, or its model was
    given up."""
    recalled: bool = False
    """The controller wants it back, though it has started (`events.RecallAsked`)."""
    at_fault: str = ""
    """Why its step failed again, alone."""
    ended: bool = False
    """The executor has forgotten it. What is withdrawn or ended while in flight holds its blocks
    until it has landed."""

    @property
    def busy(self) -> bool:
        """Whether its blocks are being read or written."""
        return self.in_flight > 0 or self.moves > 0

    @property
    def first_token_due_s(self) -> float:
        return self.request.first_token_due_s + self.excused_s

    @property
    def suspect(self) -> bool:
        """Whether a step that it had a part in failed, and it has not run long enough since."""
        return self.length < self.alone_until

    @property
    def expected(self) -> int:
        """Its length once the steps in flight are done."""
        return self.length + self.drawing

    def issue(self, tokens: int) -> SeqStep:
        """Return its part in the next step, which it has from now on."""
        request, start, notified = self.request, self.issued, self.notified
        self.issued = end = start + tokens
        self.in_flight += 1
        emits = end == self.length + self.drawing
        if emits:
            self.drawing += 1
            self.due_s += request.slo.tpot_s
        if notified == len(self.blocks):
            return SeqStep(request.id, start, tokens, (), notified == 0, emits)
        self.notified = len(self.blocks)
        new_blocks = tuple(self.blocks[notified:])
        return SeqStep(request.id, start, tokens, new_blocks, notified == 0, emits)

    def land(self, part: SeqStep, drawn: int, times: int) -> None:
        """Note the end of a step that it had `part` in. The step ran so many times and drew so many
        tokens for it. (While a step runs more than once, nothing else is planned.)"""
        self.computed = part.start + part.tokens * times
        if part.emits:
            self.drawing -= 1
        if times != 1:
            self.issued += part.tokens * (times - 1)
            if part.emits:
                self.due_s += self.request.slo.tpot_s * (times - 1)
        self.length += drawn

    def fail(self, part: SeqStep) -> None:
        """Note that a step which it had `part` in failed, and drew nothing."""
        if part.emits:
            self.drawing -= 1

    def restart(self) -> None:
        """Begin again: its KV is gone, its tokens are not."""
        self.blocks = []
        self.computed = self.issued = self.notified = 0
        self.started = self.paused = self.stopping = False


@dataclass(slots=True, eq=False)
class ActiveModel:
    """A model from `Activated` to `Deactivated`, and on until its last step and request are gone.
    `key` names its part of the arena. A model that comes back has a new one: its weights may be
    others by then, and what was cached must not be found."""

    name: str
    key: str
    block_bytes: int
    time: StepTime
    rank: "Callable[[Seq], float]"
    """Orders its requests, first come or least headroom first."""
    number: int = 0
    """Counts the models that were active on the slice."""
    whole_prompts: bool = False
    """A prompt that is under way goes before more urgent ones, until it is done."""
    seqs: dict[str, Seq] = field(default_factory=dict[str, Seq])
    suspects: bool = False
    """Some of them may be (`policy.slice.faults`)."""
    given_up: bool = False
    last_step: int = 0
    started: int = 0
    ttft_s: float = float("inf")
    tpot_s: float = float("inf")
    """The strictest of its requests' targets since it last had none."""
    loading_s: float = 0.0
    """When its last load began."""

    def add(self, request: Request, chained: bool) -> Seq:
        if not self.seqs:
            self.ttft_s = self.tpot_s = inf
        self.ttft_s = min(self.ttft_s, request.slo.ttft_s)
        self.tpot_s = min(self.tpot_s, request.slo.tpot_s)
        seq = Seq(request, self, chained, request.prompt_len, due_s(request, request.sent))
        self.seqs[request.id] = seq
        return seq

    def loaded(self, took_s: float) -> None:
        """Note the end of a load."""
        for seq in self.seqs.values():
            if seq.request.excuses_loads and seq.length == seq.request.prompt_len:
                excused_s = min(took_s, max(0.0, self.loading_s + took_s - seq.sent_s))
                seq.excused_s += excused_s
                seq.due_s += excused_s

    def first(self) -> float:
        """Return the rank of the request that should go first."""
        if self.rank is BY_HEADROOM:
            return self.most_urgent_due_s()
        return min(map(self.rank, self.seqs.values()))

    def most_urgent_due_s(self) -> float:
        least = inf
        for seq in self.seqs.values():
            if seq.due_s < least:
                least = seq.due_s
        return least

    @property
    def has_prompts(self) -> bool:
        """Whether a prompt waits or is under way."""
        return any(seq.issued < seq.expected - 1 for seq in self.seqs.values())

    def line_up(self, now: float) -> "Line":
        """Return its decodes and its prefills, by rank. A decode is ready for its next single
        token, though a step in flight may still sample the one before. A prefill has more tokens to
        compute. Waiting ones whose first token is late go last. A request whose last token is
        being sampled, or that is paused, is in neither.

        A prompt that is under way makes way for a more urgent one between its chunks, unless
        prompts are `whole_prompts`. Else a short prompt behind a long one would be late. The
        controller, too, expects that prompts are computed by due time
        (`policy.cluster.placement.in_time`)."""
        decodes: list[Seq] = []
        first: list[Seq] = []
        prompts: list[Seq] = []
        late: list[Seq] = []
        seqs = list(self.seqs.values())
        if len(seqs) > 1:
            seqs.sort(key=self.rank)
        for seq in seqs:
            if seq.paused or seq.stopping:
                continue
            expected = seq.length + seq.drawing
            if not seq.started:
                (late if self._yields(seq, now) else prompts).append(seq)
            elif seq.issued < expected - 1:
                (first if self.whole_prompts else prompts).append(seq)
            elif expected < seq.request.prompt_len + seq.request.max_new_tokens:
                decodes.append(seq)
        return decodes, first + prompts + late

    def _yields(self, seq: Seq, now: float) -> bool:
        """Return whether those that can be in time go first, as its first token is late. After some
        time they no longer do."""
        if self.rank is not BY_HEADROOM or seq.request.sent or seq.length > seq.request.prompt_len:
            return False
        slo = seq.request.slo
        return 0.0 < now - seq.first_token_due_s <= _YIELDS * slo.ttft_s


Line = tuple[list[Seq], list[Seq]]
"""Decodes and prefills of a model, by rank."""


@dataclass(slots=True)
class StepInFlight:
    """A step from its launch to its `events.StepDone`."""

    step: Step
    model: ActiveModel
    seqs: list[Seq]
    """The step's requests in its order: the decodes first."""
    decodes: int
    prefill_tokens: int
    expected_s: float
    """How long it will take, 0 if that is unknown."""
    since_s: float | None = None
    """When all steps before it were done."""
    parked: bool = False

    @property
    def holds_up(self) -> bool:
        """Whether the model's next step cannot be planned before this one is done."""
        parts = zip(self.step.seqs, self.seqs, strict=True)
        return self.parked or any(part.emits and not seq.chained for part, seq in parts)


@dataclass(frozen=True, slots=True)
class DecidedSteps:
    """Several decode steps that were decided at once."""

    in_flight: list[StepInFlight]
    """One for each model that runs."""
    run: RunStep
    late: bool
    """Whether the last of them is a late model's."""


_YIELDS = 10.0
"""A late request yields for so many times its TTFT target."""
BY_HEADROOM = attrgetter("due_s")
_CHUNK_MIN = 16

PrefillBudget = Callable[[Iterable[ActiveModel], ActiveModel, Seq, float, int, int], int]
"""Prefill tokens that go into a model's step. Arguments: models on the slice, the model, the most
urgent of its prompts, now, decodes in the step, the slice's largest chunk."""


def headroom_budget(
    models: Iterable[ActiveModel], model: ActiveModel, first: Seq, now: float, decodes: int,
    most: int,
) -> int:  # fmt: skip
    """Return as many tokens as headroom allows: see `chunk_tokens`."""
    return chunk_tokens(model.time, decodes, models, first, now, most)


def chunk_tokens(
    time: StepTime, decodes: int, models: Iterable[ActiveModel], first: Seq, now: float, most: int
) -> int:
    """Return the prefill tokens that may go into a step beside so many decodes. No client of a
    model that runs on the slice may have to wait for them. Nothing can start before a step ends, so
    a new request must still have half of its time for the first token. If that would make the most
    urgent prompt late, a step is longer, as far as running requests allow.

    Models take turns, and each that has prompts computes a chunk in its turn. So together these
    take no longer than one step may: else a client would wait for the chunks of all. But a step
    computes for as long at least as it reads weights. Where these stream, prompts would else take
    one step for each few tokens, and be late with all others."""
    allowed_s, limit_s, running, computing = inf, inf, False, 0
    for model in models:
        if not model.seqs:
            continue
        allowed_s = min(allowed_s, model.ttft_s / 2)
        if model.started:
            running = True
            headroom_s = model.most_urgent_due_s() - now
            limit_s = min(limit_s, allowed_step_s(headroom_s, model.tpot_s))
        computing += model.has_prompts
    if running and computing > 1:
        least_s = 2.0 * time.decode_step_s(max(1, decodes))
        allowed_s = min(allowed_s, max(allowed_s / computing, least_s))
        limit_s = min(limit_s, max(limit_s / computing, least_s))
    allowed_s = min(limit_s, max(allowed_s, _step_in_time_s(time, decodes, first, now)))
    return time.chunk(decodes, allowed_s, min(_CHUNK_MIN, most), most)


def _step_in_time_s(time: StepTime, decodes: int, first: Seq, now: float) -> float:
    """Return how long a step must be for a prompt's first token to be in time. Each of the prompt's
    steps takes the time of decodes too, so there can only be so many. 0 if it is late anyhow."""
    tokens = first.expected - first.issued
    decodes_s = time.decode_step_s(max(1, decodes))
    spare_s = first.due_s - now - tokens * time.prefill_token_s
    if decodes_s <= 0.0 or spare_s < decodes_s:
        return 0.0
    return decodes_s + -(-tokens // int(spare_s / decodes_s)) * time.prefill_token_s


def spare_tokens(time: StepTime, parts: Sequence[SeqStep], decodes: int, limit_s: float) -> int:
    """Return the prefill tokens that a step may still take on. It holds `parts`, the decodes first,
    and may take `limit_s`. A step that would hold nothing else gets some in any case."""
    taken = sum(part.tokens for part in parts[decodes:])
    least = 0 if parts else _CHUNK_MIN
    return max(least, time.chunk(decodes, limit_s, least, 1 << 30) - taken)


def to_preempt(seq: Seq, everybody: Iterable[Seq]) -> Seq | None:
    """Return the running request to preempt for `seq`: the one with most headroom (SLINFER section
    7 D). One of the same model goes first, because a block of another model seldom empties a slab.
    It is never more urgent than `seq`, so that two never preempt each other in turn. It has run
    since it came back."""
    rank = seq.model.rank
    candidates = [
        other for other in everybody
        if other.started and other.notified and not other.busy and not other.paused
        and rank(other) >= rank(seq) and other is not seq
    ]  # fmt: skip
    return max(
        candidates,
        key=lambda other: (other.model is seq.model, rank(other), other.request.id),
        default=None,
    )
