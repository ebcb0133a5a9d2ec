"""Causal attention of new tokens over a paged cache, in Triton. One call takes any lengths.

    several new tokens   `_many_kernel`     a program: a tile of rows
    one new token        `_single_kernel`   a program: a piece of the context

A row is a query head of a token. The heads that share a key head lie side by side, so that grouped
queries fill a tile. Pieces have a fixed length, so a row's result does not depend on the batch, and
few sequences fill the GPU. A program of `_single_kernel` rotates its own heads' queries. The
program of the last piece rotates and stores the new key. The last program to end merges the pieces,
in their order. So a decode step launches one kernel between two GEMMs.

A block holds [layer, k | v, kv_head, 16, head_dim]. A block table has the byte offsets of blocks.
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
"""The part of a context that one program of a single new token reads. It must not depend on the
batch."""
_ROWS = 16
"""Heads of a program: the fewest rows that tensor cores take."""
_ARRIVALS = 1 << 14
"""The initial number of counters: more than the 64 sequences of a graph need."""
_LOG2_E = math.log2(math.e)


# ---- device code --------------------------------------------------------------------------------


@triton.jit
def _visit(
    sums, tops, totals, q, seen_from, seen_to, table, keys_at, values_at, first, stop, length,
    scale_log2, DIM: tl.constexpr, PAD: tl.constexpr, KEYS: tl.constexpr, TOKENS: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Continue an online softmax over keys [first, stop). A row sees [seen_from, seen_to]."""
    at = tl.arange(0, PAD)
    for start in range(first, stop, KEYS):
        key = start + tl.arange(0, KEYS)
        valid = key < length
        if MASKED:
            block = tl.load(table + key // TOKENS, valid, 0)
        else:
            block = tl.load(table + key // TOKENS)
        row = tl.multiple_of(block // 2, 8) + (key % TOKENS) * DIM
        k_at = keys_at + row[None, :] + at[:, None]
        v_at = values_at + row[:, None] + at[None, :]
        if MASKED:
            # Memory behind the last token may hold NaN, and 0 times NaN is NaN.
            k = tl.load(k_at, valid[None, :] & (at < DIM)[:, None], 0.0)
            v = tl.load(v_at, valid[:, None] & (at < DIM)[None, :], 0.0)
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
        # Masked or not depends on the other rows of a tile, so both round once, and alike.
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
    """Attention of sequences of several new tokens. A program computes ROWS rows of one sequence,
    for one key head."""
    after_others(PDL)
    # Late tiles see most keys, so they start first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    group = heads // kv_heads
    # Find the last sequence whose first tile is not later. First tiles are rounded down, and each
    # sequence has one tile more, so that no two share a tile.
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
    # All rows see all keys before this one.
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
    """Store the new key, which is at `k_at` in qkv, rotated, and its value into the cache.

    This program reads them there. If several programs share a key head, all store the same.
    """
    at = tl.arange(0, PAD)[None, :]
    inside = at < DIM
    k = rotated(k_at, inside, cos, sin, norm, eps, DIM, PAD, NORM).to(kept.dtype.element_ty)
    v = tl.load(k_at + kv_heads * DIM + at, inside, 0.0)
    tl.store(kept + at, k, inside)
    tl.store(kept + kv_heads * TOKENS * DIM + at, v, inside)
    tl.debug_barrier()  # other threads read what these store


@triton.jit
def _is_last(arrived, count):
    """Return whether this is the last of `count` programs to arrive. It can read what the others
    stored before. `arrived` is 0 again once all have arrived."""
    tl.debug_barrier()  # the stores of all threads come before the program's arrival
    last = tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu") == count - 1
    if last:
        tl.store(arrived, 0)
    return last


@triton.jit
def _merged(
    partial_sums, partial_tops, kept, real, first, stop, DIM: tl.constexpr, PAD: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Return rows [ROWS, PAD] of attention, merged from their pieces [first, stop) in order."""
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
    """Attention of sequences of one new token. A program reads one piece of the context, for up to
    ROWS of the heads that share a key head."""
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
        # Loaded again rather than kept: the loops need one register less.
        token = tl.load(q_start + seq).to(tl.int64)
        out_at = out + ((token * heads + head) * DIM)[:, None] + at
        tl.store(out_at, result.to(out.dtype.element_ty), inside)


# ---- launcher -----------------------------------------------------------------------------------


class Arrivals:
    """Counters of the programs that share a sequence's heads. All are 0 between two launches, so
    that graphs can be replayed. Launches that share them run one after another."""

    def __init__(self, device: torch.device) -> None:
        self._counts = [torch.zeros(_ARRIVALS, dtype=torch.int32, device=device)]

    def hold(self, count: int) -> Tensor:
        """Return at least `count` counters. Earlier ones keep their address, which graphs hold."""
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
    """`Ops.attend`: qkv [P, (Hq + 2 Hkv) D] of the cache's 16-bit dtype -> [P, Hq D].

    Rows after the T of `rows` are padding, and undefined in the result. The contents of `qkv` are
    undefined afterwards. `flash` is tried first for sequences of several new tokens.
    """
    (padded, width), seqs = qkv.shape, rows.context_len.shape[0]
    tokens = rows.positions.shape[0]
    dim, kv_heads = layer.shape.kv.head_dim, layer.shape.kv.kv_heads
    heads = width // dim - 2 * kv_heads
    out = torch.empty((padded, heads * dim), dtype=qkv.dtype, device=qkv.device)
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
    kv, seqs = layer.shape.kv, rows.context_len.shape[0]
    tokens, width, tile = rows.positions.shape[0], qkv.shape[1], _tile(kv.head_dim)
    grid = tokens * (heads // kv.kv_heads) // tile + seqs, kv.kv_heads, 1
    tensors = (
        qkv, arena.view(qkv.dtype), out, rows.q_start, rows.context_len, rows.block_table
    )  # fmt: skip
    numbers = (
        layer.shape.scale * _LOG2_E, seqs, heads, kv.kv_heads, layer.index, width,
        rows.block_table.shape[1], layer.weights.window,
    )  # fmt: skip
    _launch_many(grid, tensors, numbers, (qkv.dtype, width, kv.head_dim))


def _tile(head_dim: int) -> int:
    """Return the number of rows in a tile, and of keys."""
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
    kv, (seqs, blocks) = layer.shape.kv, rows.block_table.shape
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
