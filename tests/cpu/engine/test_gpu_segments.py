"""Segments that GPU slices share: one registration each, given back when nobody reads any more."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from lane import LateModel
from tiny import make_checkpoint

from c2cserve.engine.gpu.segments import PinnedSegments
from c2cserve.memory.peer_pool import Lendable
from c2cserve.memory.pinning import PinningError


class Regions:
    """Stands in for CUDA."""

    def __init__(self) -> None:
        self.open: list[tuple[int, int]] = []

    def __call__(self, data: Any) -> "Regions._Region":
        return Regions._Region(self, (data.ctypes.data, data.nbytes))

    class _Region:
        def __init__(self, owner: "Regions", place: tuple[int, int]) -> None:
            self._owner, self._place = owner, place
            owner.open.append(place)

        def close(self) -> None:
            self._owner.open.remove(self._place)


def test_all_of_a_segment_is_registered_once_and_given_back_after_its_last_user(
    tmp_path: Path,
) -> None:
    make_checkpoint(tmp_path, "llama")
    path = LateModel(tmp_path).path
    regions = Regions()
    segments = PinnedSegments(regions)
    first, second = segments.open(path), segments.open(path)
    assert first is second
    assert regions.open == [(first.data.ctypes.data, path.stat().st_size)]
    segments.close(path)
    assert regions.open
    segments.close(path)
    assert not regions.open
    assert segments.open(path) is not first


class Peers:
    """Stands in for `memory.peer_pool.PeerPool`."""

    def __init__(self, regions: Regions) -> None:
        self._regions = regions
        self.models: dict[str, Lendable] = {}

    def add(self, model: str, weights: Lendable) -> None:
        self.models[model] = weights

    def remove(self, model: str) -> None:
        assert self._regions.open, "copies end before the registration does"
        del self.models[model]


@pytest.mark.parametrize(("case", "tied"), [("llama", False), ("qwen3-tied", True)])
def test_what_gemms_read_of_a_segment_is_offered_to_neighbours_once(
    tmp_path: Path, case: str, tied: bool
) -> None:
    make_checkpoint(tmp_path, case)
    late = LateModel(tmp_path).load_all()
    assert late.config.tied == tied
    regions = Regions()
    peers = Peers(regions)
    segments = PinnedSegments(regions, cast(Any, peers))
    segment = segments.open(late.path)
    assert segments.open(late.path) is segment
    (offered,) = peers.models.values()
    assert offered.complete()
    for name, place in segment.tensors.items():
        inside = [a <= place.offset < b for a, b in offered.pieces]
        assert sum(inside) == (tied or name != "embed"), name
    assert offered.pieces == tuple(sorted(offered.pieces))
    segments.close(late.path)
    assert peers.models
    segments.close(late.path)
    assert not peers.models


def test_memory_that_cuda_refuses_makes_the_model_unusable_here(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    path = LateModel(tmp_path).path

    def refuse(data: Any) -> Any:
        raise PinningError("cudaHostRegister of 5 bytes: cudaErrorMemoryAllocation")

    with pytest.raises(OSError, match=r"segment.*cudaErrorMemoryAllocation"):
        PinnedSegments(refuse).open(path)
    with pytest.raises(OSError, match="No such file"):
        PinnedSegments(refuse).open(tmp_path / "none")


def test_users_of_other_processes_hold_a_segment_and_nothing_learns_of_them(
    tmp_path: Path,
) -> None:
    """Two workers that lend each other their links give a segment back all the same."""
    make_checkpoint(tmp_path, "llama")
    path = LateModel(tmp_path).path
    told: list[str] = []
    watcher = SimpleNamespace(
        opened=lambda path, address, size: told.append(f"opened {Path(path).name} {size}"),
        closed=lambda path: told.append(f"closed {Path(path).name}"),
    )
    regions = Regions()
    segments = PinnedSegments(regions, watcher=watcher)
    first = segments.open(path, lent=True)
    assert told == []
    assert segments.open(path) is segments.open(path) is first
    assert told == [f"opened {path.name} {first.data.nbytes}"]
    segments.close(path)
    segments.close(path)
    assert told[1:] == [f"closed {path.name}"]
    assert regions.open, "another process still reads it"
    segments.close(path, lent=True)
    assert not regions.open
    assert len(told) == 2
