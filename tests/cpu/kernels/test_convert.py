"""Conversions against torch's, from any address, over every 16-bit pattern."""

import ctypes

import pytest
import torch

from c2cserve.core.tensors import Dtype
from c2cserve.kernels import native
from c2cserve.kernels.native import DTYPE_CODES

TORCH: dict[Dtype, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
ISAS = sorted({native.chosen_isa(), "generic"})


def patterns(dtype: torch.dtype) -> torch.Tensor:
    """Every 16-bit value; for float32 also the ones around each and halfway between two."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32)
    if dtype is not torch.float32:
        return every.to(torch.int16).view(dtype)
    near = [(every << 16) + step for step in (0, 1, 0x7FFF, 0x8000, 0x8001)]
    half = [(every << 13) + 0x38000000 + step for step in (0, 0xFFF, 0x1000, 0x1001)]
    return torch.cat(near + half).view(torch.float32)


def converted(isa: str, source: torch.Tensor, source_type: Dtype, target: Dtype) -> torch.Tensor:
    """Through an odd address, with a guard behind the target."""
    raw = bytes(1) + source.numpy(force=True).tobytes() if source_type != "bfloat16" else (
        bytes(1) + source.view(torch.int16).numpy(force=True).tobytes()
    )  # fmt: skip
    odd = ctypes.create_string_buffer(raw, len(raw))
    out = torch.full((len(source) + 8,), 7.0, dtype=TORCH[target])
    native.load_library(isa).c2c_convert(
        out.data_ptr(), DTYPE_CODES[target], ctypes.addressof(odd) + 1, DTYPE_CODES[source_type],
        len(source),
    )  # fmt: skip
    assert (out[len(source) :] == 7).all()
    return out[: len(source)]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("target", TORCH)
@pytest.mark.parametrize("source", TORCH)
def test_rounds_as_torch_does(isa: str, source: Dtype, target: Dtype) -> None:
    values = patterns(TORCH[source])[:-3]  # not a whole number of vectors
    got, want = converted(isa, values, source, target), values.to(TORCH[target])
    if source == target:
        bits = torch.int32 if source == "float32" else torch.int16
        assert torch.equal(got.view(bits), want.view(bits))
        return
    assert torch.equal(got.isnan(), want.isnan())
    bits = torch.int32 if target == "float32" else torch.int16
    known = ~want.isnan()
    assert torch.equal(got.view(bits)[known], want.view(bits)[known])


def test_the_module_function_needs_no_pool() -> None:
    values = torch.tensor([1.0, -2.5, 3e38])
    out = torch.empty(3, dtype=torch.bfloat16)
    native.convert(out.data_ptr(), "bfloat16", values.data_ptr(), "float32", 3)
    assert torch.equal(out, values.bfloat16())
