"""A run's time by the server's own account: phases of its requests, bytes of weights.

Read from `/metrics` before and after. A server that has no such page, or does not show it without
a key, is measured from outside alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from c2cserve.bench.scrape import Histogram, Scrape, scrape
from c2cserve.terminal.output import show_bytes, show_seconds

if TYPE_CHECKING:
    from rich.table import Table

PHASES = {
    "queue": "vllm:request_queue_time_seconds",
    "switch of model": "c2cserve:switch_seconds",
    "waiting for weights": "c2cserve:weight_wait_seconds",
    "prefill": "vllm:request_prefill_time_seconds",
    "each token after": "vllm:request_time_per_output_token_seconds",
}
_WEIGHTS = {
    "read in HBM": "c2cserve:slice_weights_hit_bytes_total",
    "streamed": "c2cserve:slice_weights_streamed_bytes_total",
    "of these from a neighbour": "c2cserve:slice_weights_peer_bytes_total",
}


@dataclass(frozen=True, slots=True)
class Phases:
    """Counters between two readings, or since the server's start."""

    seconds: Mapping[str, Histogram] = field(default_factory=dict[str, Histogram])
    weight_bytes: Mapping[str, float] = field(default_factory=dict[str, float])
    """Bytes that steps of GPU slices read, by where the weights were."""

    def since(self, earlier: "Phases") -> "Phases":
        """Subtract an earlier reading. Weights' counters restart with a replaced worker."""
        seconds = {
            name: one.since(earlier.seconds.get(name, Histogram()))
            for name, one in self.seconds.items()
        }
        weights = {
            name: count - earlier.weight_bytes.get(name, 0.0)
            for name, count in self.weight_bytes.items()
        }
        return Phases(seconds, {name: max(0.0, count) for name, count in weights.items()})

    def __add__(self, other: "Phases") -> "Phases":
        names = {**self.seconds, **other.seconds}
        empty = Histogram()
        seconds = {
            name: self.seconds.get(name, empty).plus(other.seconds.get(name, empty))
            for name in names
        }
        weights = {
            name: self.weight_bytes.get(name, 0.0) + other.weight_bytes.get(name, 0.0)
            for name in {**self.weight_bytes, **other.weight_bytes}
        }
        return Phases(seconds, weights)


def read_phases(url: str, admin_key: str | None) -> Phases:
    """Read the phases since the server's start; empty if it does not report them."""
    return phases_of(scrape(url, admin_key))


def phases_of(page: Scrape) -> Phases:
    seconds = {name: page.histogram(metric) for name, metric in PHASES.items()}
    found = {name: one for name, one in seconds.items() if one.buckets}
    weights = {name: page.total(metric) for name, metric in _WEIGHTS.items()}
    return Phases(found, {name: count for name, count in weights.items() if count})


def phase_table(columns: Sequence[tuple[str, Phases]]) -> "Table | None":
    """Make a table with a row per phase: count, mean, p50 and p99 of every (heading, phases).

    Return None if there are no phases. Quantiles are as fine as the server's buckets."""
    from rich.table import Table

    shown = [
        name for name in PHASES
        if any(_count(phases, name) for _, phases in columns)
    ]  # fmt: skip
    if not shown:
        return None
    table = Table(title="by the server's own account", caption=_weights_line(columns))
    table.add_column("phase")
    for heading, _ in columns:
        for head in ("requests", "mean", "p50", "p99"):
            table.add_column(f"{heading} {head}".strip(), justify="right")
    for name in shown:
        cells = [cell for _, phases in columns for cell in _cells(phases, name)]
        table.add_row(name, *cells)
    return table


def _count(phases: Phases, name: str) -> float:
    return phases.seconds.get(name, Histogram()).count


def _cells(phases: Phases, name: str) -> list[str]:
    one = phases.seconds.get(name, Histogram())
    middle, high = one.quantile(0.5), one.quantile(0.99)
    if not one.count or middle is None or high is None:
        return ["-"] * 4
    times = (one.sum / one.count, middle, high)
    return [f"{one.count:.0f}", *map(show_seconds, times)]


def _weights_line(columns: Sequence[tuple[str, Phases]]) -> str | None:
    parts = [
        f"{heading}: ".removeprefix(": ") + ", ".join(
            f"{name} {show_bytes(int(count))}" for name, count in phases.weight_bytes.items()
        )
        for heading, phases in columns if any(phases.weight_bytes.values())
    ]  # fmt: skip
    return f"weights {'; '.join(parts)}" if parts else None
