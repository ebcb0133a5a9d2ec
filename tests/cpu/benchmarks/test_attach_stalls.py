"""The benchmark of stalls while a segment is registered, with a registrar in place of CUDA's."""

import time
from pathlib import Path

import numpy as np
from attach_stalls import LAYER_BYTES, Stall, big_segment, measure, watch

from c2cserve.kernels.gpu.host_borders import BORDER_BYTES


class Slow:
    """Takes a fixed time for each registration."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.most = self.pieces = 0

    def register(self, address: int, size: int) -> None:
        time.sleep(0.003)
        self.registered[address] = size
        self.pieces += 1
        self.most = max(self.most, sum(self.registered.values()))

    def unregister(self, address: int) -> None:
        del self.registered[address]


def test_all_phases_are_measured_and_nothing_is_left(tmp_path: Path) -> None:
    registrar = Slow()
    found = measure(
        tmp_path / "segment", 2 * LAYER_BYTES, lambda: time.sleep(1e-3), written=False,
        registrar=registrar,
    )  # fmt: skip
    assert list(found) == ["alone", "once", "pieces", "back"]
    assert all(found[name].kernels > 0 < found[name].worst_ms for name in ("alone", "pieces"))
    assert registrar.pieces > 3, "once, and then in pieces"
    assert registrar.most > 2 * LAYER_BYTES
    assert not registrar.registered
    assert not list(tmp_path.iterdir())


def test_the_longest_time_between_two_ends_counts() -> None:
    times = iter([0.0, 0.02, 0.0])
    stall = watch(lambda: time.sleep(next(times)), iter([True, True, True, False]).__next__)
    assert isinstance(stall, Stall)
    assert stall.kernels == 3
    assert 20 <= stall.worst_ms <= 1e3 * stall.took_s + 1e-6


def test_every_word_of_the_segment_has_its_own_value(tmp_path: Path) -> None:
    segment = big_segment(tmp_path / "segment", LAYER_BYTES)
    (name,) = segment.tensors
    assert np.array_equal(segment.raw(name).view(np.uint32), np.arange(LAYER_BYTES // 4))
    assert segment.bytes > BORDER_BYTES
