"""The native CRC-32 against zlib's."""

import zlib

import pytest

from c2cserve.kernels import crc32 as module
from c2cserve.kernels.crc32 import crc32

SIZES = (0, 1, 63, 64, 65, 127, 128, 200, 4096, 100_000, (1 << 20) + 4)


@pytest.mark.parametrize("size", SIZES)
def test_it_is_that_of_zlib_at_any_address(size: int) -> None:
    data = bytes(range(251)) * (size // 251 + 1)
    for offset in (0, 1, 4, 17):
        part = memoryview(bytes(offset) + data)[offset : offset + size]
        assert crc32(part) == zlib.crc32(part)


def test_any_turned_bit_is_found() -> None:
    data = bytearray(512)
    sums = {crc32(data)}
    for bit in range(8 * len(data)):
        data[bit // 8] ^= 1 << bit % 8
        sums.add(crc32(data))
        data[bit // 8] ^= 1 << bit % 8
    assert len(sums) == 8 * len(data) + 1


def test_without_the_instruction_it_is_zlib_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_folding", lambda: None)
    assert crc32(b"c2c" * 100) == zlib.crc32(b"c2c" * 100)
