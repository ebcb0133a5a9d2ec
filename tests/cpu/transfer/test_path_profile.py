"""Figures of paths: how they are measured, kept, and what the server takes from them."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from c2cserve.profiling.paths import TASKS_MIB, Way, measure_paths
from c2cserve.transfer.path_profile import (
    PathProfileError,
    PathsMissing,
    load_paths,
    save_paths,
    show_paths,
)
from c2cserve.transfer.settings import RelayShape, Settings

_LINK, _HOST = 50e9, 120e9


class Rig:
    """Links of 50 GB/s each way, below host memory of 120 GB/s. A kernel of four CTAs is twice as
    fast as copies for segments up to `worth` bytes that come in, and slower for others."""

    name, size = "NVIDIA H200", 1 << 30

    def __init__(self, gpus: int, worth: int = 256 << 10, best_mib: int = 16) -> None:
        self.gpus, self._worth, self._best = gpus, worth, best_mib << 20

    def copies_s(self, moves: Sequence[tuple[int, Way]]) -> float:
        return max(1 / _LINK, len(moves) / _HOST) * self.size

    def engine_s(
        self, links: int, ways: Sequence[Way], settings: Settings, *, segment_bytes: int = 0,
        own: RelayShape | None = None,
    ) -> float:  # fmt: skip
        seconds = len(ways) * self.size / min(_HOST, links * _LINK)
        if segment_bytes == 0:
            return seconds * (1.0 if settings.task_bytes_most == self._best else 1.1)
        assert own is not None
        better = segment_bytes <= self._worth and own.ctas == 4
        shares = 0.5 if better else 1.2, 1.1
        limits = settings.kernel_in_bytes, settings.kernel_out_bytes
        return sum(
            seconds / 2 * (share if limit else 1.0)
            for share, limit in zip(shares, limits, strict=True)
        )


def test_paths_alone_and_combined() -> None:
    found = measure_paths(Rig(4), relays=True)
    assert [one.into for one in found.alone] == [pytest.approx(_LINK)] * 4
    assert found.at_once == pytest.approx((100e9, 120e9, 120e9))
    assert [one.into for one in found.combined] == pytest.approx([100e9, 120e9, 120e9])
    assert (found.kernel_in_bytes, found.kernel_out_bytes) == ((256 << 10) + 1, 0)
    assert found.kernel_ctas == 4


@pytest.mark.parametrize("best", TASKS_MIB)
def test_the_micro_task_is_the_fastest_one(best: int) -> None:
    assert measure_paths(Rig(2, best_mib=best), relays=True).task_bytes_most == best << 20


def test_one_gpu_or_no_relays_have_nothing_combined() -> None:
    for found in (measure_paths(Rig(1), relays=True), measure_paths(Rig(2), relays=False)):
        assert found.combined == ()
        assert found.relayed_bytes_per_s(1) == 0.0


def test_a_kernel_that_is_no_faster_carries_nothing() -> None:
    found = measure_paths(Rig(1, worth=0), relays=False)
    assert found.kernel_in_bytes == found.kernel_out_bytes == 0
    assert "copy engines carry segments of all sizes" in show_paths(found)


def test_neighbours_add_what_was_measured_of_them() -> None:
    """Host memory limits three links, and what was not measured adds nothing."""
    found = measure_paths(Rig(3), relays=True)
    added = [found.relayed_bytes_per_s(count) for count in (0, 1, 2, 5)]
    assert added == pytest.approx([0.0, 50e9, 70e9, 70e9])


def test_a_server_takes_sizes_but_no_larger_micro_tasks() -> None:
    serving = replace(Settings(), alone_bytes=16 << 20)
    large = measure_paths(Rig(2, best_mib=32), relays=True).tuned(serving)
    assert large == replace(serving, kernel_in_bytes=(256 << 10) + 1)
    small = measure_paths(Rig(2, best_mib=8), relays=True).tuned(serving)
    assert small.task_bytes_most == 8 << 20
    found = measure_paths(Rig(2), relays=True)
    tiny = msgspec.structs.replace(found, task_bytes_most=1 << 20).tuned(serving)
    assert tiny.task_bytes == tiny.task_bytes_most == 1 << 20


def test_a_file_is_of_one_gpu_and_version(tmp_path: Path) -> None:
    path, found = tmp_path / "folder" / "paths.json", measure_paths(Rig(2), relays=True)
    with pytest.raises(PathsMissing, match="were not measured"):
        load_paths(Rig.name, path)
    save_paths(found, path)
    assert load_paths(Rig.name, path) == found
    with pytest.raises(PathProfileError, match="of NVIDIA H200, this is 1 of NVIDIA H100"):
        load_paths("NVIDIA H100", path)
    path.write_text(path.read_text().replace("kernel_ctas", "kernel_threads"))
    with pytest.raises(PathProfileError, match="kernel_threads"):
        load_paths(Rig.name, path)
