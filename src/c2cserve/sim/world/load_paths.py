"""A load of a whole model over several links: its own, and those of neighbours that are idle.

As the transfer engine does (`docs/transfers.md`), each link pulls a part when it has none. A
neighbour's own bytes come first: its link pulls only while nothing else is on it.
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import inf

from c2cserve.sim.world.links import Flow, Network

PART_BYTES = 128 << 20
"""What a link pulls at a time: 2.4 ms of PCIe 5. The engine's micro-tasks are smaller, and its
relays are recalled at once when a neighbour needs its link."""


class PathsLoad:
    """One load. `done` is called when all bytes are there."""

    def __init__(
        self, network: Network, paths: Sequence[Sequence[str]], size: float, cap: float,
        done: Callable[[], None],
    ) -> None:  # fmt: skip
        """The first of `paths` is the direct one. Each is a route of links, a neighbour's own link
        first. `cap` is in bytes per second, for each path."""
        self._network, self._paths, self._cap, self._done = network, paths, cap, done
        self._left = size
        self._part = PART_BYTES if len(paths) > 1 else inf
        self._flows: dict[int, Flow] = {}
        self._pull()

    def stop(self) -> None:
        """End the load early, without `done`."""
        self._left = 0.0
        for flow in self._flows.values():
            self._network.stop(flow)
        self._flows.clear()

    def _pull(self) -> None:
        for number, path in enumerate(self._paths):
            if self._left <= 0 or number in self._flows:
                continue
            if number and self._network.links[path[0]].flows:
                continue
            size = min(self._part, self._left)
            self._left -= size
            ended = partial(self._ended, number)
            self._flows[number] = self._network.start(path, size, self._cap, ended)

    def _ended(self, number: int) -> None:
        del self._flows[number]
        self._pull()
        if not self._flows:
            self._done()
