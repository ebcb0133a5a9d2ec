"""Sampling parameters in the native kernels' layout, and their results as Python lists."""

from collections.abc import Sequence
from ctypes import Array, c_float, c_int32

import torch
from torch import Tensor

from c2cserve.kernels.native import SAMPLE_ROW
from c2cserve.kernels.ops import RowSampling, SampledTokens

_U64 = (1 << 64) - 1


def _ids(tensor: Tensor | None, dtype: torch.dtype = torch.int32) -> tuple[int, int]:
    """Return the address and length of a tensor; zeros if there is none. Raises `ValueError` for
    another dtype or strides."""
    if tensor is None or not len(tensor):
        return 0, 0
    if tensor.dtype is not dtype or not tensor.is_contiguous():
        raise ValueError(f"sample: a dense {dtype} tensor is needed, not {tensor.dtype}")
    return tensor.data_ptr(), len(tensor)


def pack_rows(logits: Tensor, rows: Sequence[RowSampling]) -> bytes:
    """Return the rows as an array of sample.h's `SampleRow`. The tensors of `rows` must outlive the
    call that uses it."""
    vocab, at = logits.shape[1], logits.data_ptr()
    packed = bytearray(SAMPLE_ROW.size * len(rows))
    none = (0, 0)
    for i, row in enumerate(rows):
        prompt = none if row.prompt is None else _ids(row.prompt)
        output = none if row.output is None else _ids(row.output)
        banned = none if row.banned is None else _ids(row.banned)
        bias_ids = bias = none
        if row.bias_ids is not None or row.bias is not None:
            bias_ids, bias = _ids(row.bias_ids), _ids(row.bias, torch.float32)
            if bias_ids[1] != bias[1]:
                raise ValueError(f"sample: {bias_ids[1]} bias ids and {bias[1]} values")
        mask = none if row.mask is None else _ids(row.mask)
        if row.mask is not None and mask[1] != -(-vocab // 32):
            raise ValueError(f"sample: a mask of {mask[1]} words for {vocab} tokens")
        SAMPLE_ROW.pack_into(
            packed, i * SAMPLE_ROW.size,
            at + i * vocab * 4, prompt[0], output[0], bias_ids[0], bias[0], banned[0],
            mask[0],
            prompt[1], output[1], bias[1], banned[1],
            row.seed & _U64, row.position, row.top_k, min(vocab, row.top_logprobs),
            row.temperature, row.top_p, row.min_p, row.repetition, row.presence, row.frequency,
        )  # fmt: skip
    return bytes(packed)


def unpack_tokens(
    rows: Sequence[RowSampling],
    vocab: int,
    stride: int,
    ids: Array[c_int32],
    logprobs: Array[c_float],
    top_ids: Array[c_int32],
    top_values: Array[c_float],
) -> SampledTokens:
    """Return the native results as lists. Each row has `stride` entries of the top arrays."""
    if all(row.top_logprobs < 1 for row in rows):
        return SampledTokens(list(ids), list(logprobs))
    top: list[list[tuple[int, float]]] = []
    for i, row in enumerate(rows):
        begin = i * stride
        end = begin + max(0, min(vocab, row.top_logprobs))
        top.append(list(zip(top_ids[begin:end], top_values[begin:end], strict=True)))
    return SampledTokens(list(ids), list(logprobs), top)
