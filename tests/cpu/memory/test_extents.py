"""Room in pieces: nothing is given twice, nothing is lost, and what is free can be had."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from c2cserve.memory.extents import Extent, Extents


@given(st.data())
def test_every_byte_has_one_owner_and_free_bytes_can_be_had(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 200))
    extents = Extents(size)
    held: list[list[Extent]] = []
    for _ in range(data.draw(st.integers(0, 30))):
        if held and data.draw(st.booleans()):
            extents.give(held.pop(data.draw(st.integers(0, len(held) - 1))))
        else:
            wanted = data.draw(st.integers(0, size))
            taken = extents.take(wanted)
            free = size - sum(stop - start for one in held for start, stop in one)
            assert (taken is None) == (wanted > free)
            held += [] if taken is None else [taken]
        owned = [byte for one in held for start, stop in one for byte in range(start, stop)]
        assert len(owned) == len(set(owned)) == size - extents.free_bytes
        assert all(0 <= byte < size for byte in owned)
    for one in held:
        extents.give(one)
    assert extents.take(size) == [(0, size)], "neighbours are one again"


def test_giving_what_is_free_is_an_error() -> None:
    extents = Extents(100)
    taken = extents.take(30)
    assert taken == [(0, 30)]
    extents.give([(10, 20)])
    for again in ((10, 20), (5, 15), (15, 25), (40, 50), (25, 31)):
        with pytest.raises(ValueError, match="free already"):
            extents.give([again])
