"""A server's Prometheus page read from outside: what it measured, and between two scrapes."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from c2cserve.bench.client import Unanswered, ask


@dataclass(frozen=True, slots=True)
class Histogram:
    """Cumulative counts by upper bound."""

    buckets: tuple[tuple[float, float], ...] = ()
    sum: float = 0.0

    @property
    def count(self) -> float:
        return self.buckets[-1][1] if self.buckets else 0.0

    def since(self, earlier: "Histogram") -> "Histogram":
        """Return what came since. One that fell counts from zero: its model was removed and added
        again, or the server was started again."""
        if self.count < earlier.count:
            return self
        before = dict(earlier.buckets)
        return Histogram(
            tuple((bound, count - before.get(bound, 0.0)) for bound, count in self.buckets),
            self.sum - earlier.sum,
        )

    def plus(self, other: "Histogram") -> "Histogram":
        """Add a histogram with the same bounds, or an empty one."""
        more = dict(other.buckets)
        mine = self.buckets or tuple((bound, 0.0) for bound, _ in other.buckets)
        return Histogram(
            tuple((bound, count + more.get(bound, 0.0)) for bound, count in mine),
            self.sum + other.sum,
        )

    def quantile(self, share: float) -> float | None:
        """Linear within a bucket, as Prometheus' `histogram_quantile`; None without samples."""
        wanted = share * self.count
        lower, below = 0.0, 0.0
        for bound, count in self.buckets:
            if count >= wanted and count > below:
                if math.isinf(bound):
                    return lower
                return lower + (bound - lower) * (wanted - below) / (count - below)
            lower, below = bound, count
        return None


@dataclass(frozen=True, slots=True)
class _Sample:
    name: str
    labels: Mapping[str, str]
    value: float

    def has(self, labels: Mapping[str, str]) -> bool:
        return all(self.labels.get(name) == value for name, value in labels.items())


@dataclass(frozen=True, slots=True)
class Scrape:
    samples: tuple[_Sample, ...] = ()

    def total(self, name: str, **labels: str) -> float:
        """Sum of all samples of that name which have these labels."""
        return sum(one.value for one in self.samples if one.name == name and one.has(labels))

    def histogram(self, name: str, **labels: str) -> Histogram:
        """All samples with these labels added up; empty when there are none."""
        buckets: dict[float, float] = {}
        for one in self.samples:
            if one.name == f"{name}_bucket" and one.has(labels):
                bound = float(one.labels["le"])
                buckets[bound] = buckets.get(bound, 0.0) + one.value
        return Histogram(tuple(sorted(buckets.items())), self.total(f"{name}_sum", **labels))


def scrape(url: str, key: str | None) -> Scrape:
    """The server's /metrics; empty when it has none (another server: no such page, or not in
    Prometheus' form)."""
    from prometheus_client.parser import text_string_to_metric_families

    try:
        families = list(text_string_to_metric_families(ask(url, "/metrics", key=key)))
    except (Unanswered, ValueError):
        return Scrape()
    return Scrape(
        tuple(
            _Sample(sample.name, sample.labels, sample.value)
            for family in families
            for sample in family.samples
        )
    )
