"""The copy engine of a slice for one direction.

Requests that arrive during a copy are batched into the next one, as in SuperInfer's engine
(section 4.3.2, one batched copy per direction)."""

from collections.abc import Callable, Sequence
from math import inf

from c2cserve.sim.world.links import Network
from c2cserve.sim.world.timeline import Timeline

Copy = tuple[float, Callable[[], None]]
"""Bytes, and a callback for the end."""


class CopyEngine:
    def __init__(self, timeline: Timeline, network: Network, route: Sequence[str]) -> None:
        """`route`: the links to copy over. It is empty if the slice computes in host memory."""
        self._timeline = timeline
        self._network = network
        self._route = route
        self._urgent: list[Copy] = []
        self._others: list[Copy] = []
        self._busy = False

    def submit(self, size: float, urgent: bool, done: Callable[[], None]) -> None:
        """Copy `size` bytes, then call `done`. Urgent copies go first."""
        (self._urgent if urgent else self._others).append((size, done))
        if not self._busy:
            self._busy = True  # in one batch with the other requests of this moment
            self._timeline.at(self._timeline.now, self._start)

    def _start(self) -> None:
        batch, rest = self._urgent or self._others, self._others if self._urgent else []
        self._urgent, self._others = [], rest
        self._busy = bool(batch)
        size = sum(size for size, _ in batch)
        if not batch:
            return
        if size and self._route:
            self._network.start(self._route, size, inf, lambda: self._done(batch))
        else:
            self._done(batch)

    def _done(self, batch: list[Copy]) -> None:
        for _, done in batch:
            done()
        self._start()
