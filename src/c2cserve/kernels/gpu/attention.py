"""Causal attention of new tokens over a paged cache, in Triton.

Sequences of any lengths in one call. A sequence with several new tokens is cut into tiles of rows;
a row is a query head of a token, and the heads that share a key head lie side by side, so that
grouped queries fill a tile. One with a single new token is cut along its context instead, into
pieces of fixed length whose results are then put together: few sequences fill the GPU, and a row's
result does not depend on what else is in the batch.

A block holds [layer, k | v, kv_head, 16, head_dim]; a block table has the byte offsets of blocks.
"""

# Device code is Triton's language, with its own types and its constants in capitals.
# pyright: basic, reportCallIssue=false
# ruff: noqa: N803

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from c2cserve.kernels.gpu.early import EARLY, after_others
from c2cserve.kernels.layer import BLOCK_TOKENS, KvLayout

PIECE_TOKENS = 256
"""Of context, for one program of a single new token. Never to depend on a batch."""
_MERGED = 16
"""Pieces put together at once."""
_LOG2_E = math.log2(math.e)


# ---- device code --------------------------------------------------------------------------------


@triton.jit
def _visit(
    sums, tops, totals, q, seen_from, seen_to, table, keys_at, values_at, first, stop, length,
    scale_log2, DIM: tl.constexpr, PAD: tl.constexpr, KEYS: tl.constexpr, TOKENS: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Online softmax over keys [first, stop). A row sees [seen_from, seen_to]."""
    at = tl.arange(0, PAD)
    for start in range(first, stop, KEYS):
        key = start + tl.arange(0, KEYS)
        known = key < length
        if MASKED:
            block = tl.load(table + key // TOKENS, known, 0)
        else:
            block = tl.load(table + key // TOKENS)
        row = tl.multiple_of(block // 2, 8) + (key % TOKENS) * DIM
        k_at = keys_at + row[None, :] + at[:, None]
        v_at = values_at + row[:, None] + at[None, :]
        if MASKED:
            # What lies behind the last token is anything, NaN too, and 0 times NaN is NaN.
            k = tl.load(k_at, known[None, :] & (at < DIM)[:, None], 0.0)
            v = tl.load(v_at, known[:, None] & (at < DIM)[None, :], 0.0)
        elif PAD == DIM:
            k = tl.load(k_at)
            v = tl.load(v_at)
        else:
            k = tl.load(k_at, (at < DIM)[:, None], 0.0)
            v = tl.load(v_at, (at < DIM)[None, :], 0.0)
        scores = tl.dot(q, k) * scale_log2
        if MASKED:
            seen = (key[None, :] >= seen_from[:, None]) & (key[None, :] <= seen_to[:, None])
            scores = tl.where(seen, scores, float("-inf"))
        tops_new = tl.maximum(tops, tl.max(scores, 1))
        # A row that has seen nothing yet has no top: without this it would be inf - inf.
        base = tl.where(tops_new == float("-inf"), 0.0, tops_new)
        weights = tl.exp2(scores - base[:, None])
        shrunk = tl.exp2(tops - base)
        totals = totals * shrunk + tl.sum(weights, 1)
        sums = tl.dot(weights.to(v.dtype), v, sums * shrunk[:, None])
        tops = tops_new
    return sums, tops, totals


@triton.jit(do_not_specialize=["seqs", "heads", "kv_heads", "layer", "table_width", "window"])
def _many_kernel(
    qkv, arena, out, q_start, context_len, tables, scale_log2, seqs, heads, kv_heads, layer, width,
    table_width, window, DIM: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, TOKENS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Sequences of several new tokens; a program has ROWS rows of one of them, for one key head."""
    after_others(EARLY)
    # Late tiles see most: they go first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    group = heads // kv_heads
    # The sequence: the last whose first tile, rounded down and set apart by one each, is not later.
    seq, past = seqs * 0, seqs
    while past - seq > 1:
        middle = (seq + past) // 2
        if tl.load(q_start + middle) * group // ROWS + middle <= tile:
            seq = middle
        else:
            past = middle
    begin = tl.load(q_start + seq)
    new = tl.load(q_start + seq + 1) - begin
    first_row = (tile - (begin * group // ROWS + seq)) * ROWS
    if (new == 1) | (first_row >= new * group):
        return
    length = tl.load(context_len + seq)
    row = first_row + tl.arange(0, ROWS)
    real = row < new * group
    seen_to = length - new + row // group
    seen_from = tl.where((window > 0) & real, seen_to - window + 1, 0)
    lowest = length - new + first_row // group
    highest = length - new + tl.minimum(new * group - 1, first_row + ROWS - 1) // group
    at = tl.arange(0, PAD)
    inside = real[:, None] & (at < DIM)[None, :]
    head = kv_head * group + row % group
    token = (begin + row // group).to(tl.int64)
    q = tl.load(qkv + (token * width + head * DIM)[:, None] + at[None, :], inside, 0.0)
    plane = (layer * 2 * kv_heads + kv_head) * TOKENS * DIM
    keys_at = arena + plane
    values_at = keys_at + kv_heads * TOKENS * DIM
    table = tables + seq.to(tl.int64) * table_width
    first = tl.where(window > 0, tl.maximum(0, lowest - window + 1) // KEYS * KEYS, 0)
    # All rows see all keys up to here.
    common = tl.where(window > 0, first, (lowest + 1) // KEYS * KEYS)
    sums = tl.zeros((ROWS, PAD), tl.float32)
    tops = tl.full((ROWS,), float("-inf"), tl.float32)
    totals = tl.zeros((ROWS,), tl.float32)
    sums, tops, totals = _visit(
        sums, tops, totals, q, seen_from, seen_to, table, keys_at, values_at, first, common,
        length, scale_log2, DIM, PAD, KEYS, TOKENS, False,
    )  # fmt: skip
    sums, tops, totals = _visit(
        sums, tops, totals, q, seen_from, seen_to, table, keys_at, values_at, common, highest + 1,
        length, scale_log2, DIM, PAD, KEYS, TOKENS, True,
    )  # fmt: skip
    result = (sums / totals[:, None]).to(out.dtype.element_ty)
    tl.store(out + (token * heads * DIM + head * DIM)[:, None] + at[None, :], result, inside)


@triton.jit(do_not_specialize=["heads", "kv_heads", "layer", "table_width", "window"])
def _single_kernel(
    qkv, arena, partial_sums, partial_tops, q_start, context_len, tables, scale_log2, heads,
    kv_heads, layer, width, table_width, window, DIM: tl.constexpr, PAD: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, PIECE: tl.constexpr, TOKENS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Sequences of one new token; a program has one piece of the context, for up to ROWS of the
    heads that share a key head."""
    after_others(EARLY)
    seq, piece = tl.program_id(0), tl.program_id(2)
    group = heads // kv_heads
    tiles = (group + ROWS - 1) // ROWS
    kv_head, tile = tl.program_id(1) // tiles, tl.program_id(1) % tiles
    begin = tl.load(q_start + seq)
    length = tl.load(context_len + seq)
    seen = tl.where(window > 0, tl.maximum(0, length - window), 0)
    first, stop = piece * PIECE, tl.minimum(length, piece * PIECE + PIECE)
    if (tl.load(q_start + seq + 1) - begin != 1) | (first >= length) | (stop <= seen):
        return
    row = tile * ROWS + tl.arange(0, ROWS)
    head = kv_head * group + row
    at = tl.arange(0, PAD)
    inside = (row < group)[:, None] & (at < DIM)[None, :]
    q_at = qkv + begin.to(tl.int64) * width + (head * DIM)[:, None] + at[None, :]
    q = tl.load(q_at, inside, 0.0)
    plane = (layer * 2 * kv_heads + kv_head) * TOKENS * DIM
    keys_at = arena + plane
    values_at = keys_at + kv_heads * TOKENS * DIM
    table = tables + seq.to(tl.int64) * table_width
    seen_from, seen_to = row * 0 + seen, row * 0 + length - 1
    first = tl.maximum(first, seen // KEYS * KEYS)
    common = tl.where(first >= seen, tl.maximum(first, stop // KEYS * KEYS), first)
    sums = tl.zeros((ROWS, PAD), tl.float32)
    tops = tl.full((ROWS,), float("-inf"), tl.float32)
    totals = tl.zeros((ROWS,), tl.float32)
    sums, tops, totals = _visit(
        sums, tops, totals, q, seen_from, seen_to, table, keys_at, values_at, first, common,
        length, scale_log2, DIM, PAD, KEYS, TOKENS, False,
    )  # fmt: skip
    sums, tops, totals = _visit(
        sums, tops, totals, q, seen_from, seen_to, table, keys_at, values_at, common, stop,
        length, scale_log2, DIM, PAD, KEYS, TOKENS, True,
    )  # fmt: skip
    kept = (seq.to(tl.int64) * heads + head) * tl.num_programs(2) + piece
    tl.store(partial_sums + (kept * DIM)[:, None] + at[None, :], sums, inside)
    tl.store(partial_tops + kept * 2, tops, row < group)
    tl.store(partial_tops + kept * 2 + 1, totals, row < group)


@triton.jit(do_not_specialize=["heads", "pieces", "window"])
def _merge_kernel(
    partial_sums, partial_tops, out, q_start, context_len, heads, pieces, window,
    DIM: tl.constexpr, PAD: tl.constexpr, PIECE: tl.constexpr, MERGED: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """One head of a sequence of one new token, out of its pieces."""
    after_others(EARLY)
    seq, head = tl.program_id(0), tl.program_id(1)
    begin = tl.load(q_start + seq)
    if tl.load(q_start + seq + 1) - begin != 1:
        return
    length = tl.load(context_len + seq)
    seen = tl.where(window > 0, tl.maximum(0, length - window), 0)
    first, stop = seen // PIECE, (length + PIECE - 1) // PIECE
    kept = (seq.to(tl.int64) * heads + head) * pieces
    at = tl.arange(0, PAD)
    sums = tl.zeros((PAD,), tl.float32)
    top = float("-inf")
    total = 0.0
    for start in range(first, stop, MERGED):
        piece = start + tl.arange(0, MERGED)
        there = piece < stop
        tops = tl.load(partial_tops + (kept + piece) * 2, there, float("-inf"))
        totals = tl.load(partial_tops + (kept + piece) * 2 + 1, there, 0.0)
        some = tl.load(
            partial_sums + ((kept + piece) * DIM)[:, None] + at[None, :],
            there[:, None] & (at < DIM)[None, :], 0.0,
        )  # fmt: skip
        top_new = tl.maximum(top, tl.max(tops, 0))
        shrunk, weights = tl.exp2(top - top_new), tl.exp2(tops - top_new)
        sums = sums * shrunk + tl.sum(some * weights[:, None], 0)
        total = total * shrunk + tl.sum(totals * weights, 0)
        top = top_new
    result = (sums / total).to(out.dtype.element_ty)
    tl.store(out + (begin.to(tl.int64) * heads + head) * DIM + at, result, at < DIM)


# ---- launcher -----------------------------------------------------------------------------------


def attention(
    qkv: Tensor,
    arena: Tensor,
    kv: KvLayout,
    layer: int,
    q_start: Tensor,
    context_len: Tensor,
    block_table: Tensor,
    scale: float,
    window: int,
) -> Tensor:
    """`Ops.attention`: qkv [T, (Hq + 2 Hkv) D], 16-bit, of the cache's dtype -> [T, Hq D]."""
    tokens, seqs, dim = len(qkv), len(context_len), kv.head_dim
    heads = qkv.shape[1] // dim - 2 * kv.kv_heads
    out = torch.empty((tokens, heads * dim), dtype=qkv.dtype, device=qkv.device)
    if not tokens:
        return out
    cache = arena.view(qkv.dtype)
    pad = max(16, triton.next_power_of_2(dim))
    where = (q_start, context_len, block_table, scale * _LOG2_E)
    group = heads // kv.kv_heads
    if tokens > seqs:
        rows = 128 if pad <= 128 else 64
        _many_kernel[(tokens * group // rows + seqs, kv.kv_heads)](
            qkv, cache, out, *where, seqs, heads, kv.kv_heads, layer, qkv.shape[1],
            block_table.shape[1], window, DIM=dim, PAD=pad, ROWS=rows, KEYS=64,
            TOKENS=BLOCK_TOKENS, num_warps=8, num_stages=2, **EARLY,
        )  # fmt: skip
        if seqs == 1:
            return out
    pieces = -(-block_table.shape[1] * BLOCK_TOKENS // PIECE_TOKENS)
    sums = torch.empty((seqs, heads, pieces, dim), dtype=torch.float32, device=qkv.device)
    tops = torch.empty((seqs, heads, pieces, 2), dtype=torch.float32, device=qkv.device)
    _single_kernel[(seqs, kv.kv_heads * -(-group // 16), pieces)](
        qkv, cache, sums, tops, *where, heads, kv.kv_heads, layer, qkv.shape[1],
        block_table.shape[1], window, DIM=dim, PAD=pad, ROWS=16, KEYS=64, PIECE=PIECE_TOKENS,
        TOKENS=BLOCK_TOKENS, num_warps=4, num_stages=3 if pad <= 128 else 2, **EARLY,
    )  # fmt: skip
    _merge_kernel[(seqs, heads)](
        sums, tops, out, q_start, context_len, heads, pieces, window, DIM=dim, PAD=pad,
        PIECE=PIECE_TOKENS, MERGED=_MERGED, num_warps=2, **EARLY,
    )  # fmt: skip
    return out
