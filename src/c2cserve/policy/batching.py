"""A slice's requests, and the step that is made of one model's: all decodes plus prefill chunks."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import attrgetter

from c2cserve.core.request import Request
from c2cserve.core.step import SeqStep
from c2cserve.policy.estimate import StepTime, allowed_step_s
from c2cserve.policy.headroom import due_s


@dataclass(slots=True, eq=False)
class Seq:
    """A request on this slice. `issued` tokens are computed or in flight, `computed` confirmed."""

    request: Request
    model: "ActiveModel"
    length: int
    """Known tokens: prompt and drawn."""
    due_s: float
    computed: int = 0
    issued: int = 0
    blocks: list[int] = field(default_factory=list[int])
    told: int = 0
    """Blocks that the executor has been told of; none before the first step since (re)start."""
    started: bool = False
    withdrawn: bool = False

    @property
    def in_flight(self) -> bool:
        return self.issued != self.computed

    def drew(self, tokens: int) -> None:
        self.length += tokens
        self.due_s += tokens * self.request.slo.tpot_s

    def issue(self, tokens: int) -> SeqStep:
        """Its share of the next step."""
        start, told, has = self.issued, self.told, len(self.blocks)
        self.issued, self.told = start + tokens, has
        new = tuple(self.blocks[told:]) if told < has else ()
        return SeqStep(self.request.id, start, tokens, new, told == 0, self.issued == self.length)

    def restart(self) -> None:
        """Its KV is gone; its tokens are not."""
        self.blocks = []
        self.computed = self.issued = self.told = 0
        self.started = False


@dataclass(slots=True, eq=False)
class ActiveModel:
    """A model from `Activated` to `Deactivated`, and on until its last step and request are gone.
    `key` names its part of the arena: a model that comes back has a new one, because its weights
    may be others by then and what was cached must not be found."""

    name: str
    key: str
    time: StepTime
    seqs: dict[str, Seq] = field(default_factory=dict[str, Seq])
    in_flight: int | None = None
    """Id of its step under way; at most one, because a decode needs the token before."""
    last_step: int = 0
    started: int = 0
    ttft_s: float = float("inf")
    tpot_s: float = float("inf")
    """The strictest of its requests' targets since it last had none."""

    def add(self, request: Request) -> Seq:
        if not self.seqs:
            self.ttft_s = self.tpot_s = float("inf")
        self.ttft_s = min(self.ttft_s, request.slo.ttft_s)
        self.tpot_s = min(self.tpot_s, request.slo.tpot_s)
        seq = Seq(request, self, request.prompt_len, due_s(request, request.sent))
        self.seqs[request.id] = seq
        return seq

    def most_urgent_due_s(self) -> float:
        return min(map(_DUE, self.seqs.values()))

    def line_up(self) -> tuple[list[Seq], list[Seq]]:
        """Its requests while no step of it is in flight, by urgency: those that are ready for their
        next single token, and those with more tokens to be computed, started ones first."""
        decodes: list[Seq] = []
        started: list[Seq] = []
        waiting: list[Seq] = []
        for seq in sorted(self.seqs.values(), key=_DUE):
            if not seq.started:
                waiting.append(seq)
            elif seq.issued == seq.length - 1:
                decodes.append(seq)
            else:
                started.append(seq)
        return decodes, started + waiting


_DUE = attrgetter("due_s")
_CHUNK_MIN = 16


def chunk_tokens(
    time: StepTime, decodes: int, models: Iterable[ActiveModel], now: float, most: int
) -> int:
    """Prefill tokens that may go into a step beside so many decodes, so that no model that runs on
    the slice makes its clients wait for it; and since nothing can start before a step ends, a
    newcomer like those who are there would still have half of its time for the first token."""
    allowed_s = float("inf")
    for model in models:
        if model.seqs:
            allowed_s = min(allowed_s, model.ttft_s / 2)
        if model.started:
            headroom_s = model.most_urgent_due_s() - now
            allowed_s = min(allowed_s, allowed_step_s(headroom_s, model.tpot_s))
    return time.chunk(decodes, allowed_s, min(_CHUNK_MIN, most), most)
