"""`/metrics`. A metric that vLLM has too has vLLM's name, so existing dashboards work. The others
begin with `c2cserve:`."""

import asyncio
from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from c2cserve.core.model import ModelState, name_of
from c2cserve.runtime.gateway import Gateway, Snapshot
from c2cserve.server.access.gate import Gate
from c2cserve.server.access.metrics import KeyMetrics
from c2cserve.server.choices import ChoiceStream
from c2cserve.server.connections import Connections
from c2cserve.server.exposition.series import Counters, Histograms
from c2cserve.server.slice_metrics import slice_metrics
from c2cserve.server.text.pool import TextPool

_LATENCY = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120,
)  # fmt: skip
_SWITCH = (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.05, 0.25, 1)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)

_HISTOGRAMS = (
    ("vllm:time_to_first_token_seconds", "Time to first token.", _LATENCY),
    ("vllm:inter_token_latency_seconds", "Between outputs of a request.", _LATENCY),
    ("vllm:time_per_output_token_seconds", "The same by its older name.", _LATENCY),
    (
        "vllm:request_time_per_output_token_seconds",
        "Mean time per output token after the first, per request.",
        _LATENCY,
    ),
    ("vllm:e2e_request_latency_seconds", "End to end request latency.", _LATENCY),
    ("vllm:request_queue_time_seconds", "Arrival at the slice to first step.", _LATENCY),
    ("vllm:request_prefill_time_seconds", "Computing the prompt.", _LATENCY),
    ("vllm:request_prompt_tokens", "Prompt tokens per request.", _TOKENS),
    ("vllm:request_generation_tokens", "Output tokens per request.", _TOKENS),
    ("c2cserve:switch_seconds", "Picking a request's model to its first kernel.", _SWITCH),
    ("c2cserve:weight_wait_seconds", "Waiting for weights that were still loading.", _LATENCY),
)
_COUNTERS = (
    ("vllm:prompt_tokens", "Prompt tokens processed."),
    ("vllm:generation_tokens", "Output tokens generated."),
    ("vllm:request_success", "Requests ended: stop, length, abort, error.", "finished_reason"),
    ("vllm:prefix_cache_queries", "Prompt tokens looked up."),
    ("vllm:prefix_cache_hits", "Prompt tokens found in the cache."),
    ("c2cserve:slo", "Requests by whether they met their SLOs.", "met"),
)


_VALUES = {"finished_reason": ("stop", "length", "abort", "error"), "met": ("true", "false")}
"""Labels beside the model -> their possible values."""


_LINES_AT_ONCE = 200
"""Lines that are written before other work of the event loop goes on: some 0.2 ms."""


class Metrics:
    """The metrics of one app, in a registry of their own: two apps in a process stay apart."""

    def __init__(
        self, gateway: Gateway, texts: TextPool | None = None,
        connections: Connections | None = None, gate: Gate | None = None,
    ) -> None:  # fmt: skip
        self._gateway = gateway
        self.registry = CollectorRegistry()
        self.registry.register(SnapshotCollector(gateway))
        self.registry.register(_FrontEndCollector(texts, connections))
        if gate is not None:
            self.registry.register(KeyMetrics(gate))
        self._histograms = {
            name: Histograms(name, help_, buckets) for name, help_, buckets in _HISTOGRAMS
        }
        self._counters = {name: Counters(name, help_, *label) for name, help_, *label in _COUNTERS}
        self._http = Counter(
            "c2cserve:http_responses", "Responses by route and status.", ["route", "status"],
            registry=self.registry,
        )  # fmt: skip
        self._routes: dict[tuple[str, int], Counter] = {}
        """The series of routes, by status."""

    def _observe(self, name: str, model: str, *values: float) -> None:
        self._histograms[name].observe(model, *values)

    def _count(self, name: str, value: float, *labels: str) -> None:
        self._counters[name].add(value, *labels)

    def ended(self, choice: ChoiceStream, now: float) -> None:
        """Count a choice that has ended in any way. Refused ones are counted by status alone."""
        if choice.finish == "refused":
            return
        request = choice.job.request
        model = name_of(request.model)
        self._count("vllm:request_success", 1, model, choice.finish)
        self._count("vllm:generation_tokens", choice.output_tokens, model)
        self._observe("vllm:e2e_request_latency_seconds", model, now - request.arrival_s)
        self._observe("vllm:request_generation_tokens", model, choice.output_tokens)
        self._observe("vllm:request_prompt_tokens", model, request.prompt_len)
        if choice.first_s is None or choice.timing is None or choice.last_s is None:
            return
        ttft_s = choice.first_s - request.arrival_s
        self._observe("vllm:time_to_first_token_seconds", model, ttft_s)
        tpot_s = 0.0
        if choice.output_tokens > 1:
            tpot_s = (choice.last_s - choice.first_s) / (choice.output_tokens - 1)
            self._observe("vllm:request_time_per_output_token_seconds", model, tpot_s)
        self._observe("vllm:inter_token_latency_seconds", model, *choice.gaps_s)
        self._observe("vllm:time_per_output_token_seconds", model, *choice.gaps_s)
        met = ttft_s <= request.slo.ttft_s and tpot_s <= request.slo.tpot_s
        self._count("c2cserve:slo", 1, model, "true" if met else "false")
        self._count("vllm:prompt_tokens", request.prompt_len, model)
        self._count("vllm:prefix_cache_queries", request.prompt_len, model)
        self._count("vllm:prefix_cache_hits", choice.cached_tokens, model)
        timing = choice.timing
        self._observe("vllm:request_queue_time_seconds", model, timing.queue_s)
        self._observe("vllm:request_prefill_time_seconds", model, timing.prefill_s)
        if timing.switched:
            self._observe("c2cserve:switch_seconds", model, timing.switch_s)
        if timing.wait_weights_s:
            self._observe("c2cserve:weight_wait_seconds", model, timing.wait_weights_s)

    def responded(self, route: str, status: int) -> None:
        child = self._routes.get((route, status))
        if child is None:
            child = self._routes[route, status] = self._http.labels(route, str(status))
        child.inc()

    def add_routes(self, routes: Iterable[str]) -> None:
        """Create the counters of these routes, at 0, before the first answer."""
        for route in routes:
            self._http.labels(route, "200")

    def _add_models(self, models: Iterable[str]) -> None:
        """Create the counters of every model, at 0: a rate misses a counter's first appearance."""
        for name, _, *labels in _COUNTERS:
            values = [[value] for value in _VALUES[labels[0]]] if labels else [[]]
            for model in models:
                for value in values:
                    self._counters[name].begin(model, *value)

    async def render(self) -> bytes:
        """Return all metrics. What else the event loop has to do goes on meanwhile: a catalogue of
        hundreds of models has tens of thousands of lines."""
        models = {model.id for model in self._gateway.models()}
        self._forget_others(models)
        self._add_models(models)
        parts: list[str] = []
        lines = 0
        for text in self._write(list(self.registry.collect())):
            parts.append(text)
            lines += text.count("\n")
            if lines >= _LINES_AT_ONCE:
                lines = 0
                await asyncio.sleep(0)
        return "".join(parts).encode()

    def _forget_others(self, models: set[str]) -> None:
        """Drop the series of models that were removed; also of those whose last requests ended
        after that."""
        for series in (*self._histograms.values(), *self._counters.values()):
            series.keep(models)

    def _write(self, families: Iterable[Metric]) -> Iterator[str]:
        for family in families:
            yield generate_latest(_Only(family)).decode()
        for series in (*self._histograms.values(), *self._counters.values()):
            yield from series.write()


class _Only(CollectorRegistry):
    """A registry of one family."""

    def __init__(self, family: Metric) -> None:
        super().__init__()
        self._family = family

    def collect(self) -> Iterator[Metric]:
        yield self._family


class SnapshotCollector(Collector):
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        snapshot = self._gateway.snapshot()
        yield from _models(snapshot)
        yield from slice_metrics(snapshot)
        yield _gauge(
            "c2cserve:pool_used_bytes", "Host weight pool in use.", snapshot.pool_used_bytes
        )
        yield _gauge("c2cserve:pool_budget_bytes", "Its budget.", snapshot.pool_budget_bytes)
        yield _gauge("c2cserve:tenants", "Tenants with requests.", len(snapshot.tenants))
        yield _gauge(
            "c2cserve:largest_tenant_requests", "Requests of the tenant that has most.",
            max(snapshot.tenants, default=0),
        )  # fmt: skip
        yield _gauge("c2cserve:draining", "1 while shutting down.", float(snapshot.draining))
        named = GaugeMetricFamily("c2cserve:policy_info", "Which policy runs.", labels=["policy"])
        named.add_metric([snapshot.policy], 1)
        yield named
        yield from _nodes(snapshot)
        for name, value in sorted(snapshot.counters.items()):
            metric = CounterMetricFamily(f"c2cserve:{name}", "Events of this kind since the start.")
            metric.add_metric([], value)
            yield metric


def _nodes(snapshot: Snapshot) -> Iterator[Metric]:
    """What a front knows of its cluster: nothing on a single machine."""
    if snapshot.members_age_s is not None:
        yield _gauge(
            "c2cserve:members_age_seconds", "Since Ray said who is a member.",
            snapshot.members_age_s,
        )  # fmt: skip
    if not snapshot.nodes:
        return
    up = GaugeMetricFamily(
        "c2cserve:node_up", "1 while a front is connected to the node.", labels=["node"]
    )
    for name, state in sorted(snapshot.nodes.items()):
        up.add_metric([name], float(state in ("up", "draining")))
    yield up
    for field, text in _OF_NODE.items():
        metric = GaugeMetricFamily(f"c2cserve:node_{field}", text, labels=["node"])
        for name, use in sorted(snapshot.node_use.items()):
            metric.add_metric([name], float(getattr(use, field)))
        yield metric


_OF_NODE = {
    "running": "Requests that run on the node, of all fronts.",
    "waiting": "Requests that wait there, of all fronts.",
    "models": "Models in its pool.",
    "pool_used_bytes": "Its pool in use.",
    "pool_budget_bytes": "Its pool's budget.",
}


class _FrontEndCollector(Collector):
    """The metrics of the parts before the gateway: connections and text processes."""

    def __init__(self, texts: TextPool | None, connections: Connections | None) -> None:
        self._texts = texts
        self._connections = connections

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        if self._connections is not None:
            yield _gauge("c2cserve:http_connections", "Open.", self._connections.open)
            yield _reasons(
                "c2cserve:http_connections_closed", "Closed by the server, by why.",
                self._connections.closed,
            )  # fmt: skip
        if self._texts is not None:
            yield _gauge(
                "c2cserve:text_waiting", "Requests waiting for a text process.", self._texts.waiting
            )
            yield _gauge(
                "c2cserve:text_processes", "Text processes that run.", len(self._texts.pids)
            )
            yield _reasons(
                "c2cserve:text_processes_replaced", "Text processes replaced, by why.",
                self._texts.killed,
            )  # fmt: skip


def _reasons(name: str, help_: str, counts: Mapping[str, int]) -> CounterMetricFamily:
    metric = CounterMetricFamily(name, help_, labels=["reason"])
    for reason, count in counts.items():
        metric.add_metric([reason], count)
    return metric


def _gauge(name: str, help_: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, help_, value=value)


def _models(snapshot: Snapshot) -> Iterator[Metric]:
    running = GaugeMetricFamily(
        "vllm:num_requests_running", "Requests on slices.", labels=["model_name"]
    )
    waiting = GaugeMetricFamily(
        "vllm:num_requests_waiting", "Requests not yet on a slice.", labels=["model_name"]
    )
    state = GaugeMetricFamily(
        "c2cserve:model_state", "1 for the state the model is in.", labels=["model_name", "state"]
    )
    size = GaugeMetricFamily(
        "c2cserve:model_loaded_bytes", "Weights in the pool.", labels=["model_name"]
    )
    for model in snapshot.models:
        running.add_metric([model.id], model.running)
        waiting.add_metric([model.id], model.waiting)
        size.add_metric([model.id], model.loaded_bytes)
        for one in ModelState:
            state.add_metric([model.id, one.value], float(model.state is one))
    yield from (running, waiting, state, size)
