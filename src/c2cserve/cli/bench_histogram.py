"""Prometheus histograms read from outside: what a server measured between two scrapes."""

import math
from dataclasses import dataclass

from c2cserve.cli.client import Unanswered, ask


@dataclass(frozen=True, slots=True)
class Histogram:
    """Cumulative counts by upper bound, all label values added up."""

    buckets: tuple[tuple[float, float], ...]
    sum: float

    @property
    def count(self) -> float:
        return self.buckets[-1][1] if self.buckets else 0.0

    def since(self, earlier: "Histogram | None") -> "Histogram":
        if earlier is None:
            return self
        before = dict(earlier.buckets)
        return Histogram(
            tuple((bound, count - before.get(bound, 0.0)) for bound, count in self.buckets),
            self.sum - earlier.sum,
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


def scrape_histograms(url: str, prefix: str) -> dict[str, Histogram]:
    """Histograms of the server's /metrics whose name begins with `prefix`; empty when it has none
    (another server: no such page, or not in Prometheus' form)."""
    from prometheus_client.parser import text_string_to_metric_families

    try:
        families = list(text_string_to_metric_families(ask(url, "/metrics")))
    except (Unanswered, ValueError):
        return {}
    found: dict[str, Histogram] = {}
    for family in families:
        if family.type != "histogram" or not family.name.startswith(prefix):
            continue
        buckets: dict[float, float] = {}
        total = 0.0
        for sample in family.samples:
            if sample.name.endswith("_bucket"):
                bound = float(sample.labels["le"])
                buckets[bound] = buckets.get(bound, 0.0) + sample.value
            elif sample.name.endswith("_sum"):
                total += sample.value
        found[family.name] = Histogram(tuple(sorted(buckets.items())), total)
    return found
