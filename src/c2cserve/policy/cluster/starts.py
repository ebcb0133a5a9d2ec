"""How many requests wait on a slice for their first token, and how fast it starts them (ours).

Placement foretells first tokens by step times. Where those are too hopeful, a slice is sent more
than it can start, and all of that is late. So what it starts per second is measured, and it is sent
no more than it starts in a share of the TTFT target. The share is learned: first tokens that are
late lower it. The others wait in the queue, where admission sees them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from c2cserve.policy.cluster.feedback import InTimeShare, Throughput

MANY = 16
"""So many may always wait on a slice: they may wait for weights, and others need not."""
_MOST = 4.0
"""The share of the TTFT target at first. So much never waits where predictions are right."""


@dataclass(slots=True)
class _Slice:
    started: Throughput = field(default_factory=Throughput)
    share: InTimeShare = field(default_factory=lambda: InTimeShare(_MOST, _MOST))

    @property
    def trusted(self) -> bool:
        """No first token was late for long."""
        return self.share.value >= _MOST


class Starts:
    def __init__(self) -> None:
        self._slices: dict[str, _Slice] = {}

    def started(self, slice_id: str, *, late: bool) -> None:
        """Note a first token."""
        one = self._slices.setdefault(slice_id, _Slice())
        one.started.finished()
        one.share.note(late=late)

    def refresh(self, waiting: Callable[[str], int], now: float) -> None:
        """`waiting`: a slice's requests without a first token; 0 for one that is gone."""
        for slice_id, one in self._slices.items():
            many = not one.trusted and 2 * waiting(slice_id) >= MANY
            one.started.refresh(now, saturated=many)

    def full(self, slice_id: str, waiting: Callable[[str], int], ttft_s: float) -> bool:
        """Return whether a further request would wait too long on a slice."""
        one = self._slices.get(slice_id)
        if one is None or one.trusted or (count := waiting(slice_id)) < MANY:
            return False
        return one.started.wait_s(count) > one.share.value * ttft_s
