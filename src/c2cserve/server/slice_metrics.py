"""What `/metrics` shows of slices, and how each is read off a slice's status."""

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from c2cserve.runtime.gateway import SliceStatus, Snapshot

_Table = dict[str, tuple[str, Callable[[SliceStatus], float]]]

_SLICE_GAUGES: _Table = {
    "up": ("1 while its worker is up.", lambda s: float(s.state == "up")),
    "busy_share": ("Share of the last seconds spent in steps.", lambda s: s.busy_share),
    "running": ("Requests started.", lambda s: s.running),
    "waiting": ("Requests queued at the slice.", lambda s: s.waiting),
    "kv_used_bytes": ("KV cache held by requests.", lambda s: s.kv_used_bytes),
    "kv_total_bytes": ("KV arena.", lambda s: s.kv_total_bytes),
    "weights_kept_bytes": (
        "Weights kept in what KV leaves of the arena.",
        lambda s: s.weights_kept_bytes,
    ),
    "weights_lent_bytes": (
        "Weights in memory that neighbouring GPUs lend to the slice's GPU.",
        lambda s: s.weights_lent_bytes,
    ),
    "kv_host_bytes": (
        "KV in host memory, of requests that are paused or may be.",
        lambda s: s.kv_host_bytes,
    ),
    "failed_models": ("Models given up on it.", lambda s: len(s.failed_models)),
    "stalled_seconds": (
        "How long it has had requests without a step being done.",
        lambda s: s.stalled_s,
    ),
    "trouble": ("1 while its requests do not get on.", lambda s: float(bool(s.trouble))),
    "active_models": ("Models active on it.", lambda s: len(s.active_models)),
}
_SLICE_COUNTERS: _Table = {
    "steps": ("Steps run.", lambda s: s.steps),
    "switches": ("Steps that ran another model than the step before.", lambda s: s.switches),
    "prompt_tokens": ("Prompt tokens received.", lambda s: s.prompt_tokens),
    "output_tokens": ("Tokens drawn.", lambda s: s.output_tokens),
    "cached_tokens": ("Prompt tokens reused.", lambda s: s.cached_tokens),
    "weights_hit_bytes": (
        "Bytes of weights that steps read in HBM.",
        lambda s: s.weights_hit_bytes,
    ),
    "weights_streamed_bytes": (
        "Bytes of weights that steps read over the link.",
        lambda s: s.weights_streamed_bytes,
    ),
    "weights_peer_bytes": (
        "Of those, from memory that neighbouring GPUs lend.",
        lambda s: s.weights_peer_bytes,
    ),
    "graph_steps": ("Steps launched as one CUDA graph.", lambda s: s.graph_steps),
    "graph_captures": ("CUDA graphs captured.", lambda s: s.graph_captures),
    "graph_capture_failures": (
        "Captures that failed: such steps are launched kernel by kernel.",
        lambda s: s.graph_capture_failures,
    ),
    "graphs_dropped": (
        "CUDA graphs dropped for newer ones, or because weights moved.",
        lambda s: s.graphs_dropped,
    ),
    "flash_steps": ("Long steps with FlashInfer's attention.", lambda s: s.flash_steps),
    "flash_missed_steps": ("Those it has no module for.", lambda s: s.flash_missed_steps),
    "kv_out_bytes": ("Bytes of KV copied to host memory.", lambda s: s.kv_out_bytes),
    "kv_in_bytes": ("Bytes of KV copied back.", lambda s: s.kv_in_bytes),
    "step_failures": ("Steps that ended with an exception.", lambda s: s.step_failures),
    "step_retries": ("Requests of failed steps that ran again.", lambda s: s.step_retries),
    "retries_failed": ("Those that failed again, alone.", lambda s: s.retries_failed),
    "parts_rebuilt": (
        "How often GPU state was built anew after a failed step.",
        lambda s: s.parts_rebuilt,
    ),
    "restarts": ("Workers replaced.", lambda s: s.restarts),
}


def slice_metrics(snapshot: Snapshot) -> Iterator[Metric]:
    for name, (help_, value) in _SLICE_GAUGES.items():
        gauge = GaugeMetricFamily(f"c2cserve:slice_{name}", help_, labels=["slice"])
        for one in snapshot.slices:
            gauge.add_metric([one.id], value(one))
        yield gauge
    for name, (help_, value) in _SLICE_COUNTERS.items():
        counter = CounterMetricFamily(f"c2cserve:slice_{name}", help_, labels=["slice"])
        for one in snapshot.slices:
            counter.add_metric([one.id], value(one))
        yield counter
    usage = GaugeMetricFamily(
        "vllm:kv_cache_usage_perc", "KV cache in use, 1 is full.", labels=["slice"]
    )
    preemptions = CounterMetricFamily(
        "vllm:num_preemptions", "Requests preempted for memory.", labels=["slice"]
    )
    for one in snapshot.slices:
        usage.add_metric([one.id], one.kv_used_bytes / max(1, one.kv_total_bytes))
        preemptions.add_metric([one.id], one.preemptions)
    yield from (usage, preemptions)
