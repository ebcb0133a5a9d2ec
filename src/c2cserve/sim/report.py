"""The result of a simulation: latencies, attainment of targets, and use of the machine."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from c2cserve.sim.world.requests import TrackedRequest

if TYPE_CHECKING:
    from c2cserve.sim.world.simulation import Simulation

_QUANTILES = (0.5, 0.9, 0.95, 0.99)


@dataclass(frozen=True, slots=True)
class Latency:
    """Seconds."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float


@dataclass(frozen=True, slots=True)
class LinkUse:
    moved_bytes: float
    busy_share: float
    mean_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class NodeUse:
    """Shares of the time from the first arrival to the end."""

    busy: float
    """A step ran."""
    used: float
    """It had requests."""
    held: float
    """It had instances."""
    steps: int
    tokens: int
    switches: int
    loads: int
    streamed_bytes: float
    compute: float
    memory: float
    link: float
    """Steps ran whose duration was set by arithmetic, the slice's own memory, or the link."""
    kv: float
    """Share of the KV memory that was held while steps ran."""


@dataclass(frozen=True, slots=True)
class Report:
    requests: int
    finished: int
    rejected: int
    truncated: int
    duration_s: float
    ttft: Latency
    """Latency of the requests that got a first token."""
    tpot: Latency
    """Mean time per token after the first. Requests with two tokens or more count."""
    ttft_attainment: float
    """Share of all requests whose first token was in time. A refused request is late."""
    tpot_attainment: float
    """Share of requests with two tokens or more whose mean time per token was within target."""
    slo_met: int
    """Requests that finished within both targets."""
    slo_attainment: float
    every_token_attainment: float
    """Share of requests that finished with every token in time (SLINFER equation 1), loading of
    weights excused as that paper does (section IX-A)."""
    nodes_used: Mapping[str, float]
    """Kind of slice -> slices that had requests, mean over time."""
    nodes_held: Mapping[str, float]
    """Kind of slice -> slices that had instances, mean over time."""
    nodes: Mapping[str, NodeUse]
    links: Mapping[str, LinkUse]
    preempted: int
    resumed: int
    ticks: int

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def in_time(tracked: TrackedRequest) -> bool:
    return tracked.first_s >= 0 and tracked.ttft_s <= tracked.request.slo.ttft_s + tracked.grace_s


def on_pace(tracked: TrackedRequest) -> bool:
    return tracked.sampled > 0 and tracked.tpot_s <= tracked.request.slo.tpot_s


def every_token_in_time(tracked: TrackedRequest) -> bool:
    return tracked.ending == "finished" and tracked.late_s <= tracked.grace_s


def latency(values: Sequence[float]) -> Latency:
    if not values:
        return Latency(0.0, 0.0, 0.0, 0.0, 0.0)
    ordered = sorted(values)
    picked = [ordered[min(len(ordered) - 1, int(q * len(ordered)))] for q in _QUANTILES]
    return Latency(sum(ordered) / len(ordered), *picked)


def report(simulation: "Simulation") -> Report:
    requests = simulation.requests.ended
    total = max(1, len(requests))
    long = [tracked for tracked in requests if tracked.sampled > 1]
    met = sum(
        tracked.ending == "finished" and in_time(tracked) and on_pace(tracked)
        for tracked in requests
    )
    first_s = min((tracked.request.arrival_s for tracked in requests), default=0.0)
    duration_s = max(simulation.timeline.now - first_s, 1e-9)
    nodes = _nodes(simulation, duration_s)
    kinds = {simulated.slice.id: simulated.slice.kind for simulated in simulation.machine.slices}
    return Report(
        requests=len(requests),
        finished=sum(tracked.ending == "finished" for tracked in requests),
        rejected=sum(tracked.ending == "rejected" for tracked in requests),
        truncated=sum(tracked.ending == "truncated" for tracked in requests),
        duration_s=duration_s,
        ttft=latency([tracked.ttft_s for tracked in requests if tracked.sampled]),
        tpot=latency([tracked.tpot_s for tracked in long]),
        ttft_attainment=sum(map(in_time, requests)) / total,
        tpot_attainment=sum(map(on_pace, long)) / max(1, len(long)),
        slo_met=met,
        slo_attainment=met / total,
        every_token_attainment=sum(map(every_token_in_time, requests)) / total,
        nodes_used=_by_kind(kinds, {name: node.used for name, node in nodes.items()}),
        nodes_held=_by_kind(kinds, {name: node.held for name, node in nodes.items()}),
        nodes=nodes,
        links={
            name: LinkUse(link.moved_bytes, link.busy_s / duration_s, link.moved_bytes / duration_s)
            for name, link in simulation.network.links.items()
        },
        preempted=sum(tracked.preempted for tracked in requests),
        resumed=sum(tracked.resumed for tracked in requests),
        ticks=simulation.loops.ticks,
    )


def _by_kind(kinds: Mapping[str, str], shares: Mapping[str, float]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for name, share in shares.items():
        sums[kinds[name]] = sums.get(kinds[name], 0.0) + share
    return sums


def _nodes(simulation: "Simulation", duration_s: float) -> dict[str, NodeUse]:
    nodes: dict[str, NodeUse] = {}
    lives = [*simulation.lost, *simulation.slices.values()]
    for simulated in simulation.machine.slices:
        uses = [life.use for life in lives if life.simulated is simulated]
        nodes[simulated.slice.id] = NodeUse(
            busy=sum(use.busy_s for use in uses) / duration_s,
            used=sum(use.used_s for use in uses) / duration_s,
            held=sum(use.held_s for use in uses) / duration_s,
            steps=sum(use.steps for use in uses),
            tokens=sum(use.tokens for use in uses),
            switches=sum(use.switches for use in uses),
            loads=sum(use.loads for use in uses),
            streamed_bytes=sum(use.streamed_bytes for use in uses),
            compute=sum(use.compute_s for use in uses) / duration_s,
            memory=sum(use.memory_s for use in uses) / duration_s,
            link=sum(use.link_s for use in uses) / duration_s,
            kv=sum(use.kv_byte_s for use in uses)
            / max(1e-9, simulated.slice.kv_bytes * sum(use.busy_s for use in uses)),
        )
    return nodes
