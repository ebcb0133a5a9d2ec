"""Blocks of cached prefixes on the host: what comes back is what was saved, in pieces or not."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from c2cserve.core.actions import BringPrefix, DropPrefix, Move, SavePrefix
from c2cserve.core.events import PrefixMoved
from c2cserve.engine.prefixes import PrefixBlocks
from c2cserve.engine.rotation import HostKv, copies_at_once
from c2cserve.memory.extents import Extents, cut

PLACES, PLACE = 64, 96
HOST = 40 * PLACE


def on_host(arena: torch.Tensor, clock: float = 0.0) -> PrefixBlocks:
    copier = copies_at_once(arena, torch.zeros(HOST, dtype=torch.uint8))
    return PrefixBlocks(Extents(HOST), copier, lambda: clock)


@given(st.data())
def test_blocks_come_back_as_they_were(data: st.DataObject) -> None:
    """Blocks of three sizes come and go, so that the host's memory is in pieces."""
    arena = torch.randint(0, 256, (PLACES * PLACE,), dtype=torch.uint8)
    host = on_host(arena)
    contents: dict[int, tuple[int, bytes]] = {}
    for number in range(data.draw(st.integers(1, 20))):
        size = data.draw(st.sampled_from([PLACE, PLACE // 2, PLACE // 3]))
        count = data.draw(st.integers(1, 8))
        places = data.draw(st.permutations(range(PLACES)))[:count]
        offsets = tuple(place * PLACE for place in places)
        same = [one for one, (of_size, _) in contents.items() if of_size == size][:count]
        if same and data.draw(st.booleans()):
            host.submit(BringPrefix(number, size, tuple(same), offsets[: len(same)]))
            for one, at in zip(same, offsets, strict=False):
                assert arena[at : at + size].numpy().tobytes() == contents[one][1]
        elif size * count <= host.extents.free_bytes:
            ids = tuple(100 * number + i for i in range(count))
            host.submit(SavePrefix(number, size, ids, offsets))
            for one, at in zip(ids, offsets, strict=True):
                contents[one] = (size, arena[at : at + size].numpy().tobytes())
        else:
            gone = tuple(data.draw(st.permutations(sorted(contents))))[:count]
            host.submit(DropPrefix(gone))
            for one in gone:
                del contents[one]
            continue
        assert host.finished() == [PrefixMoved(number, 0.0)]
        assert host.used_bytes == sum(of_size for of_size, _ in contents.values())
        assert host.used_bytes == HOST - host.extents.free_bytes
        arena.random_(0, 256)
    host.submit(DropPrefix(tuple(contents)))
    assert host.used_bytes == 0
    assert host.extents.free_bytes == HOST


def test_more_than_there_is_room_for_and_blocks_that_are_not_here_are_errors() -> None:
    host = on_host(torch.zeros(PLACES * PLACE, dtype=torch.uint8))
    with pytest.raises(RuntimeError, match="no room"):
        host.submit(SavePrefix(1, HOST, (1, 2), (0, 0)))
    with pytest.raises(KeyError):
        host.submit(BringPrefix(2, PLACE, (1,), (0,)))
    assert host.finished() == []
    assert host.used_bytes == 0


def test_a_copy_under_way_is_not_over_until_it_is() -> None:
    over, now = False, 1.0
    host = PrefixBlocks(Extents(HOST), lambda copies, direction: lambda: over, lambda: now)
    host.submit(SavePrefix(5, PLACE, (1,), (0,)))
    assert host.finished() == []
    over, now = True, 3.0
    assert host.finished() == [PrefixMoved(5, 2.0)]
    assert host.finished() == []


def test_blocks_that_follow_one_another_are_one_run() -> None:
    runs: list[list[tuple[tuple[int, ...], int, int]]] = []

    def copier(copies, direction):
        runs.append([(tuple(one.places), one.there, one.size) for one in copies])
        return lambda: True

    host = PrefixBlocks(Extents(HOST), copier, lambda: 0.0)
    host.submit(SavePrefix(1, PLACE, (1, 2, 3), (0, 5 * PLACE, PLACE)))
    host.submit(BringPrefix(2, PLACE, (2, 3), (7 * PLACE, 0)))
    assert runs == [[((0, 5 * PLACE, PLACE), 0, PLACE)], [((7 * PLACE, 0), PLACE, PLACE)]]


@given(st.data())
def test_a_request_comes_in_from_a_prefix_and_its_own_copies(data: st.DataObject) -> None:
    """It leaves and comes back twice, to other places. Some own copies stay meanwhile."""
    arena = torch.randint(0, 256, (PLACES * PLACE,), dtype=torch.uint8)
    copier = copies_at_once(arena, torch.zeros(HOST, dtype=torch.uint8))
    kv = HostKv(HOST, copier)
    prefixes = PrefixBlocks(kv.extents, copier, lambda: 0.0)
    shared, own = data.draw(st.integers(0, 8)), data.draw(st.integers(0, 8))
    count, ids = shared + own, tuple(range(10, 10 + shared))
    places = tuple(range(0, count * PLACE, PLACE))
    before = [arena[at : at + PLACE].clone() for at in places]
    prefixes.submit(SavePrefix(1, PLACE, ids, places[:shared]))
    at_once = data.draw(st.integers(0, own))
    copy = Move("r", "copy", shared, places[shared : shared + at_once], shared=shared)
    kv.start(copy, PLACE, prefixes.runs(copy))
    synced = shared + at_once
    for number in (1, 2):
        out = Move("r", "out", synced, places[synced:], shared=shared)
        kv.start(out, PLACE, prefixes.runs(out))
        arena.random_(0, 256)
        places = tuple(one * PLACE for one in data.draw(st.permutations(range(PLACES)))[:count])
        synced = data.draw(st.integers(shared, count))
        back = Move("r", "in", 0, places, synced, shared=shared, ids=ids)
        kv.start(back, PLACE, prefixes.runs(back))
        kv.finished()
        found = [arena[at : at + PLACE] for at in places]
        assert all(map(torch.equal, found, before)), f"the {number}. time"
        assert kv.used_bytes == prefixes.used_bytes + (synced - shared) * PLACE
    assert kv.counts.out_bytes <= 2 * own * PLACE
    kv.forget("r")
    prefixes.submit(DropPrefix(ids))
    assert kv.used_bytes == 0


def test_a_request_does_not_come_in_from_what_is_not_here() -> None:
    arena = torch.zeros(PLACES * PLACE, dtype=torch.uint8)
    kv = HostKv(HOST, copies_at_once(arena, torch.zeros(HOST, dtype=torch.uint8)))
    prefixes = PrefixBlocks(kv.extents, kv.copier, lambda: 0.0)
    with pytest.raises(KeyError):
        prefixes.runs(Move("r", "in", 0, (0,), 1, shared=1, ids=(7,)))
    with pytest.raises(RuntimeError, match="not all of"):
        kv.start(Move("r", "in", 0, (0, PLACE), 2, shared=1), PLACE)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.integers(1, 12))
def test_extents_are_cut_into_pieces_of_one_size(lengths: list[int], size: int) -> None:
    lengths.append(-sum(lengths) % size or size)
    extents = [(100 * at, 100 * at + length) for at, length in enumerate(lengths)]
    pieces = cut(extents, size)
    assert all(sum(stop - start for start, stop in piece) == size for piece in pieces)
    assert [at for piece in pieces for start, stop in piece for at in range(start, stop)] == [
        at for start, stop in extents for at in range(start, stop)
    ]  # fmt: skip
