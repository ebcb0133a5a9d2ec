"""A step's long sequences as FlashInfer numbers them: pages of equal distance over the arena.

Blocks lie wherever the policy put them, those of one model between those of others. All begin at
multiples of some number of bytes, so the arena is read as pages that far apart, as long as a block:
they overlap, those in use do not, and nothing is copied. Everything here is on the host.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from c2cserve.kernels.layer import BLOCK_TOKENS, KvLayout, TokenRows

_ALIGNMENT = 16
"""Bytes, of what the kernel loads at once."""
_NUMBERS = 1 << 31
"""Pages that int32 tells apart."""


@dataclass(frozen=True, slots=True, eq=False)
class Pages:
    """Sequences from the first to the last that has several new tokens; arrays are int32.

    A step has decodes first, so those between them are at most prompts' last chunks of one token.
    They are computed too, for nothing: they are not rotated nor stored yet when this runs, and
    their rows are written once more by the kernel for single tokens.
    """

    begin: int
    """Row of the first one's first token,"""
    end: int
    """and behind the last one's last."""
    unit: int
    """Bytes between the begins of two pages."""
    q_starts: NDArray[np.int32]
    """[N + 1]: rows, from `begin` on."""
    page_starts: NDArray[np.int32]
    """[N + 1]: where a sequence's pages begin in `numbers`."""
    numbers: NDArray[np.int32]
    lengths: NDArray[np.int32]
    """[N]: tokens in the cache."""
    last_tokens: NDArray[np.int32]
    """[N]: of them in the last page."""


def pages_of(rows: TokenRows, block_bytes: int) -> Pages:
    """`rows` are on the host, with a sequence of several new tokens among them. Raises ValueError
    for blocks that lie too oddly to be numbered; the policy's spans of slabs do not."""
    starts = rows.q_start.numpy()
    several = np.flatnonzero(np.diff(starts) > 1)
    first, stop = int(several[0]), int(several[-1]) + 1
    lengths = rows.context_len.numpy()[first:stop]
    counts = -(-lengths // BLOCK_TOKENS)
    table = rows.block_table.numpy()[first:stop]
    offsets = table[np.arange(table.shape[1]) < counts[:, None]]
    unit = int(np.gcd.reduce(offsets, initial=block_bytes))
    if unit % _ALIGNMENT or int(offsets.max()) // unit >= _NUMBERS:
        raise ValueError(f"blocks cannot be numbered by {unit} bytes")
    page_starts = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=page_starts[1:])
    begin, end = int(starts[first]), int(starts[stop])
    return Pages(
        begin, end, unit,
        q_starts=(starts[first : stop + 1] - begin).astype(np.int32),
        page_starts=page_starts,
        numbers=(offsets // unit).astype(np.int32),
        lengths=lengths.astype(np.int32),
        last_tokens=(lengths - (counts - 1) * BLOCK_TOKENS).astype(np.int32),
    )  # fmt: skip


def paged(numbers: Tensor, kv: KvLayout, layer: int, unit: int) -> tuple[Tensor, Tensor]:
    """Keys and values of a layer, each [pages, kv_heads, 16, head_dim]: page p is the block at byte
    p * unit of the arena `numbers` [N], which is of the cache's 16-bit dtype."""
    head = BLOCK_TOKENS * kv.head_dim
    count = (numbers.nbytes - kv.block_bytes) // unit + 1
    shape = (count, kv.kv_heads, BLOCK_TOKENS, kv.head_dim)
    strides = (unit // numbers.itemsize, head, kv.head_dim, 1)
    first = numbers.storage_offset() + layer * 2 * kv.kv_heads * head
    keys = numbers.as_strided(shape, strides, first)
    return keys, numbers.as_strided(shape, strides, first + kv.kv_heads * head)
