"""Causal attention of new tokens over a paged cache, in Triton.

Sequences of any lengths in one call. A sequence with several new tokens is cut into tiles of rows;
a row is a query head of a token, and the heads that share a key head lie side by side, so that
grouped queries fill a tile. One with a single new token is cut along its context instead, into
pieces of fixed length: few sequences fill the GPU, and a row's result does not depend on what else
is in the batch. A program turns its own heads' queries; that of the last piece turns and stores the
new key; and whichever is the last to end puts the pieces together, in their order. So a decode step
launches one kernel between two GEMMs.

A block holds [layer, k | v, kv_head, 16, head_dim]; a block table has the byte offsets of blocks.
"""

# Device code is Triton's language, with its own types and its constants in capitals.
# pyright: basic, reportCallIssue=false
# ruff: noqa: N803

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from c2cserve.kernels.gpu.attention.flash import Flash
from c2cserve.kernels.gpu.attention.rope import rope_store, rotated
from c2cserve.kernels.gpu.launcher import Launcher
from c2cserve.kernels.gpu.programmatic_launch import after_others
from c2cserve.kernels.layer import BLOCK_TOKENS, Layer, TokenRows

PIECE_TOKENS = 256
"""Of context, for one program of a single new token. Never to depend on a batch."""
_ROWS = 16
"""Heads of a program: the least that tensor cores take."""
_ARRIVALS = 1 << 14
"""Counters to begin with: more than the 64 sequences of a graph need."""
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
        scores = tl.dot(q, k)
        if MASKED:
            seen = (key[None, :] >= seen_from[:, None]) & (key[None, :] <= seen_to[:, None])
            scores = tl.where(seen, scores, float("-inf"))
        tops_new = tl.maximum(tops, tl.max(scores, 1) * scale_log2)
        # A row that has seen nothing yet has no top: without this it would be inf - inf.
        base = tl.where(tops_new == float("-inf"), 0.0, tops_new)
        # One rounding, masked or not: which it is depends on the other rows of a tile.
        weights = tl.exp2(tl.fma(scores, scale_log2, -base[:, None]))
        shrunk = tl.exp2(tops - base)
        totals = totals * shrunk + tl.sum(weights, 1)
        sums = tl.dot(weights.to(v.dtype), v, sums * shrunk[:, None])
        tops = tops_new
    return sums, tops, totals


@triton.jit(do_not_specialize=["seqs", "heads", "kv_heads", "layer", "table_width", "window"])
def _many_kernel(
    qkv, arena, out, q_start, context_len, tables, scale_log2, seqs, heads, kv_heads, layer, width,
    table_width, window, DIM: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, TOKENS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Sequences of several new tokens; a program has ROWS rows of one of them, for one key head."""
    after_others(PDL)
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


@triton.jit
def _store_new(
    k_at, kept, kv_heads, cos, sin, norm, eps, DIM: tl.constexpr, PAD: tl.constexpr,
    TOKENS: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """A new key at `k_at` in qkv, rotated, and its value into the cache, for this program to read.
    (Heads that share a key may be those of several programs: all of them store the same.)"""
    at = tl.arange(0, PAD)[None, :]
    inside = at < DIM
    k = rotated(k_at, inside, cos, sin, norm, eps, DIM, PAD, NORM).to(kept.dtype.element_ty)
    v = tl.load(k_at + kv_heads * DIM + at, inside, 0.0)
    tl.store(kept + at, k, inside)
    tl.store(kept + kv_heads * TOKENS * DIM + at, v, inside)
    tl.debug_barrier()  # other threads than those that store will read


@triton.jit
def _is_last(arrived, count):
    """Whether this is the last of `count` programs to come here. What they have stored before, it
    can read. `arrived` is 0 again when all were here."""
    tl.debug_barrier()  # stores of all threads come before the one that arrives for them
    last = tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu") == count - 1
    if last:
        tl.store(arrived, 0)
    return last


@triton.jit
def _merged(
    partial_sums, partial_tops, kept, real, first, stop, DIM: tl.constexpr, PAD: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Rows [ROWS, PAD] of attention out of their pieces [first, stop), one after another."""
    at = tl.arange(0, PAD)[None, :]
    inside = real[:, None] & (at < DIM)
    sums = tl.zeros((ROWS, PAD), tl.float32)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    for piece in tl.range(first, stop, num_stages=4):
        piece_top = tl.load(partial_tops + (kept + piece) * 2, real, 0.0)
        piece_total = tl.load(partial_tops + (kept + piece) * 2 + 1, real, 1.0)
        piece_sums = tl.load(partial_sums + ((kept + piece) * DIM)[:, None] + at, inside, 0.0)
        top_new = tl.maximum(top, piece_top)
        shrunk, weight = tl.exp2(top - top_new), tl.exp2(piece_top - top_new)
        sums = sums * shrunk[:, None] + piece_sums * weight[:, None]
        total = total * shrunk + piece_total * weight
        top = top_new
    return sums / total[:, None]


@triton.jit(do_not_specialize=["heads", "kv_heads", "layer", "table_width", "window"])
def _single_kernel(
    qkv, positions, cos, sin, q_norm, k_norm, arena, slots, out, partial_sums, partial_tops,
    arrivals, q_start, context_len, tables, eps, scale_log2, heads, kv_heads, layer, width,
    table_width, window, DIM: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, PIECE: tl.constexpr, TOKENS: tl.constexpr, NORM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Sequences of one new token; a program has one piece of the context, for up to ROWS of the
    heads that share a key head."""
    after_others(PDL)
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
    at = tl.arange(0, PAD)[None, :]
    inside = (row < group)[:, None] & (at < DIM)
    angle = tl.load(positions + begin).to(tl.int64) * (DIM // 2) + at % (DIM // 2)
    c, s = tl.load(cos + angle, at < DIM, 0.0), tl.load(sin + angle, at < DIM, 0.0)
    token_at = qkv + begin.to(tl.int64) * width
    q = rotated(token_at + (head * DIM)[:, None], inside, c, s, q_norm, eps, DIM, PAD, NORM)
    q = q.to(qkv.dtype.element_ty)
    plane = (layer * 2 * kv_heads + kv_head) * TOKENS * DIM
    if stop == length:
        slot = tl.load(slots + begin)
        kept = arena + tl.multiple_of(slot // TOKENS // 2, 8) + plane + slot % TOKENS * DIM
        _store_new(
            token_at + (heads + kv_head) * DIM, kept, kv_heads, c, s, k_norm, eps, DIM, PAD, TOKENS,
            NORM,
        )  # fmt: skip
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
    kept = (seq.to(tl.int64) * heads + head) * tl.num_programs(2)
    tl.store(partial_sums + ((kept + piece) * DIM)[:, None] + at, sums, inside)
    tl.store(partial_tops + (kept + piece) * 2, tops, row < group)
    tl.store(partial_tops + (kept + piece) * 2 + 1, totals, row < group)
    first_piece, pieces = seen // PIECE, (length + PIECE - 1) // PIECE
    arrived = arrivals + seq * tl.num_programs(1) + tl.program_id(1)
    if _is_last(arrived, pieces - first_piece):
        result = _merged(
            partial_sums, partial_tops, kept, row < group, first_piece, pieces, DIM, PAD, ROWS
        )
        token = tl.load(q_start + seq).to(tl.int64)  # anew: a register less in the loops
        out_at = out + ((token * heads + head) * DIM)[:, None] + at
        tl.store(out_at, result.to(out.dtype.element_ty), inside)


# ---- launcher -----------------------------------------------------------------------------------


class Arrivals:
    """Counters of the programs that share a sequence's heads. All are 0 between two launches, so
    that graphs can be replayed; launches that share them run one after another."""

    def __init__(self, device: torch.device) -> None:
        self._counts = [torch.zeros(_ARRIVALS, dtype=torch.int32, device=device)]

    def hold(self, count: int) -> Tensor:
        """At least so many. They stay where they are: graphs know their address."""
        last = self._counts[-1]
        if last.numel() < count:
            last = last.new_zeros(2 * count)
            self._counts.append(last)
        return last


def attend(
    qkv: Tensor,
    layer: Layer,
    rows: TokenRows,
    rope: tuple[Tensor, Tensor],
    arena: Tensor,
    arrivals: Arrivals,
    flash: Flash | None = None,
) -> Tensor:
    """`Ops.attend`: qkv [T, (Hq + 2 Hkv) D], 16-bit, of the cache's dtype -> [T, Hq D]. What it
    leaves in qkv is nobody's. `flash`: asked first for sequences of several new tokens."""
    tokens, seqs = len(qkv), len(rows.context_len)
    dim, kv_heads = layer.shape.kv.head_dim, layer.shape.kv.kv_heads
    heads = qkv.shape[1] // dim - 2 * kv_heads
    out = torch.empty((tokens, heads * dim), dtype=qkv.dtype, device=qkv.device)
    if tokens > seqs:
        rope_store(qkv, layer, rows, rope, arena)
        if flash is None or not flash(qkv, layer, rows, arena, out):
            _attend_many(qkv, layer, rows, arena, out, heads)
    if tokens and (seqs > 1 or tokens == 1):
        _attend_single(qkv, layer, rows, rope, arena, arrivals, out, heads)
    return out


def _attend_many(
    qkv: Tensor, layer: Layer, rows: TokenRows, arena: Tensor, out: Tensor, heads: int
) -> None:
    kv, seqs = layer.shape.kv, len(rows.context_len)
    width, tile = qkv.shape[1], _tile(kv.head_dim)
    grid = len(qkv) * (heads // kv.kv_heads) // tile + seqs, kv.kv_heads, 1
    tensors = (
        qkv, arena.view(qkv.dtype), out, rows.q_start, rows.context_len, rows.block_table
    )  # fmt: skip
    numbers = (
        layer.shape.scale * _LOG2_E, seqs, heads, kv.kv_heads, layer.index, width,
        rows.block_table.shape[1], layer.weights.window,
    )  # fmt: skip
    _launch_many(grid, tensors, numbers, (qkv.dtype, width, kv.head_dim))


def _tile(head_dim: int) -> int:
    """Rows of a tile, and keys."""
    return 128 if head_dim <= 128 else 64


def _many_constants(_dtype: torch.dtype, _width: int, dim: int) -> dict[str, Any]:
    return {
        "DIM": dim, "PAD": _pad(dim), "ROWS": _tile(dim), "KEYS": _tile(dim),
        "TOKENS": BLOCK_TOKENS, "num_warps": 8, "num_stages": 2,
    }  # fmt: skip


def _pad(head_dim: int) -> int:
    return max(16, 1 << (head_dim - 1).bit_length())


_launch_many = Launcher(_many_kernel, _many_constants)


def _attend_single(
    qkv: Tensor,
    layer: Layer,
    rows: TokenRows,
    rope: tuple[Tensor, Tensor],
    arena: Tensor,
    arrivals: Arrivals,
    out: Tensor,
    heads: int,
) -> None:
    kv, seqs, blocks = layer.shape.kv, len(rows.context_len), rows.block_table.shape[1]
    dim, width, norms = kv.head_dim, qkv.shape[1], layer.weights.qk_norms
    pieces = -(-blocks * BLOCK_TOKENS // PIECE_TOKENS)
    q_norm, k_norm = norms or rope
    shared = kv.kv_heads * -(-(heads // kv.kv_heads) // _ROWS)
    sums = torch.empty((seqs, heads, pieces, dim), dtype=torch.float32, device=qkv.device)
    tops = torch.empty((seqs, heads, pieces, 2), dtype=torch.float32, device=qkv.device)
    tensors = (
        qkv, rows.positions, *rope, q_norm, k_norm, arena.view(qkv.dtype), rows.slots, out, sums,
        tops, arrivals.hold(seqs * shared), rows.q_start, rows.context_len, rows.block_table,
    )  # fmt: skip
    numbers = (
        layer.shape.eps, layer.shape.scale * _LOG2_E, heads, kv.kv_heads, layer.index, width,
        blocks, layer.weights.window,
    )  # fmt: skip
    key = qkv.dtype, width, dim, norms is not None
    _launch_single((seqs, shared, pieces), tensors, numbers, key)


def _single_constants(_dtype: torch.dtype, _width: int, dim: int, norm: bool) -> dict[str, Any]:
    return {
        "DIM": dim, "PAD": _pad(dim), "ROWS": _ROWS, "KEYS": 64, "PIECE": PIECE_TOKENS,
        "TOKENS": BLOCK_TOKENS, "NORM": norm, "num_warps": 4, "num_stages": 2,
    }  # fmt: skip


_launch_single = Launcher(_single_kernel, _single_constants)
