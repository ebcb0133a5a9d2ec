"""How many requests wait on a slice for their first token, and how fast it starts them (ours).

Placement foretells first tokens by step times. Where those are too hopeful, a slice is sent more
than it can start, and all of that is late. So what it starts per second is measured. After a first
token that was nearly late, a slice is sent no more than it starts in a share of the TTFT target.
That ends when none has been so for a while. The share falls with each. The others wait in the
queue, where admission sees them.

A slice may hold more than that when it shows. What would be late behind the rest is `hopeless`:
without it, the rest is in time.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

from c2cserve.policy.cluster.feedback import Throughput
from c2cserve.policy.cluster.slice_load import PlacedRequest, SliceLoad

MANY = 16
"""So many may always wait on a slice: they may wait for weights, and others need not."""
_MOST, _LEAST = 0.75, 0.05
"""The share of the TTFT target at first, and at least. The rest is for what is before and after."""
_NEARLY = 0.8
"""A first token that took such a share of its target tells that the next ones may be late."""
_LOWER = 0.9
_HIGHER_PER_S = 0.002
TRUST_S = 60.0
"""Predictions are trusted again when no first token was nearly late for so long."""
_MARGIN = 0.1
"""The share of the target that is left for what comes after a slice, and for errors."""


@dataclass(slots=True)
class _Slice:
    started: Throughput = field(default_factory=Throughput)
    share: float = _MOST
    late_sent_s: float = -inf
    """When the last of the nearly late requests was sent, of those seen since `learn`."""
    late_s: float = -inf
    lowered_s: float = -inf
    learned_s: float = 0.0
    trusted: bool = True

    @property
    def settled(self) -> bool:
        """Whether `learn` changes nothing, as long as no first token is nearly late."""
        return self.trusted and self.share == _MOST and self.late_sent_s == -inf

    def learn(self, now: float, *, crowded: bool) -> None:
        """Lower the share if a request was nearly late. Those that were sent before it fell tell
        nothing about its new value: else one queue that was too long would empty the slice.
        `crowded`: many wait. Else it was not the others that held it up."""
        self.share = min(_MOST, self.share * (1.0 + _HIGHER_PER_S * (now - self.learned_s)))
        self.learned_s = now
        if crowded and self.late_sent_s > -inf:
            if self.late_sent_s > self.lowered_s:
                self.share, self.lowered_s = max(_LEAST, self.share * _LOWER), now
            self.late_s = now
        self.late_sent_s = -inf
        self.trusted = now - self.late_s > TRUST_S


class Starts:
    def __init__(self) -> None:
        self._slices: dict[str, _Slice] = {}
        self.distrusted: set[str] = set()
        """Slices of which predictions are not trusted now: others are never full."""
        self._changing: set[str] = set()
        """Slices that requests were sent to or left since the last `refresh`, and those with
        something to learn."""

    def started(self, slice_id: str, after: float, sent_s: float) -> None:
        """Note a first token, of a request that was sent at `sent_s`. `after`: how long it took
        since the request arrived, in TTFT targets."""
        self._changing.add(slice_id)
        one = self._slices.get(slice_id)
        if one is None:
            one = self._slices[slice_id] = _Slice()
        one.started.finished()
        if after > _NEARLY:
            one.late_sent_s = max(one.late_sent_s, sent_s)

    def refresh(self, waiting: Callable[[str], int], now: float) -> None:
        """`waiting`: a slice's requests without a first token; 0 for one that is gone."""
        if not self._changing:
            return
        changing, self._changing = self._changing, set()
        for slice_id in changing:
            if (one := self._slices.get(slice_id)) is not None:
                crowded = 2 * waiting(slice_id) >= MANY
                one.learn(now, crowded=crowded)
                one.started.refresh(now, saturated=crowded)
                if one.trusted:
                    self.distrusted.discard(slice_id)
                else:
                    self.distrusted.add(slice_id)
                if crowded or not one.settled:
                    self._changing.add(slice_id)

    def changed(self, slice_id: str) -> None:
        """Note that the number of a slice's requests without a first token has changed."""
        self._changing.add(slice_id)

    def full(self, slice_id: str, waiting: int, ttft_s: float) -> bool:
        """Return whether a further request would wait too long on a slice. `waiting`: its requests
        without a first token."""
        one = None if waiting < MANY else self._slices.get(slice_id)
        if one is None or one.trusted:
            return False
        return one.started.wait_s(waiting) > one.share * ttft_s

    def hopeless(self, load: SliceLoad, now: float) -> list[PlacedRequest]:
        """Return those of a slice's requests whose first token will be late behind the others."""
        one = self._slices.get(load.slice.id)
        rate = one.started if one is not None and not one.trusted else Throughput()
        pending = [
            (each.due_s(job, now), job) for each in load.busy() for job in each.pending.values()
        ]
        ahead, found = 0, list[PlacedRequest]()
        for due_s, job in sorted(pending, key=lambda one: one[0]):
            request = job.request
            late_s = now - due_s
            if ahead >= MANY:  # else its prompt may be under way
                late_s += rate.wait_s(ahead) + _MARGIN * request.slo.ttft_s
            if late_s > 0.0 and not job.kept:
                found.append(job)
            else:
                ahead += 1
        return found
