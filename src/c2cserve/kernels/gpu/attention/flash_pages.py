"""The blocks of a step's long sequences as FlashInfer numbers them: pages at equal distances.

    byte      0    u    2u   3u   4u   5u   6u      u: divides all offsets and the block's length
    arena     | -- | block A | -- | block B |
    page 1         | ------- |
    page 4                        | ------- |

The blocks of one model lie among those of others, wherever the policy put them. Page p begins at
p u and is as long as a block. So pages overlap, but the pages in use do not, and nothing is copied.
All of this is computed on the host.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from c2cserve.kernels.layer import BLOCK_TOKENS, KvLayout, TokenRows

_ALIGNMENT = 16
"""The size of the kernel's loads, in bytes."""
_PAGES_MAX = 1 << 31
"""The number of pages that an int32 can distinguish."""


@dataclass(frozen=True, slots=True, eq=False)
class Pages:
    """N sequences: from the first to the last one that has several new tokens. Arrays are int32.

    Sequences of one new token may lie among them: last chunks of prompts. (Decodes come first in a
    step.) FlashInfer computes these rows in vain. Their queries are not rotated and their keys are
    not stored yet, and the kernel for single tokens overwrites the rows.
    """

    begin: int
    """The row of the first sequence's first token."""
    end: int
    """The row behind the last sequence's last token."""
    unit: int
    """Bytes between the beginnings of two pages."""
    q_starts: NDArray[np.int32]
    """[N + 1]: where each sequence's rows begin, counted from `begin`."""
    page_starts: NDArray[np.int32]
    """[N + 1]: where each sequence's pages begin in `numbers`."""
    numbers: NDArray[np.int32]
    """The page numbers of all sequences, one after another."""
    lengths: NDArray[np.int32]
    """[N]: tokens in the cache."""
    last_tokens: NDArray[np.int32]
    """[N]: tokens in the last page."""


def pages_of(rows: TokenRows, block_bytes: int) -> Pages:
    """Return the pages of `rows`, which are on the host and have a sequence of several new tokens.

    Raises `ValueError` if the blocks' offsets have no common divisor that is large enough. Those of
    the policy's slabs have one.
    """
    starts = rows.q_start.numpy()
    several = np.flatnonzero(np.diff(starts) > 1)
    first, stop = int(several[0]), int(several[-1]) + 1
    lengths = rows.context_len.numpy()[first:stop]
    counts = -(-lengths // BLOCK_TOKENS)
    table = rows.block_table.numpy()[first:stop]
    offsets = table[np.arange(table.shape[1]) < counts[:, None]]
    unit = int(np.gcd.reduce(offsets, initial=block_bytes))
    if unit % _ALIGNMENT or int(offsets.max()) // unit >= _PAGES_MAX:
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
    """Return views of a layer's keys and values in the arena, each [pages, kv_heads, 16, head_dim].

    Page p is the block at byte p * unit. `numbers` [N]: the arena in the cache's 16-bit dtype.
    """
    head = BLOCK_TOKENS * kv.head_dim
    count = (numbers.nbytes - kv.block_bytes) // unit + 1
    shape = (count, kv.kv_heads, BLOCK_TOKENS, kv.head_dim)
    strides = (unit // numbers.itemsize, head, kv.head_dim, 1)
    first = numbers.storage_offset() + layer * 2 * kv.kv_heads * head
    keys = numbers.as_strided(shape, strides, first)
    return keys, numbers.as_strided(shape, strides, first + kv.kv_heads * head)
