"""A slice's requests, and the step that is made of one model's: all decodes plus prefill chunks."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import attrgetter

from c2cserve.core.request import BLOCK_TOKENS, Request
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

    @classmethod
    def of(cls, request: Request, model: "ActiveModel") -> "Seq":
        return cls(request, model, request.prompt_len, due_s(request, request.sent))

    @property
    def in_flight(self) -> bool:
        return self.issued != self.computed

    @property
    def decoding(self) -> bool:
        """Ready for its next single token."""
        return self.started and self.issued == self.length - 1 == self.computed

    def drew(self, tokens: int) -> None:
        self.length += tokens
        sent = self.request.sent + self.length - self.request.prompt_len
        self.due_s = due_s(self.request, sent)

    def lacking(self, tokens: int) -> int:
        """Blocks it needs beyond those it has to keep so many tokens."""
        return -(-tokens // BLOCK_TOKENS) - len(self.blocks)

    def issue(self, tokens: int) -> SeqStep:
        """Its share of the next step."""
        start = self.issued
        self.issued += tokens
        new = tuple(self.blocks[self.told :])
        fresh = self.told == 0
        self.told = len(self.blocks)
        return SeqStep(self.request.id, start, tokens, new, fresh, emits=self.issued == self.length)

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
    seqs: dict[str, Seq] = field(default_factory=dict[str, Seq])
    time: StepTime = field(default_factory=StepTime)
    in_flight: int | None = None
    """Id of its step under way; at most one, because a decode needs the token before."""
    last_step: int = 0
    started: int = 0
    cached_tokens: int = 0
    preemptions: int = 0

    def most_urgent_due_s(self) -> float:
        return min(map(_DUE, self.seqs.values()))

    def decodes(self) -> list[Seq]:
        return sorted((seq for seq in self.seqs.values() if seq.decoding), key=_DUE)

    def prefills(self) -> list[Seq]:
        """Those under way first, then by urgency. None is in flight: no step of the model is."""
        rest = [seq for seq in self.seqs.values() if not seq.decoding]
        return sorted(rest, key=lambda seq: (not seq.started, seq.due_s))


_DUE = attrgetter("due_s")


_CHUNK_MIN = 16


def chunk_tokens(time: StepTime, decodes: int, seqs: Iterable[Seq], now: float, most: int) -> int:
    """Prefill tokens that may go into a step beside so many decodes, so that no running request on
    the slice (`seqs`, of any model) falls behind its TPOT for it."""
    allowed_s = min(
        (allowed_step_s(s.due_s - now, s.request.slo.tpot_s) for s in seqs if s.decoding),
        default=float("inf"),
    )
    return time.chunk(decodes, allowed_s, min(_CHUNK_MIN, most), most)
