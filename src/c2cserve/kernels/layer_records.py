"""Layers and steps as the records of decoder.h. A layer's is made once, a step's for each call."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from c2cserve.kernels.layer import Experts, Layer, LayerShape, LayerWeights, TokenRows
from c2cserve.kernels.native import DTYPE_CODES
from c2cserve.kernels.refusals import misplaced_sequence, misplaced_token

HEAD_DIM_MAX = 512
DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}

_MATRIX = "2Q2q"
_LAYER = struct.Struct(f"=3q4Q{_MATRIX * 5}2Q3q")
"""`LayerRecord`: index, dtype, window; input, post, q and k norms; qkv, o, gate_up, down, router;
w13 and w2; inner, per_token, renormalize."""

_STEP = struct.Struct("=Q3q5Q2q2QqQ5q2fQq")
"""`StepRecord`: hidden; tokens, width, heads; positions, slots, q_start, context_len, block_table;
table_stride, seqs; cos, sin; rope_rows; arena; arena_bytes, kv dtype, layers, kv_heads, head_dim;
eps, scale. Then wanted rows and their number."""

_NO_MATRIX = (0, 0, 0, 0)
_TOKEN, _SEQUENCE, _ROW = 1, 2, 4
"""Three of the `Fault`s of decoder.h."""


@dataclass(frozen=True, slots=True)
class NativeLayer(Layer):
    record: bytes
    """Points into the tensors of `weights`."""


def native_layer(index: int, weights: LayerWeights, shape: LayerShape) -> NativeLayer:
    """Raises ValueError if the tensors do not make a layer of this shape."""
    kv, width, dim = shape.kv, shape.hidden, shape.kv.head_dim
    if not (
        0 <= index < kv.layers
        and 0 < dim <= HEAD_DIM_MAX
        and dim % 2 == 0
        and shape.heads > 0
        and shape.heads % kv.kv_heads == 0
        and all(_is_vector(norm, width) for norm in (weights.input_norm, weights.post_norm))
        and all(_is_vector(norm, dim) for norm in weights.qk_norms or ())
    ):
        raise ValueError(f"layer {index}: its place, heads or norms do not fit {shape}")
    check = _Matrices(index, weights.qkv.dtype)
    attended = shape.heads * dim
    qkv_rows = attended + 2 * kv.kv_heads * dim
    q_norm, k_norm = (n.data_ptr() for n in weights.qk_norms) if weights.qk_norms else (0, 0)
    record = _LAYER.pack(
        index, DTYPES[weights.qkv.dtype], weights.window,
        weights.input_norm.data_ptr(), weights.post_norm.data_ptr(), q_norm, k_norm,
        *check.matrix(weights.qkv, weights.qkv_bias, qkv_rows, width),
        *check.matrix(weights.o, weights.o_bias, width, attended),
        *_second_half(check, weights, width),
    )  # fmt: skip
    return NativeLayer(index, weights, shape, record)


def _second_half(check: "_Matrices", weights: LayerWeights, width: int) -> tuple[int, ...]:
    mlp = weights.mlp
    if isinstance(mlp, Experts):
        count, _, inner = mlp.w2.shape
        router = check.matrix(mlp.router, None, count, width)
        stacks = (
            check.stack(mlp.w13, (count, 2 * inner, width)),
            check.stack(mlp.w2, (count, width, inner)),
        )
        if not 1 <= mlp.per_token <= count:
            raise ValueError(f"layer {check.index}: {mlp.per_token} of {count} experts")
        chosen = (inner, mlp.per_token, int(mlp.renormalize))
        return (*_NO_MATRIX, *_NO_MATRIX, *router, *stacks, *chosen)
    inner = mlp.down.shape[1]
    gate_up = check.matrix(mlp.gate_up, mlp.gate_up_bias, 2 * inner, width)
    down = check.matrix(mlp.down, mlp.down_bias, width, inner)
    return (*gate_up, *down, *_NO_MATRIX, 0, 0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class _Matrices:
    """Checks a layer's matrices: dense, of one dtype, of the shapes that fit each other."""

    index: int
    dtype: torch.dtype

    def matrix(
        self, w: Tensor, bias: Tensor | None, rows: int, columns: int
    ) -> tuple[int, int, int, int]:
        if bias is not None and not _is_vector(bias, rows):
            raise ValueError(f"layer {self.index}: a bias of {rows} float32 was expected")
        at = self.stack(w, (rows, columns))
        return at, 0 if bias is None else bias.data_ptr(), rows, columns

    def stack(self, w: Tensor, shape: tuple[int, ...]) -> int:
        if w.shape != shape or w.dtype is not self.dtype or not w.is_contiguous() or 0 in shape:
            raise ValueError(
                f"layer {self.index}: {w.dtype}{list(w.shape)} where dense "
                f"{self.dtype}{list(shape)} was expected"
            )
        return w.data_ptr()


def _is_vector(tensor: Tensor, length: int) -> bool:
    return tensor.shape == (length,) and tensor.dtype is torch.float32 and tensor.is_contiguous()


def records_of(layers: Sequence[Layer]) -> bytes:
    """Raises ValueError unless these are layers of one model, made by `native_layer`."""
    records: list[bytes] = []
    for layer in layers:
        if not isinstance(layer, NativeLayer) or layer.shape is not layers[0].shape:
            raise ValueError(f"layer {layer.index} is of another model, or of other operators")
        records.append(layer.record)
    return b"".join(records)


def step_record(
    hidden: Tensor, shape: LayerShape, rows: TokenRows, rope: tuple[Tensor, Tensor], arena: Tensor,
    wanted: Tensor | None = None,
) -> bytes:  # fmt: skip
    """Raises ValueError if the tensors do not make a step of a model of this shape."""
    kv, (cos, sin) = shape.kv, rope
    tokens, seqs = hidden.shape[0], rows.context_len.shape[0]  # len() of a tensor takes 1.8 us
    table, arena_bytes = (cos.shape[0], kv.head_dim // 2), arena.nbytes
    expected: tuple[tuple[Tensor, torch.dtype, tuple[int, ...]], ...] = (
        (hidden, torch.float32, (tokens, shape.hidden)),
        (rows.positions, torch.int32, (tokens,)),
        (rows.slots, torch.int64, (tokens,)),
        (rows.q_start, torch.int32, (seqs + 1,)),
        (rows.context_len, torch.int32, (seqs,)),
        (rows.block_table, torch.int64, (seqs, rows.block_table.shape[-1])),
        (cos, torch.float32, table),
        (sin, torch.float32, table),
        (arena, torch.uint8, (arena_bytes,)),
    )
    wanted_at, wanted_rows = 0, 0
    if wanted is not None:
        wanted_at, wanted_rows = wanted.data_ptr(), wanted.shape[0]
        expected = (*expected, (wanted, torch.int64, (wanted_rows,)))
    for tensor, dtype, size in expected:
        if tensor.dtype is not dtype or tensor.shape != size or not tensor.is_contiguous():
            raise ValueError(
                f"step: {tensor.dtype}{list(tensor.shape)} strides {list(tensor.stride())} where "
                f"dense {dtype}{list(size)} was expected"
            )
    return _STEP.pack(
        hidden.data_ptr(), tokens, shape.hidden, shape.heads,
        rows.positions.data_ptr(), rows.slots.data_ptr(), rows.q_start.data_ptr(),
        rows.context_len.data_ptr(), rows.block_table.data_ptr(), rows.block_table.shape[1], seqs,
        cos.data_ptr(), sin.data_ptr(), table[0],
        arena.data_ptr(), arena_bytes, DTYPE_CODES[kv.dtype], kv.layers, kv.kv_heads, kv.head_dim,
        shape.eps, shape.scale, wanted_at, wanted_rows,
    )  # fmt: skip


def refusal(
    fault: int, where: int, layer: Layer, rows: TokenRows, rope: tuple[Tensor, Tensor],
    arena: Tensor,
) -> ValueError:  # fmt: skip
    """A `Fault` of decoder.h in words."""
    if fault == _TOKEN:
        return misplaced_token("layers", where, rows.positions, len(rope[0]), rows.slots, arena)
    if fault == _SEQUENCE:
        tokens = len(rows.positions)
        return misplaced_sequence("layers", where, rows.context_len, tokens, arena)
    if fault == _ROW:
        count = len(rows.positions)
        return ValueError(f"layers: row {where} is wanted: not one of {count} in order")
    return ValueError(f"layers: token {where} chose an expert twice: its values are not numbers")
