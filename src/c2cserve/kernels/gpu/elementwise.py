"""What a decoder does between its GEMMs, in Triton: norms, activation, embedding, rotation, KV.

Activations are 16-bit and contiguous, vectors (norm weights, rotary tables) float32, sums float32;
every result is rounded once. A row's result depends on nothing but the row. Sizes that change from
step to step are not specialised on, so that once a model is warm nothing is compiled
(`kernels.gpu.warm`).
"""

# Device code is Triton's language, with its own types and its constants in capitals.
# pyright: basic, reportCallIssue=false
# ruff: noqa: N803

import torch
import triton
import triton.language as tl
from torch import Tensor

from c2cserve.kernels.gpu.early import EARLY, after_others
from c2cserve.kernels.layer import BLOCK_TOKENS, KvLayout

_COLUMNS = 1024
"""A program's share of a row where a row needs no sum."""
_HEADS = 8
"""A program's share of a token's heads."""


# ---- device code --------------------------------------------------------------------------------


@triton.jit
def _norm_kernel(
    x, residual, weight, out, hidden, eps, ADD: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * hidden
    at = tl.arange(0, BLOCK)
    inside = at < hidden
    scales = tl.load(weight + at, inside, 0.0)  # no kernel writes it
    after_others(EARLY)
    value = tl.load(x + start + at, inside, 0.0)
    if ADD:
        before = tl.load(residual + start + at, inside, 0.0)
        value = (before.to(tl.float32) + value.to(tl.float32)).to(value.dtype)
        tl.store(residual + start + at, value, inside)
    value = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / hidden + eps)
    scaled = value * scale * scales
    tl.store(out + start + at, scaled.to(out.dtype.element_ty), inside)


@triton.jit
def _silu_mul_kernel(
    gate_up, out, inner, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    after_others(EARLY)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < inner
    gate = tl.load(gate_up + row * 2 * inner + at, inside, 0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * inner + inner + at, inside, 0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * inner + at, value.to(out.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["count"])
def _chained_kernel(
    ids, drawn, out, count, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    after_others(EARLY)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    known = tl.load(ids + at, inside, 0)
    late = known < 0
    tl.store(out + at, tl.where(late, tl.load(drawn - 1 - known, inside & late, 0), known), inside)


@triton.jit(do_not_specialize=["vocab"])
def _embed_kernel(
    table, ids, out, vocab, hidden, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    after_others(EARLY)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < hidden
    token = tl.load(ids + row).to(tl.int64)
    known = (token >= 0) & (token < vocab)
    value = tl.load(table + token * hidden + at, inside & known, float("nan"))
    tl.store(out + row * hidden + at, value, inside)


@triton.jit(do_not_specialize=["heads", "kv_heads", "layer"])
def _rope_store_kernel(
    qkv, positions, cos, sin, q_norm, k_norm, arena, slots, eps, heads, kv_heads, layer, width,
    DIM: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr, NORM: tl.constexpr,
    HEADS: tl.constexpr, TOKENS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    after_others(EARLY)
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    at = tl.arange(0, HALF_PAD)[None, :]
    turned = head < heads + kv_heads
    inside = (head < heads + 2 * kv_heads) & (at < HALF)
    first = qkv + token * width + head * DIM + at
    a = tl.load(first, inside, 0.0).to(tl.float32)
    b = tl.load(first + HALF, inside, 0.0).to(tl.float32)
    if NORM:
        is_query, half = head < heads, at < HALF
        squares = tl.sum(a * a, 1) + tl.sum(b * b, 1)
        scale = tl.rsqrt(squares / DIM + eps)[:, None]
        low = tl.where(is_query, tl.load(q_norm + at, half), tl.load(k_norm + at, half))
        high = tl.where(
            is_query, tl.load(q_norm + HALF + at, half), tl.load(k_norm + HALF + at, half)
        )
        a = tl.where(turned, a * scale * low, a)
        b = tl.where(turned, b * scale * high, b)
    angle = tl.load(positions + token).to(tl.int64) * HALF + at
    c = tl.where(turned, tl.load(cos + angle, at < HALF, 0.0), 1.0)
    s = tl.where(turned, tl.load(sin + angle, at < HALF, 0.0), 0.0)
    low = (a * c - b * s).to(qkv.dtype.element_ty)
    high = (b * c + a * s).to(qkv.dtype.element_ty)
    tl.store(first, low, inside & turned)
    tl.store(first + HALF, high, inside & turned)
    slot = tl.load(slots + token)
    block, place = slot // TOKENS // 2, slot % TOKENS
    # Planes of a block: [layer][k, v][kv head], so v's heads follow k's as they do in qkv.
    plane = layer * 2 * kv_heads + head - heads
    kept = arena + tl.multiple_of(block, 8) + ((plane * TOKENS + place) * DIM + at)
    tl.store(kept, low, inside & (head >= heads))
    tl.store(kept + HALF, high, inside & (head >= heads))


@triton.jit(do_not_specialize=["count"])
def _combine_kernel(
    y, places, weights, out, count, hidden, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    after_others(EARLY)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < hidden
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in range(count):
        place = tl.load(places + row * count + choice).to(tl.int64)
        weight = tl.load(weights + row * count + choice)
        total += weight * tl.load(y + place * hidden + at, inside, 0.0).to(tl.float32)
    tl.store(out + row * hidden + at, total.to(out.dtype.element_ty), inside)


# ---- launchers ----------------------------------------------------------------------------------


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [T, H] over its root mean square, times weight float32 [H]."""
    return _norm(x, x, weight, eps, add=False)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`residual += x` [T, H], rounded, in place; returns the norm of the sum."""
    return _norm(x, residual, weight, eps, add=True)


def _norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, add: bool) -> Tensor:
    out = torch.empty_like(x)
    tokens, hidden = x.shape
    block = max(16, triton.next_power_of_2(hidden))
    if tokens:
        _norm_kernel[(tokens,)](
            x, residual, weight, out, hidden, eps, ADD=add, BLOCK=block,
            num_warps=min(16, max(1, block // 512)), **EARLY,
        )  # fmt: skip
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu of the first half of gate_up [T, 2 I] times the second half -> [T, I]."""
    tokens, width = gate_up.shape
    inner = width // 2
    out = torch.empty((tokens, inner), dtype=gate_up.dtype, device=gate_up.device)
    if tokens:
        _silu_mul_kernel[(tokens, -(-inner // _COLUMNS))](
            gate_up,
            out,
            inner,
            BLOCK=_COLUMNS,
            num_warps=4,
            **EARLY,
        )
    return out


def chained(ids: Tensor, drawn: Tensor) -> Tensor:
    """`Ops.chained`: int32 [T], of contiguous int32 [T] and [R]."""
    out = torch.empty_like(ids)
    if len(ids):
        _chained_kernel[(-(-len(ids) // _COLUMNS),)](
            ids, drawn, out, len(ids), BLOCK=_COLUMNS, num_warps=4, **EARLY
        )
    return out


def embed(table: Tensor, ids: Tensor, device: torch.device) -> Tensor:
    """Rows `ids` (int32 [T], on `device`) of `table` [V, H] -> [T, H] on `device`. The table is in
    that GPU's memory or in host memory registered with CUDA; of that only these rows are read. An
    id that is not in [0, V) gives a row of NaN: its request fails, and nothing else."""
    vocab, hidden = table.shape
    out = torch.empty((len(ids), hidden), dtype=table.dtype, device=device)
    if len(ids):
        _embed_kernel[(len(ids), -(-hidden // _COLUMNS))](
            table,
            ids,
            out,
            vocab,
            hidden,
            BLOCK=_COLUMNS,
            num_warps=4,
            **EARLY,
        )
    return out


def rope_store(
    qkv: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    arena: Tensor,
    kv: KvLayout,
    layer: int,
    slots: Tensor,
) -> None:
    """`Ops.rope_store`. In a block, keys and values lie alike: [16, head_dim]."""
    dim, tokens = kv.head_dim, len(qkv)
    heads = qkv.shape[1] // dim - 2 * kv.kv_heads
    q_norm, k_norm = norms or (cos, cos)
    if tokens:
        _rope_store_kernel[(tokens, -(-(heads + 2 * kv.kv_heads) // _HEADS))](
            qkv, positions, cos, sin, q_norm, k_norm, arena.view(qkv.dtype), slots, eps, heads,
            kv.kv_heads, layer, qkv.shape[1], DIM=dim, HALF=dim // 2,
            HALF_PAD=triton.next_power_of_2(dim // 2), NORM=norms is not None, HEADS=_HEADS,
            TOKENS=BLOCK_TOKENS, num_warps=2, **EARLY,
        )  # fmt: skip


def combine(y: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """Experts' rows y [T k, H] -> [T, H]: token t's are `places` [t], each times its weight
    (float32 [T, k]), summed in float32 in that order."""
    (tokens, count), hidden = places.shape, y.shape[1]
    out = torch.empty((tokens, hidden), dtype=y.dtype, device=y.device)
    if tokens:
        _combine_kernel[(tokens, -(-hidden // _COLUMNS))](
            y,
            places,
            weights,
            out,
            count,
            hidden,
            BLOCK=_COLUMNS,
            num_warps=4,
            **EARLY,
        )
    return out
