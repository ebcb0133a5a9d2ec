"""Keys in `/metrics`: complete for some keys, and bounded for many."""

from datetime import UTC, datetime
from pathlib import Path

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from c2cserve.server.access.gate import Gate
from c2cserve.server.access.keyfile import KeyRecord, KeysFile
from c2cserve.server.access.metrics import KEYS_MAX, KeyMetrics
from c2cserve.server.access.usage import Used

MANY = 10_000


def gate_of(directory: Path, count: int) -> Gate:
    now = datetime.now(UTC)
    records = tuple(
        KeyRecord(id=f"{i:012x}", name=f"u{i}", salt="0" * 32, sha256="0" * 64, created=now)
        for i in range(count)
    )
    path = directory / "keys.json"
    path.write_bytes(msgspec.json.encode(KeysFile(1, records)))
    path.chmod(0o600)
    return Gate((), path)


class Scrapes:
    def __init__(self, gate: Gate) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(KeyMetrics(gate))

    def samples(self, name: str) -> dict[str, float]:
        """Summed by key."""
        sums: dict[str, float] = {}
        text = generate_latest(self._registry).decode()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == f"c2cserve:{name}":
                    key = sample.labels["key"]
                    sums[key] = sums.get(key, 0) + sample.value
        return sums

    def lines(self) -> int:
        return generate_latest(self._registry).count(b"\n")


def test_few_keys_begin_at_zero(tmp_path: Path) -> None:
    scrapes = Scrapes(gate_of(tmp_path, 3))
    for name in ("key_requests_total", "key_refused_total", "key_running"):
        assert scrapes.samples(name) == {"u0": 0, "u1": 0, "u2": 0}


def test_a_scrape_is_bounded_however_many_keys_there_are(tmp_path: Path) -> None:
    """It is rendered on the event loop: all streams wait for it."""
    gate = gate_of(tmp_path, MANY)
    scrapes = Scrapes(gate)
    assert scrapes.lines() < 100, "keys that were not used"
    for i in range(MANY):
        gate.usage.add(f"u{i}", "tenant", "model", Used(requests=2))
        gate.usage.refused[f"u{i}", "models"] += 1
    assert scrapes.lines() < 14 * KEYS_MAX
    assert sum(scrapes.samples("key_requests_total").values()) == 2 * MANY
    assert sum(scrapes.samples("key_refused_total").values()) == MANY


def test_keys_that_are_shown_stay_and_the_others_have_a_sum(tmp_path: Path) -> None:
    gate = gate_of(tmp_path, MANY)
    scrapes = Scrapes(gate)
    gate.usage.refused["u7", "models"] += 1
    assert scrapes.samples("key_refused_total") == {"u7": 1, "_others": 0}
    for i in reversed(range(MANY)):
        gate.usage.add(f"u{i}", "tenant", "model", Used(requests=1))
    gate.keyring.present()[3].quota.running = 4
    shown = scrapes.samples("key_requests_total")
    assert shown["u7"] == 1
    assert shown["_others"] == MANY - KEYS_MAX
    assert len(shown) == KEYS_MAX + 1
    assert scrapes.samples("key_running")["_others"] == 4


def test_a_key_that_was_refused_and_left_keeps_its_counter(tmp_path: Path) -> None:
    gate = gate_of(tmp_path, 2)
    gate.usage.refused["u1", "models"] += 1
    gate.keyring.replace(())
    assert Scrapes(gate).samples("key_refused_total") == {"u1": 1}
