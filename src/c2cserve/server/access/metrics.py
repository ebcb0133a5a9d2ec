"""Keys in `/metrics`. The label `key` has the names of the keys that the server knows."""

from collections.abc import Iterable, Iterator, Mapping

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

KEYS_MAX = 500
"""Keys with samples of their own. A scrape is rendered between two steps of the event loop: with
10,000 keys it would hold every stream up for a second."""
_OTHERS = "_others"
"""The label of all keys beyond these. No key can have this name."""


class KeyMetrics(Collector):
    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._shown: dict[str, None] = {}
        """Keys that have been active. Their counters stay, as counters should."""

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
        names = self._names(used)
        for field in FIELDS:
            totals = dict.fromkeys(names, 0)
            for name, value in used.items():
                if name:
                    totals[_label(name, names)] += getattr(value, field)
            family = CounterMetricFamily(f"c2cserve:key_{field}", _HELP[field], labels=["key"])
            for name, total in totals.items():
                family.add_metric([name], total)
            yield family
        yield self._refused(names)
        running = GaugeMetricFamily("c2cserve:key_running", "Choices under way.", labels=["key"])
        under_way = dict.fromkeys(names, 0)
        for key in gate.keyring.present():
            under_way[_label(key.name, names)] += key.quota.running
        for name, count in under_way.items():
            running.add_metric([name], count)
        yield running

    def _refused(self, names: Mapping[str, None]) -> Metric:
        refused = {(name, limit): 0 for name in names for limit in LIMITS}
        for (name, limit), count in self._gate.usage.refused.items():
            if name:
                refused[_label(name, names), limit] += count
        family = CounterMetricFamily(
            "c2cserve:key_refused", "Requests refused by a limit of the key.",
            labels=["key", "limit"],
        )  # fmt: skip
        for labels, count in refused.items():
            family.add_metric(labels, count)
        return family

    def _names(self, used: Mapping[str, Used]) -> dict[str, None]:
        """The values of the label `key`: all keys, or of many keys those that were active first."""
        refused = (name for name, _ in self._gate.usage.refused)
        active = dict.fromkeys(name for name in (*used, *refused) if name)
        room = KEYS_MAX - len(self._shown)
        new = [name for name in active if name not in self._shown]
        self._shown |= dict.fromkeys(new[:room])
        present = (key.name for key in self._gate.keyring.present())
        names = self._shown | active | dict.fromkeys(present)
        return names if len(names) <= KEYS_MAX else {**self._shown, _OTHERS: None}


def _label(name: str, names: Mapping[str, None]) -> str:
    return name if name in names else _OTHERS
