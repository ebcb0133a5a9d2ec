"""What launchers refuse, and how they say it.

Tensors here only claim to be on a GPU (torch's fake tensors have shape, strides, dtype and device,
and no memory), so that the checks run without one.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from c2cserve.kernels.gpu.gemm.operands import check, check_boxes
from c2cserve.kernels.gpu.gemm.parameters import MAP, NUMBER, OUTPUT, POINTER, Layout, output
from c2cserve.kernels.gpu.gemm.weight import OperandError, WeightHandle, weight_of

M, N, K = 6, 24, 16
BF16, FP16 = torch.bfloat16, torch.float16
W = WeightHandle(4096, (N, K), "bfloat16", "host")


NO_MEMORY = FakeTensorMode()


def gpu(*shape: int, dtype: torch.dtype = BF16, device: str = "cuda:0") -> Tensor:
    with NO_MEMORY:
        return torch.empty(shape, dtype=dtype, device=device)


def strided(shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    with NO_MEMORY:
        return torch.empty_strided(shape, strides, dtype=BF16, device="cuda:0")


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("with_bias", [False, True])
def test_what_fits_passes(dtype: torch.dtype, *, with_bias: bool) -> None:
    name = "bfloat16" if dtype == BF16 else "float16"
    w = WeightHandle(4096, (N, K), name, "host")
    bias = gpu(N, dtype=dtype) if with_bias else None
    check(gpu(M, K, dtype=dtype), w, bias, gpu(M, N, dtype=dtype))


def test_rows_may_be_apart() -> None:
    check(strided((M, K), (3 * K, 1)), W, None, strided((M, N), (N + 5, 1)))


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"x": lambda: gpu(M, K + 8)}, rf"x is \[6, 24\]: W \[24, 16\] needs \[M, {K}\]"),
        ({"x": lambda: gpu(K)}, r"x is \[16\]: W"),
        ({"x": lambda: gpu(2, M, K)}, r"x is \[2, 6, 16\]"),
        ({"out": lambda: gpu(M, N + 1)}, r"out is \[6, 25\], not \[6, 24\]"),
        ({"out": lambda: gpu(M + 1, N)}, r"out is \[7, 24\], not \[6, 24\]"),
        ({"bias": lambda: gpu(K)}, r"bias is \[16\], not a contiguous \[24\]"),
        ({"bias": lambda: strided((N,), (2,))}, r"bias is \[24\], not a contiguous"),
        ({"bias": lambda: gpu(1, N)}, r"bias is \[1, 24\]"),
        ({"x": lambda: gpu(M, K, dtype=FP16)}, r"x is torch\.float16, W is torch\.bfloat16"),
        ({"out": lambda: gpu(M, N, dtype=torch.float32)}, r"out is torch\.float32, W is"),
        ({"bias": lambda: gpu(N, dtype=torch.float32)}, r"bias is torch\.float32, W is"),
        ({"x": lambda: gpu(M, K, device="cpu")}, "x is on cpu"),
        ({"out": lambda: gpu(M, N, device="cpu")}, "out is on cpu, x on cuda:0"),
        ({"out": lambda: gpu(M, N, device="cuda:1")}, "out is on cuda:1, x on cuda:0"),
        ({"bias": lambda: gpu(N, device="cuda:1")}, "bias is on cuda:1, x on cuda:0"),
        ({"x": lambda: strided((M, K), (1, M))}, "x's last dimension has stride 6, not 1"),
        ({"out": lambda: strided((M, N), (1, M))}, "out's last dimension has stride 6, not 1"),
    ],
)
def test_what_does_not_fit_is_named(changed: dict[str, Any], says: str) -> None:
    made = {name: make() for name, make in changed.items()}
    operands = {"x": gpu(M, K), "bias": None, "out": gpu(M, N), **made}
    with pytest.raises(OperandError, match=says):
        check(operands["x"], W, operands["bias"], operands["out"])


def test_a_gate_takes_half_of_the_rows() -> None:
    check(gpu(M, K), W, gpu(N), gpu(M, N // 2), gated=True)
    check(gpu(M, K), W, None, strided((M, N // 2), (N - 5, 1)), gated=True)
    with pytest.raises(OperandError, match=r"out is \[6, 24\], not \[6, 12\]"):
        check(gpu(M, K), W, None, gpu(M, N), gated=True)
    with pytest.raises(OperandError, match="rows of 12 elements overlap: they are 8 apart"):
        check(gpu(M, K), W, None, strided((M, N // 2), (8, 1)), gated=True)
    odd = WeightHandle(4096, (N + 1, K), "bfloat16", "host")
    with pytest.raises(OperandError, match="a gate and what it gates are as many rows"):
        check(gpu(M, K), odd, None, gpu(M, N // 2), gated=True)


def test_more_rows_than_coordinates_count() -> None:
    rows = 2**31
    with pytest.raises(OperandError, match=f"{rows} rows are too many for 32-bit coordinates"):
        check(gpu(rows, 8), WeightHandle(0, (8, 8), "bfloat16", "host"), None, gpu(rows, 8))
    experts = WeightHandle(0, (512, 2**23, 8), "bfloat16", "host")
    with pytest.raises(OperandError, match="rows are too many"):
        check(gpu(4, 8), experts, None, gpu(4, 2**23), grouped=True)


# What the tensor copy engine can address: these look at addresses, so at tensors that have one.


@pytest.fixture
def memory() -> Tensor:
    """512 zeros that start at a multiple of 64 bytes, as torch's allocators align."""
    return torch.zeros(512, dtype=BF16)


def test_boxes_that_fit(memory: Tensor) -> None:
    check_boxes(memory[: M * K].view(M, K), W)
    check_boxes(torch.as_strided(memory, (M, K), (24, 1)), W)
    check_boxes(torch.as_strided(memory, (1, K), (3, 1)), W)


def test_odd_addresses_are_refused(memory: Tensor) -> None:
    x = memory[: M * K].view(M, K)
    for wrong in (memory[1 : 1 + M * K].view(M, K), memory[4 : 4 + M * K].view(M, K)):
        with pytest.raises(OperandError, match="W and x must start at multiples of 16 bytes"):
            check_boxes(wrong, W)
    with pytest.raises(OperandError, match="W and x must start at multiples of 16 bytes"):
        check_boxes(x, WeightHandle(4098, (N, K), "bfloat16", "host"))
    with pytest.raises(OperandError, match="x's rows are 20 elements apart"):
        check_boxes(torch.as_strided(memory, (M, K), (20, 1)), W)
    with pytest.raises(OperandError, match=r"K = 12 is not a multiple of 8: use `prefetch`"):
        check_boxes(x, WeightHandle(4096, (N, 12), "bfloat16", "host"))


# Handles


@pytest.mark.parametrize("shape", [(), (8,), (1, 2, 3, 4), (0, 8), (4, 0, 8)])
def test_weights_are_matrices_or_stacks_of_them(shape: tuple[int, ...]) -> None:
    with pytest.raises(OperandError, match=r"a weight is \[N, K\] or \[experts, N, K\]"):
        WeightHandle(0, shape, "bfloat16", "host")


def test_sizes_of_handles() -> None:
    assert (W.n, W.k, W.experts, W.rows, W.bytes) == (N, K, 0, N, 2 * N * K)
    stack = WeightHandle(0, (5, N, K), "float16", "peer")
    assert (stack.n, stack.k, stack.experts, stack.rows) == (N, K, 5, 5 * N)
    assert stack.bytes == 5 * W.bytes


def test_handles_of_tensors_are_refused_for_what_they_are() -> None:
    refused = {
        "weights are bfloat16 or float16, not torch.float32": gpu(N, K, dtype=torch.float32),
        "weights are contiguous": strided((N, K), (1, N)),
        "a tensor on cuda:0 is not at home 'host'": gpu(N, K),
        "must be pinned": gpu(N, K, device="cpu"),
    }
    for says, tensor in refused.items():
        with pytest.raises(OperandError, match=says):
            weight_of(tensor, "host")
    with pytest.raises(OperandError, match="a tensor on cpu is not at home 'hbm'"):
        weight_of(gpu(N, K, device="cpu"), "hbm")


# Parameter structs: what the kernel reads must lie where C++ has it


def test_parameters_are_laid_out_as_in_cpp() -> None:
    """DirectParams of direct.cu without its Feed: three tensor maps, an Output, three ints."""
    maps = [bytes([number]) * 128 for number in (1, 2, 3)]
    layout = Layout(x=MAP, w=MAP, slot=MAP, out=OUTPUT, m=NUMBER, n=NUMBER, k=NUMBER)
    data = bytes(layout.pack(*maps, 11, 12, 13, 14, 21, 22, 23))
    assert data[:384] == b"".join(maps)
    assert [int.from_bytes(data[at : at + 8], "little") for at in (384, 392, 400)] == [11, 12, 13]
    assert [int.from_bytes(data[at : at + 4], "little") for at in (408, 412)] == [14, 0]
    assert [int.from_bytes(data[at : at + 4], "little") for at in (416, 420, 424)] == [21, 22, 23]
    assert len(data) >= -(-428 // 64) * 64, "the driver reads whole 64 bytes"


def test_pointers_and_structs_are_aligned() -> None:
    data = bytes(Layout(m=NUMBER, home=POINTER, n=NUMBER).pack(1, 2**40 + 7, 2))
    assert int.from_bytes(data[8:16], "little") == 2**40 + 7
    assert int.from_bytes(data[16:20], "little") == 2
    data = bytes(Layout(m=NUMBER, out=OUTPUT).pack(1, 11, 12, 13, 14))
    assert [int.from_bytes(data[at : at + 8], "little") for at in (0, 8)] == [1, 11]


def test_output_of_a_window(memory: Tensor) -> None:
    window = memory.view(16, 32)[2:6, 8:24]
    bias = memory[:16]
    base = memory.data_ptr()
    assert output(window, bias) == (base + 2 * (2 * 32 + 8), base, 32, 16)
    assert output(window, None)[1] == 0
