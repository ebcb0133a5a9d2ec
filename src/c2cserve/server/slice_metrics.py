"""The metrics of slices: the rows of `SliceStats`, and what the controller knows beside them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from c2cserve.runtime.gateway import SliceStatus, Snapshot
from c2cserve.runtime.slice_stats import STATS, Kind


@dataclass(frozen=True, slots=True)
class _MetricRow:
    metric: str
    kind: Kind
    help: str
    value: Callable[[SliceStatus], float]


_OF_CONTROLLER = (
    _MetricRow(
        "c2cserve:slice_up", "gauge", "1 while its worker is up.", lambda s: s.state == "up"
    ),
    _MetricRow(
        "c2cserve:slice_busy_share", "gauge", "Share of the last seconds spent in steps.",
        lambda s: s.busy_share,
    ),
    _MetricRow("c2cserve:slice_kv_total_bytes", "gauge", "KV arena.", lambda s: s.kv_total_bytes),
    _MetricRow(
        "vllm:kv_cache_usage_perc", "gauge", "KV cache in use, 1 is full.",
        lambda s: s.kv_used_bytes / max(1, s.kv_total_bytes),
    ),
    _MetricRow(
        "c2cserve:slice_active_models", "gauge", "Models active on it.",
        lambda s: len(s.active_models),
    ),
    _MetricRow(
        "c2cserve:slice_failed_models", "gauge", "Models given up on it.",
        lambda s: len(s.failed_models),
    ),
    _MetricRow(
        "c2cserve:slice_stalled_seconds", "gauge",
        "How long it has had requests without a step being done.", lambda s: s.stalled_s,
    ),
    _MetricRow(
        "c2cserve:slice_trouble", "gauge", "1 while its requests do not get on.",
        lambda s: bool(s.trouble),
    ),
    _MetricRow("c2cserve:slice_restarts", "counter", "Workers replaced.", lambda s: s.restarts),
)  # fmt: skip


def slice_metrics(snapshot: Snapshot) -> Iterator[Metric]:
    """Yield one family per metric, with a sample per slice."""
    for row in _OF_CONTROLLER:
        yield _family(snapshot, row.metric, row.kind, row.help, row.value)
    for stat in STATS:
        yield _family(snapshot, stat.metric, stat.kind, stat.help, attrgetter(stat.name))


def _family(
    snapshot: Snapshot, metric: str, kind: Kind, help_: str, value: Callable[[SliceStatus], float]
) -> Metric:
    family = (GaugeMetricFamily if kind == "gauge" else CounterMetricFamily)(
        metric, help_, labels=["slice"]
    )
    for one in snapshot.slices:
        family.add_metric([one.id], float(value(one)))
    return family
