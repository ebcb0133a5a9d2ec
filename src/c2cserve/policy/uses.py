"""How often a model is used, estimated from when it was used last."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from c2cserve.core.model import ModelSpec

_USES = 16
"""Uses that a rate is estimated from: it errs by a quarter, and follows when traffic changes."""
LOAD_BYTES_PER_S = 1e9
"""How fast weights are believed to be loaded. Uses within one load count once."""


@dataclass(slots=True)
class Uses:
    """The last uses of one model.

    What a missing model costs is a load at its next use. So the models to keep are those that are
    used most often, not those that were used last. Among models asked for at random, keeping the
    last ones misses a third more often. The estimate has no time constant. It is the number of
    uses since the oldest of the last 16, over the time since then (the rule LRU-K, K = 16).
    Requests that would have waited for the same load are one use, so a burst counts little."""

    apart_s: float
    times_s: deque[float] = field(default_factory=lambda: deque[float](maxlen=_USES))

    @staticmethod
    def of(weight_bytes: int) -> "Uses":
        return Uses(weight_bytes / LOAD_BYTES_PER_S)

    def note(self, now: float) -> None:
        if not self.times_s or now - self.times_s[-1] >= self.apart_s:
            self.times_s.append(now)

    def recall(self, times_s: Sequence[float]) -> None:
        """Take over what another has seen of the model's uses, if that is more often."""
        other = Uses(self.apart_s, deque(times_s, maxlen=_USES))
        last_s = max((*self.times_s, *other.times_s), default=0.0)
        if other.per_s(last_s) > self.per_s(last_s):
            self.times_s = other.times_s

    def begin(self, now: float) -> None:
        """Forget what was before, and count one use now."""
        self.times_s.clear()
        self.times_s.append(now)

    def per_s(self, now: float) -> float:
        """Return the rate; 0 if it was never used."""
        if not self.times_s:
            return 0.0
        since_s = max(now - self.times_s[0], self.apart_s)
        return len(self.times_s) / max(1e-3, since_s)


def note_use(uses: dict[str, Uses], model: ModelSpec, now: float) -> None:
    """Note a use of a model, of which there may be none yet."""
    found = uses.get(model.id)
    if found is None:
        found = uses[model.id] = Uses.of(model.weight_bytes)
    found.note(now)
