"""Keys in `/metrics`. The label `key` has the names of the keys that the server knows."""

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from c2cserve.server.access.gate import Gate
from c2cserve.server.access.quota import LIMITS
from c2cserve.server.access.usage import FIELDS, Used

_HELP = {
    "requests": "Requests that reached a slice.",
    "prompt_tokens": "Prompt tokens, once per prompt.",
    "cached_tokens": "Of these, tokens found in the prefix cache.",
    "output_tokens": "Output tokens.",
}


class KeyMetrics(Collector):
    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        gate = self._gate
        reloads = CounterMetricFamily(
            "c2cserve:keys_reloads", "Times the keys file was read again.", labels=["result"]
        )
        for result, count in gate.reloads.items():
            reloads.add_metric([result], count)
        yield reloads
        yield GaugeMetricFamily(
            "c2cserve:keys_file_broken", "1 while the keys file on disk cannot be used.",
            value=float(bool(gate.broken)),
        )  # fmt: skip
        lost = 0 if gate.log is None else gate.log.lost
        yield CounterMetricFamily(
            "c2cserve:usage_lines_lost", "Lines that the usage log could not take.", value=lost
        )
        yield from self._keys()

    def _keys(self) -> Iterator[Metric]:
        """A key that left the file keeps its counters until the server ends."""
        gate, used = self._gate, self._gate.usage.by_key()
        present = gate.keyring.present()
        names = list(dict.fromkeys([*(key.name for key in present), *(n for n in used if n)]))
        for field in FIELDS:
            family = CounterMetricFamily(f"c2cserve:key_{field}", _HELP[field], labels=["key"])
            for name in names:
                family.add_metric([name], getattr(used.get(name, Used()), field))
            yield family
        refused = CounterMetricFamily(
            "c2cserve:key_refused", "Requests refused by a limit of the key.",
            labels=["key", "limit"],
        )  # fmt: skip
        for name in names:
            for limit in LIMITS:
                refused.add_metric([name, limit], gate.usage.refused[name, limit])
        yield refused
        running = GaugeMetricFamily(
            "c2cserve:key_running", "Choices under way.", labels=["key"]
        )  # fmt: skip
        for key in present:
            running.add_metric([key.name], key.quota.running)
        yield running
