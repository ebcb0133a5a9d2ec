"""What a slice knows of one model whose weights are kept as a whole."""

from dataclasses import dataclass
from math import frexp, inf
from typing import Literal

from c2cserve.policy.slice.batching import ActiveModel

State = Literal["absent", "loading", "resident", "refused"]
STATES: tuple[State, ...] = ("absent", "loading", "resident", "refused")
_LONG_S = 1e4


@dataclass(slots=True, eq=False)
class ModelWeights:
    model: ActiveModel
    size: int
    rank: tuple[bool, int]
    """Pinned, and the priority: among models without requests, higher ones stay."""
    keep_warm_s: float
    """How long after a request it stays before others of its rank."""
    tokens_beside: float
    """The longest request's whose KV fits beside the weights; infinite if all do."""
    state: State = "absent"
    gap_s: float = float("inf")
    """Between its requests, lately."""
    asked_s: float = float("-inf")
    """When the last of them came."""
    tries: int = 0
    """Loads that were refused since the last one that was not."""
    refused_s: float | None = None
    """When it was seen that its loads were refused,"""
    kv_end_bytes: int = 0
    """and how far KV reached then."""

    @property
    def due_s(self) -> float:
        """When its most urgent request is due; infinite without requests."""
        return self.model.most_urgent_due_s() if self.model.seqs else float("inf")

    @property
    def absent(self) -> bool:
        return self.state == "absent"

    @property
    def takes_room(self) -> bool:
        """Whether the weights are in the slice's memory, or on their way there."""
        return self.state in ("loading", "resident")

    @property
    def prompts_wait(self) -> bool:
        """Whether a request of the model has not started."""
        return self.model.started < len(self.model.seqs)

    @property
    def too_long(self) -> bool:
        """Whether a request of the model needs more KV than fits beside its weights."""
        return self.tokens_beside < inf and any(
            seq.length > self.tokens_beside for seq in self.model.seqs.values()
        )

    def value(self, now: float) -> tuple[bool, int, bool, float]:
        """Return what is lost if it leaves without requests; of lesser ones, the one that is
        expected last goes first."""
        return *self.rank, now < self.asked_s + self.keep_warm_s, -self.needed_s(now)

    def worth(self, now: float) -> int:
        """Return what its next step is worth (`weight_swapping.WeightSwapping.favourite`): the
        logarithm, rounded, so that it seldom changes while models run."""
        gap_s = min(max(self.gap_s, now - self.asked_s), _LONG_S)
        step_s = self.model.time.decode_step_s(len(self.model.seqs))
        return frexp(self.size * gap_s / step_s)[1] if step_s else 0

    def needed_s(self, now: float) -> float:
        """When a client will wait for it, if it is absent: its next token is due, or its next
        request is expected. After a long gap the next request is expected after as long again."""
        next_s = now + max(self.gap_s, now - self.asked_s)
        return min(next_s, self.due_s)
