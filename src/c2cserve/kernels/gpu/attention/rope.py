"""Norms of heads, rotary embedding, and storing keys and values into the cache, in Triton.

If a sequence has several new tokens, this kernel rotates them in place. A sequence's only new token
is rotated by the attention that reads it (`kernels.gpu.attention.paged`). Both give the same bits:
products are fused and squares are summed in one way, for every shape of a tile.
"""

# Device code is Triton's language, with its own types and its constants in capitals.
# pyright: basic, reportCallIssue=false
# ruff: noqa: N803

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from c2cserve.kernels.gpu.launcher import Launcher
from c2cserve.kernels.gpu.programmatic_launch import after_others
from c2cserve.kernels.layer import BLOCK_TOKENS, Layer, TokenRows

_HEADS = 8
"""A program's share of a token's heads."""


# ---- device code --------------------------------------------------------------------------------


@triton.jit
def squares(x):
    """Return the sum of squares of each row of x [R, N], in float64.

    The order of a sum depends on the shape of a tile. Rounding from float64 to float32 removes the
    difference.
    """
    wide = x.to(tl.float64)
    return tl.sum(wide * wide, 1)


@triton.jit
def inverse_rms(sums, eps, DIM: tl.constexpr):
    """Return the scale of heads of DIM elements, from their `squares`."""
    return tl.rsqrt(sums.to(tl.float32) / DIM + eps)[:, None]


@triton.jit
def rotated(
    heads, inside, cos, sin, norm, eps, DIM: tl.constexpr, PAD: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Return the heads at addresses [R, 1], normed and rotated, as float32 [R, PAD].

    cos and sin are [1, PAD], the same for both halves of a head.
    """
    at = tl.arange(0, PAD)[None, :]
    other = (at + DIM // 2) % DIM
    mine = tl.load(heads + at, inside, 0.0).to(tl.float32)
    theirs = tl.load(heads + other, inside, 0.0).to(tl.float32)
    if NORM:
        scale = inverse_rms(squares(mine), eps, DIM)
        mine = mine * scale * tl.load(norm + at, at < DIM, 0.0)
        theirs = theirs * scale * tl.load(norm + other, at < DIM, 0.0)
    return tl.fma(mine, cos, tl.where(at < DIM // 2, -theirs, theirs) * sin)


@triton.jit
def _comes_alone(q_start, seqs, token):
    """Return whether a token is the only new one of its sequence. Its sequence is the last one that
    does not begin after it."""
    seq, past = seqs * 0, seqs
    while past - seq > 1:
        middle = (seq + past) // 2
        if tl.load(q_start + middle) <= token:
            seq = middle
        else:
            past = middle
    return tl.load(q_start + seq + 1) - tl.load(q_start + seq) == 1


@triton.jit(do_not_specialize=["seqs", "heads", "kv_heads", "layer"])
def _rope_store_kernel(
    qkv, positions, cos, sin, q_norm, k_norm, arena, slots, q_start, eps, seqs, heads, kv_heads,
    layer, width, DIM: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr,
    NORM: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    after_others(PDL)
    if _comes_alone(q_start, seqs, tl.program_id(0)):
        return
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    at = tl.arange(0, HALF_PAD)[None, :]
    is_rotated = head < heads + kv_heads
    inside = (head < heads + 2 * kv_heads) & (at < HALF)
    first = qkv + token * width + head * DIM + at
    a = tl.load(first, inside, 0.0).to(tl.float32)
    b = tl.load(first + HALF, inside, 0.0).to(tl.float32)
    if NORM:
        is_query, half = head < heads, at < HALF
        scale = inverse_rms(squares(a) + squares(b), eps, DIM)
        low = tl.where(is_query, tl.load(q_norm + at, half), tl.load(k_norm + at, half))
        high = tl.where(
            is_query, tl.load(q_norm + HALF + at, half), tl.load(k_norm + HALF + at, half)
        )
        a = tl.where(is_rotated, a * scale * low, a)
        b = tl.where(is_rotated, b * scale * high, b)
    angle = tl.load(positions + token).to(tl.int64) * HALF + at
    c = tl.where(is_rotated, tl.load(cos + angle, at < HALF, 0.0), 1.0)
    s = tl.where(is_rotated, tl.load(sin + angle, at < HALF, 0.0), 0.0)
    low = tl.fma(a, c, -b * s).to(qkv.dtype.element_ty)
    high = tl.fma(b, c, a * s).to(qkv.dtype.element_ty)
    tl.store(first, low, inside & is_rotated)
    tl.store(first + HALF, high, inside & is_rotated)
    slot = tl.load(slots + token)
    block, place = slot // TOKENS // 2, slot % TOKENS
    # Planes of a block: [layer][k, v][kv head], so v's heads follow k's as they do in qkv.
    plane = layer * 2 * kv_heads + head - heads
    kept = arena + tl.multiple_of(block, 8) + ((plane * TOKENS + place) * DIM + at)
    tl.store(kept, low, inside & (head >= heads))
    tl.store(kept + HALF, high, inside & (head >= heads))


# ---- launcher -----------------------------------------------------------------------------------


def rope_store(
    qkv: Tensor, layer: Layer, rows: TokenRows, rope: tuple[Tensor, Tensor], arena: Tensor
) -> None:
    """Rotate q and k of qkv [T, (Hq + 2 Hkv) D] in place, and write k and v into the arena.

    If the layer has norms of heads, they come first. Rows after the T of `rows` are padding and are
    left alone. Tokens that are the only new one of their
    sequence are left out. In a block, keys and values have the same layout: [16, head_dim].
    """
    kv, norms = layer.shape.kv, layer.weights.qk_norms
    dim, tokens, width = kv.head_dim, rows.positions.shape[0], qkv.shape[1]
    heads = width // dim - 2 * kv.kv_heads
    q_norm, k_norm = norms or rope
    if tokens:
        grid = tokens, -(-(heads + 2 * kv.kv_heads) // _HEADS), 1
        tensors = (
            qkv, rows.positions, *rope, q_norm, k_norm, arena.view(qkv.dtype), rows.slots,
            rows.q_start,
        )  # fmt: skip
        numbers = (
            layer.shape.eps, rows.context_len.shape[0], heads, kv.kv_heads, layer.index, width
        )  # fmt: skip
        _launch(grid, tensors, numbers, (qkv.dtype, width, dim, norms is not None))


def _constants(_dtype: torch.dtype, _width: int, dim: int, norm: bool) -> dict[str, Any]:
    return {
        "DIM": dim, "HALF": dim // 2, "HALF_PAD": triton.next_power_of_2(dim // 2), "NORM": norm,
        "HEADS": _HEADS, "TOKENS": BLOCK_TOKENS, "num_warps": 2,
    }  # fmt: skip


_launch = Launcher(_rope_store_kernel, _constants)
