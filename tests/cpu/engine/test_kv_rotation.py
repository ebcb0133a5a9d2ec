"""KV on the host: what comes back is what left, wherever it was meanwhile."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from c2cserve.core.actions import Move
from c2cserve.engine.rotation import HostKv, copies_at_once

BLOCK = 96


def host_kv(arena: torch.Tensor, blocks: int) -> HostKv:
    return HostKv(
        blocks * BLOCK, copies_at_once(arena, torch.zeros(blocks * BLOCK, dtype=torch.uint8))
    )


@given(st.data())
def test_blocks_come_back_as_they_were(data: st.DataObject) -> None:
    """Three requests leave in any order, some of their blocks ahead of time, and come back to
    other places; sizes differ, so that the host's memory is in pieces."""
    arena = torch.randint(0, 256, (64 * BLOCK,), dtype=torch.uint8)
    host = host_kv(arena, 40)
    names = ("a", "b", "c")
    sizes = {name: data.draw(st.sampled_from([BLOCK, BLOCK // 2, BLOCK // 3])) for name in names}
    counts = {name: data.draw(st.integers(1, 12)) for name in names}
    places = {
        name: [(20 * i + j) * BLOCK for j in range(counts[name])] for i, name in enumerate(names)
    }

    def bytes_of(name: str) -> list[bytes]:
        return [arena[at : at + sizes[name]].numpy().tobytes() for at in places[name]]

    before = {name: bytes_of(name) for name in names}
    for name in names:
        ahead = data.draw(st.integers(0, counts[name]))
        if ahead:
            host.start(Move(name, "copy", 0, tuple(places[name][:ahead])), sizes[name])
        host.start(Move(name, "out", ahead, tuple(places[name][ahead:])), sizes[name])
    assert sorted(move.direction for move in host.finished()).count("out") == 3
    arena.random_(0, 256)
    order = data.draw(st.permutations(names))
    free = data.draw(st.permutations(range(64)))
    for name in order:
        places[name] = [free.pop() * BLOCK for _ in range(counts[name])]
        kept = data.draw(st.integers(0, counts[name]))
        host.start(Move(name, "in", 0, tuple(places[name]), kept), sizes[name])
        assert [move.request_id for move in host.finished()] == [name]
        counts[name] = kept
    assert {name: bytes_of(name) for name in names} == before
    assert host.used_bytes == sum(counts[name] * sizes[name] for name in names)
    for name in names:
        host.forget(name)
    assert host.used_bytes == 0
    assert host.counts.in_bytes <= host.counts.out_bytes


def test_more_than_there_is_room_for_and_blocks_that_are_not_here_are_errors() -> None:
    host = host_kv(torch.zeros(10 * BLOCK, dtype=torch.uint8), 2)
    with pytest.raises(RuntimeError, match="no room"):
        host.start(Move("a", "out", 0, (0, BLOCK, 2 * BLOCK)), BLOCK)
    host.forget("a")
    with pytest.raises(RuntimeError, match="not all of"):
        host.start(Move("b", "in", 0, (0,)), BLOCK)
    with pytest.raises(RuntimeError, match="no blocks before"):
        host.start(Move("c", "out", 1, (0,)), BLOCK)


def test_a_move_under_way_is_not_over_until_it_is() -> None:
    over = False
    host = HostKv(4 * BLOCK, lambda copies, direction: lambda: over)
    host.start(Move("a", "copy", 0, (0, BLOCK)), BLOCK)
    assert host.busy("a")
    assert host.finished() == []
    over = True
    assert [move.request_id for move in host.finished()] == ["a"]
    assert not host.busy("a")
    assert host.used_bytes == 2 * BLOCK
