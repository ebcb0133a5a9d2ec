"""Links that are shared as in hardware: by processor sharing.

A *flow* moves bytes over every link of its route at one rate. Rates are max-min fair: all flows of
a link get the same rate, except flows that cannot use it. These are limited by their `cap`, or by a
tighter link of their route, and the other flows divide the rest. Between changes rates are
constant, so a flow's end can be computed. A change moves the ends of the flows that it affects.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf

from c2cserve.sim.world.timeline import Timeline

_SLACK = 1e-9
"""Relative error that rounding may cause."""
PART_BYTES = 128 << 20
"""What a link pulls of a load at a time: 2.4 ms of PCIe 5. The engine's micro-tasks are smaller,
and its relays are recalled at once when a neighbour needs its link."""


@dataclass(slots=True, eq=False)
class Flow:
    route: tuple["SharedLink", ...]
    left: float
    """Bytes, as of `since_s`."""
    cap: float
    done: Callable[[], None]
    rate: float = 0.0
    since_s: float = 0.0
    plan: int = 0
    """Number of the latest plan for its end; earlier plans are void."""


@dataclass(slots=True, eq=False)
class SharedLink:
    id: str
    nominal_bytes_per_s: float
    bytes_per_s: float
    """The present speed, which a fault may lower."""
    flows: dict[Flow, None] = field(default_factory=dict[Flow, None])
    demand: float = 0.0
    """Sum of its flows' caps. While the link can carry it, no flow is slowed down."""
    moved_bytes: float = 0.0
    busy_s: float = 0.0
    """Seconds with a flow on it."""
    busy_since_s: float = 0.0

    @property
    def rate(self) -> float:
        return sum(flow.rate for flow in self.flows)


class Network:
    def __init__(self, timeline: Timeline, links: Iterable[tuple[str, float]]) -> None:
        """`links`: id and bytes per second."""
        self._timeline = timeline
        self.links = {name: SharedLink(name, rate, rate) for name, rate in links}

    def start(
        self, route: Sequence[str], size: float, cap: float, done: Callable[[], None]
    ) -> Flow:
        """Move `size` bytes over all links of the route at `cap` bytes per second at most.

        `done` is called at the end. Raises ValueError for a flow that would never end."""
        if not route or size <= 0 or cap <= 0:
            raise ValueError(f"a flow of {size} bytes at {cap} over {len(route)} links")
        links = tuple([self.links[name] for name in route])
        now = self._timeline.now
        for link in links:
            cap = min(cap, link.nominal_bytes_per_s)
        flow = Flow(links, size, cap, done, since_s=now)
        for link in links:
            if not link.flows:
                link.busy_since_s = now
            link.flows[flow] = None
            link.demand += flow.cap
        if all(link.demand <= link.bytes_per_s for link in links):
            self._set(flow, flow.cap)
        else:
            self._share(links)
        return flow

    def stop(self, flow: Flow) -> None:
        """End a flow early, without `done`."""
        self._account(flow)
        self._remove(flow)

    def left(self, flow: Flow) -> float:
        """Return the bytes that the flow still has to move."""
        self._account(flow)
        return flow.left

    def shorten(self, flow: Flow, left: float) -> None:
        """Set the bytes that the flow still has to move."""
        self._account(flow)
        flow.left = left
        flow.plan += 1
        self._timeline.at(self._timeline.now + left / flow.rate, self._end, flow, flow.plan)

    def set_speed(self, link_id: str, bytes_per_s: float) -> None:
        """Change the speed of a link."""
        link = self.links[link_id]
        link.bytes_per_s = bytes_per_s
        self._share((link,))

    def moved_bytes(self, link_id: str) -> float:
        """Return the bytes that the link has carried up to now."""
        link = self.links[link_id]
        for flow in link.flows:
            self._account(flow)
        return link.moved_bytes

    def update_totals(self) -> None:
        """Bring `moved_bytes` and `busy_s` up to now."""
        now = self._timeline.now
        for link in self.links.values():
            for flow in link.flows:
                self._account(flow)
            if link.flows:
                link.busy_s += now - link.busy_since_s
                link.busy_since_s = now

    # ---- sharing --------------------------------------------------------------------------------

    def _remove(self, flow: Flow) -> None:
        flow.plan += 1
        now = self._timeline.now
        waited = [link for link in flow.route if link.demand > link.bytes_per_s]
        for link in flow.route:
            del link.flows[flow]
            link.demand = link.demand - flow.cap if link.flows else 0.0
            if not link.flows:
                link.busy_s += now - link.busy_since_s
        if waited:
            self._share(waited)

    def _share(self, links: Iterable[SharedLink]) -> None:
        """Update the rates of all flows that are connected to these links."""
        seen = dict.fromkeys(links)
        if not any(link.flows for link in seen):
            return
        alike = _of_one_route(seen)
        if alike is not None:
            slowest = min(link.bytes_per_s for link in alike[0].route)
            rates = shared_rates(alike, slowest)
            assert sum(rates) <= slowest * (1 + 1e-6), "a link is over-committed"
            for flow, rate in zip(alike, rates, strict=True):
                self._set(flow, rate)
            return
        flows: dict[Flow, None] = {}
        unseen = list(seen)
        while unseen:
            for flow in unseen.pop().flows:
                if flow not in flows:
                    flows[flow] = None
                    more = [link for link in flow.route if link not in seen]
                    seen.update(dict.fromkeys(more))
                    unseen += more
        for flow, rate in fair_rates(list(flows), list(seen)).items():
            self._set(flow, rate)
        for link in seen:  # rates rise nowhere else but to caps that all fit
            assert link.rate <= link.bytes_per_s * (1 + 1e-6), f"{link.id} is over-committed"

    def _set(self, flow: Flow, rate: float) -> None:
        if rate == flow.rate:
            return
        self._account(flow)
        flow.rate = rate
        flow.plan += 1
        self._timeline.at(self._timeline.now + flow.left / rate, self._end, flow, flow.plan)

    def _account(self, flow: Flow) -> None:
        now = self._timeline.now
        moved = min(flow.left, flow.rate * (now - flow.since_s))
        flow.left -= moved
        flow.since_s = now
        for link in flow.route:
            link.moved_bytes += moved

    def _end(self, flow: Flow, plan: int) -> None:
        if plan != flow.plan:
            return
        for link in flow.route:
            link.moved_bytes += flow.left
        flow.left = 0.0
        self._remove(flow)
        flow.done()


class PathsLoad:
    """A load of a whole model over several links: its own, and those of neighbours that are idle.

    As the transfer engine does (docs/transfers.md), each link pulls a part when it has none. A
    neighbour's own bytes come first: its link pulls only while nothing else is on it.
    """

    def __init__(
        self, network: Network, paths: Sequence[Sequence[str]], size: float, cap: float,
        done: Callable[[], None],
    ) -> None:  # fmt: skip
        """The first of `paths` is the direct one. Each is a route of links, a neighbour's own link
        first. `cap` is in bytes per second, for each path. `done` is called at the end."""
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


def _of_one_route(links: Iterable[SharedLink]) -> list[Flow] | None:
    """Return all flows of these links if they share one route with no other flow; else None."""
    flows = list(next(link for link in links if link.flows).flows)
    route = flows[0].route
    for flow in flows:
        if flow.route != route:
            return None
    alone = all(len(link.flows) == len(flows) for link in route)
    return flows if alone and all(link in route for link in links) else None


def shared_rates(flows: Sequence[Flow], bytes_per_s: float) -> list[float]:
    """Return `fair_rates` of flows that share all links. `bytes_per_s` is that of the slowest."""
    free, rising = bytes_per_s, len(flows)
    rates = [-1.0] * rising
    todo = list(range(rising))
    while todo:
        level = max(free / rising, 0.0)
        stop = [number for number in todo if flows[number].cap <= level * (1 + _SLACK)] or todo
        for number in stop:
            rates[number] = min(flows[number].cap, level)
            free -= rates[number]
            rising -= 1
        todo = [number for number in todo if rates[number] < 0.0]
    return rates


def fair_rates(flows: Sequence[Flow], links: Sequence[SharedLink]) -> dict[Flow, float]:
    """Return max-min fair rates by progressive filling.

    All rates rise together. A flow stops at its cap, or when a link of its route is full."""
    rates: dict[Flow, float] = {}
    free = {link: link.bytes_per_s for link in links}
    rising = {link: len(link.flows) for link in links}
    todo = list(flows)
    while todo:
        level = min((free[link] / rising[link] for link in links if rising[link]), default=inf)
        level = max(level, 0.0)
        stop = [flow for flow in todo if flow.cap <= level * (1 + _SLACK)]
        if not stop:
            tight = {
                link for link in links
                if rising[link] and free[link] / rising[link] <= level * (1 + _SLACK)
            }  # fmt: skip
            stop = [flow for flow in todo if not tight.isdisjoint(flow.route)]
        for flow in stop:
            rates[flow] = min(flow.cap, level)
            for link in flow.route:
                free[link] -= rates[flow]
                rising[link] -= 1
        todo = [flow for flow in todo if flow not in rates]
    return rates
