"""`benchmarks/copy_shares.py` tells the rules apart by the waits that each would cause."""

import copy_shares
import pytest
from copy_shares import MIB, WAITS, Load, Wait, judge, shares_by_rule

RATE = 55e9


def waits(rule: str) -> list[Wait]:
    """What the rule causes, a tenth too long, and with the half of a copy that was under way."""
    found: list[Wait] = []
    for load in WAITS:
        queued_s = load.size * load.depth / RATE
        seconds = {
            "fifo": queued_s, "round robin": min(load.size, 8 * MIB) / RATE,
            "time slices": min(queued_s, 2e-3), "side by side": 5e-6,
        }[rule]  # fmt: skip
        found.append(Wait(load, 1.1 * seconds + 10e-6))
    return found


@pytest.mark.parametrize("rule", ["fifo", "round robin", "time slices", "side by side"])
def test_the_rule_that_caused_the_waits_is_found(rule: str) -> None:
    verdict = judge(waits(rule), RATE)
    assert verdict["verdict"] == rule
    others = [value for name, value in verdict["off_by"].items() if name != rule]
    assert verdict["off_by"][rule] < 1.3 < min(others)


def test_the_quantum_and_the_slice_are_found() -> None:
    assert judge(waits("round robin"), RATE)["quantum_bytes"] == 8 * MIB
    assert judge(waits("time slices"), RATE)["slice_s"] == pytest.approx(2e-3, rel=0.5)


def test_shares_of_the_rules() -> None:
    own, other = Load(64 * MIB, 1), Load(8 * MIB, 8)
    shares = shares_by_rule(own, other, quantum=8 * MIB)
    assert shares["fifo"] == shares["round robin"] == 0.5
    assert shares_by_rule(own, other, quantum=1 << 31)["round robin"] == pytest.approx(8 / 9)
    assert shares_by_rule(own, Load(8 * MIB, 2, streams=3), 8 * MIB)["side by side"] == 0.25


def test_it_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["copy_shares.py"])
    with pytest.raises(SystemExit, match="needs a GPU"):
        copy_shares.main()
