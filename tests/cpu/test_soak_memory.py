"""What the soak takes for a leak, and what for warming up: made-up series."""

import csv
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from process_memory import OwnMemory
from soak.memory import Memory, Thirds

LOOKS, MIB = 240, 1 << 20
ALLOWED = 256


def series(grown: Callable[[float], float]) -> list[float]:
    """`grown` of the part of the phase that is over, in MiB."""
    return [1000 + grown(look / LOOKS) for look in range(LOOKS)]


def leak(of_the_phase: float) -> Callable[[float], float]:
    return lambda part: of_the_phase * part


def step(at: float, size: float) -> Callable[[float], float]:
    return lambda part: size * (part >= at)


def warming(size: float, time_constant: float) -> Callable[[float], float]:
    return lambda part: size * (1 - math.exp(-part / time_constant))


@pytest.mark.parametrize("slope", [100, 380, 390, 2000])
def test_a_linear_leak_is_caught_at_the_size_of_its_whole_growth(slope: float) -> None:
    """Between the middles of the first and the last third is two thirds of the time."""
    found = Thirds.of(series(leak(slope)))
    assert found.grow_beyond(ALLOWED) == (found.last - found.first > ALLOWED)
    assert found.grow_beyond(ALLOWED) == (slope * 2 / 3 > ALLOWED)


@pytest.mark.parametrize("grown", [warming(700, 0.2), step(0.3, 900), step(0.45, 900)])
def test_growth_that_ends_passes(grown: Callable[[float], float]) -> None:
    found = Thirds.of(series(grown))
    assert found.last - found.first > ALLOWED, "growth alone would not do"
    assert not found.grow_beyond(ALLOWED)


def test_growth_that_begins_late_does_not_pass() -> None:
    found = Thirds.of(series(lambda part: 3000 * max(0.0, part - 0.5)))
    assert found.grow_beyond(ALLOWED)


def looked(file: Path, grown: Callable[[float], float], *, judge_gpu: bool = True) -> Memory:
    """Three quarters of the looks count; a worker leaks, or does not."""
    memory = Memory(file, 0, judge_gpu=judge_gpu)
    for look in range(LOOKS):
        more = int(grown(max(0.0, look / LOOKS - 0.25) / 0.75)) * MIB
        processes = [
            OwnMemory(1, "server", 10 * MIB), OwnMemory(2, "text process", 5 * MIB),
            OwnMemory(3, "text process", 5 * MIB), OwnMemory(4, "worker/gpu0", 100 * MIB + more),
        ]  # fmt: skip
        memory.look(float(look), processes, [1000 * MIB + 16 * more])
    return memory


def test_who_grows_is_said(tmp_path: Path) -> None:
    file = tmp_path / "memory-0.csv"
    found, grown = looked(file, leak(600)).judged()
    assert [name for name, _, _ in grown] == ["own_bytes", "gpu0_bytes"]
    flat = {"first": 10 * MIB, "middle": 10 * MIB, "last": 10 * MIB}
    by_process = found["by_process"]
    assert by_process["server"] == by_process["text process"] == flat
    worker = by_process["worker/gpu0"]
    assert worker["last"] - worker["first"] == pytest.approx(400 * MIB, rel=0.02)
    with file.open() as lines:
        rows = list(csv.DictReader(lines))
    assert len(rows) == 5 * LOOKS
    assert rows[3] == {"at_s": "0.0", "pid": "4", "kind": "worker/gpu0",
                       "own_bytes": str(100 * MIB)}  # fmt: skip


def test_a_gpu_that_others_use_is_not_judged(tmp_path: Path) -> None:
    found, grown = looked(tmp_path / "memory-0.csv", leak(600), judge_gpu=False).judged()
    assert [name for name, _, _ in grown] == ["own_bytes"]
    assert found["gpu0_bytes"]["allowed"] == "not judged"


def test_warming_up_is_no_violation(tmp_path: Path) -> None:
    found, grown = looked(tmp_path / "memory-0.csv", warming(700, 0.2)).judged()
    assert grown == []
    assert found["own_bytes"]["middle"] > found["own_bytes"]["first"]


def test_few_looks_are_not_judged(tmp_path: Path) -> None:
    memory = Memory(tmp_path / "memory-0.csv", 0, judge_gpu=True)
    memory.look(0.0, [], [])
    assert memory.judged() == ({"looks": 1, "judged": "no: too few looks"}, [])
