"""What a decoder does between its GEMMs and attention, in Triton: norms, activation, embedding.

Activations are 16-bit and contiguous. Norm weights and sums are float32. Every result is rounded
once, and a row's result depends on that row alone. Kernels are not specialised on sizes that change
from step to step. So nothing is compiled once a model is warm (`kernels.gpu.aot.warm`).
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
from c2cserve.kernels.gpu.programmatic_launch import PDL_OPTIONS, after_others

_COLUMNS = 1024
"""The part of a row that one program computes, where a row needs no sum."""


# ---- device code --------------------------------------------------------------------------------


@triton.jit
def _norm_kernel(
    x, residual, weight, out, hidden, eps, ADD: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * hidden
    at = tl.arange(0, BLOCK)
    inside = at < hidden
    scales = tl.load(weight + at, inside, 0.0)  # no kernel writes it
    after_others(PDL)
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
    PDL: tl.constexpr,
):  # fmt: skip
    after_others(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < inner
    gate = tl.load(gate_up + row * 2 * inner + at, inside, 0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * inner + inner + at, inside, 0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * inner + at, value.to(out.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["count"])
def _chained_kernel(
    ids, sampled, out, count, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    after_others(PDL)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    token = tl.load(ids + at, inside, 0)
    late = token < 0
    tl.store(
        out + at, tl.where(late, tl.load(sampled - 1 - token, inside & late, 0), token), inside
    )


@triton.jit(do_not_specialize=["vocab"])
def _embed_kernel(
    ids, table, out, vocab, hidden, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    after_others(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < hidden
    token = tl.load(ids + row).to(tl.int64)
    valid = (token >= 0) & (token < vocab)
    value = tl.load(table + token * hidden + at, inside & valid, float("nan"))
    tl.store(out + row * hidden + at, value, inside)


@triton.jit(do_not_specialize=["count"])
def _combine_kernel(
    y, places, weights, out, count, hidden, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    after_others(PDL)
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
    """Return x [T, H] over its root mean square, times `weight` float32 [H]."""
    return _norm(x, x, weight, eps, add=False)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Do `residual += x` [T, H] in place, rounded. Return the norm of the sum."""
    return _norm(x, residual, weight, eps, add=True)


def _norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, add: bool) -> Tensor:
    out = torch.empty_like(x)
    tokens, hidden = x.shape
    if tokens:
        key = x.dtype, hidden, add
        _launch_norm((tokens, 1, 1), (x, residual, weight, out), (hidden, eps), key)
    return out


def _norm_constants(_dtype: torch.dtype, hidden: int, add: bool) -> dict[str, Any]:
    block = max(16, triton.next_power_of_2(hidden))
    return {"ADD": add, "BLOCK": block, "num_warps": min(16, max(1, block // 512))}


_launch_norm = Launcher(_norm_kernel, _norm_constants)


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return silu of the first half of gate_up [T, 2 I], times the second half -> [T, I]."""
    tokens, width = gate_up.shape
    inner = width // 2
    out = torch.empty((tokens, inner), dtype=gate_up.dtype, device=gate_up.device)
    if tokens:
        grid = tokens, -(-inner // _COLUMNS), 1
        _launch_silu_mul(grid, (gate_up, out), (inner,), (gate_up.dtype, inner))
    return out


def _silu_mul_constants(_dtype: torch.dtype, _inner: int) -> dict[str, Any]:
    return {"BLOCK": _COLUMNS, "num_warps": 4}


_launch_silu_mul = Launcher(_silu_mul_kernel, _silu_mul_constants)


def chained(ids: Tensor, sampled: Tensor) -> Tensor:
    """`Ops.chained`: contiguous `ids` int32 [T] and `sampled` int32 [R] -> int32 [T]."""
    out = torch.empty_like(ids)
    count = len(ids)
    if count:
        _launch_chained((-(-count // _COLUMNS), 1, 1), (ids, sampled, out), (count,), ())
    return out


def _of_columns(*_key: object) -> dict[str, Any]:
    return {"BLOCK": _COLUMNS, "num_warps": 4}


_launch_chained = Launcher(_chained_kernel, _of_columns)


def embed(table: Tensor, ids: Tensor, device: torch.device) -> Tensor:
    """Return rows `ids` (int32 [T], on `device`) of `table` [V, H], as [T, H] on `device`.

    The table is in that GPU's memory, or in host memory registered with CUDA. Only these rows of it
    are read. An id that is not in [0, V) gives a row of NaN, which fails its own request alone.
    """
    vocab, hidden = table.shape
    out = torch.empty((len(ids), hidden), dtype=table.dtype, device=device)
    if len(ids):
        grid = len(ids), -(-hidden // _COLUMNS), 1
        _launch_embed(grid, (ids, table, out), (vocab, hidden), (table.dtype, hidden))
    return out


_launch_embed = Launcher(_embed_kernel, _of_columns)


def combine(y: Tensor, places: Tensor, weights: Tensor, rows: int) -> Tensor:
    """Return each token's weighted sum [rows, H] of the experts' rows y [T k, H].

    The rows of token t are `places[t]`, and their weights `weights[t]` (float32 [T, k]). The sum is
    float32, in that order. Rows from T on are undefined.
    """
    (tokens, count), hidden = places.shape, y.shape[1]
    out = torch.empty((rows, hidden), dtype=y.dtype, device=y.device)
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
            **PDL_OPTIONS,
        )
    return out
