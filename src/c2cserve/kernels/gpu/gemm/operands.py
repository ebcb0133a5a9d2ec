"""Checks of operands before a launch."""

from torch import Tensor

from c2cserve.kernels.gpu.gemm.weight import TORCH_DTYPES, OperandError, WeightHandle

_ALIGNMENT = 16
_ROWS_MAX = 2**31 - 1


def check(
    x: Tensor, w: WeightHandle, bias: Tensor | None, out: Tensor, *, grouped: bool = False,
    gated: bool = False,
) -> None:  # fmt: skip
    """Raise `OperandError` unless the operands fit every dataflow.

        x [M, K]    out [M, N], or [M, N / 2] if `gated`    bias [N]
        W [N, K], or [experts, N, K] if `grouped`

    All have W's dtype, and all but W are on one GPU. Rows of x and out may be strided.
    """
    dtype, n = TORCH_DTYPES[w.dtype], w.n
    columns = n // 2 if gated else n
    if gated and n % 2:
        raise OperandError(f"W is {list(w.shape)}: a gate and what it gates are as many rows")
    if bool(w.experts) != grouped:
        wanted = "[experts, N, K] here" if grouped else "[N, K]: experts' rows need offsets"
        raise OperandError(f"W is {list(w.shape)}, not {wanted}")
    if x.dim() != 2 or x.shape[1] != w.k:
        raise OperandError(f"x is {list(x.shape)}: W {list(w.shape)} needs [M, {w.k}]")
    if out.shape != (x.shape[0], columns):
        raise OperandError(f"out is {list(out.shape)}, not [{x.shape[0]}, {columns}]")
    if bias is not None and (bias.shape != (n,) or not bias.is_contiguous()):
        raise OperandError(f"bias is {list(bias.shape)}, not a contiguous [{n}]")
    for name, tensor in (("x", x), ("out", out), ("bias", bias)):
        if tensor is None:
            continue
        if tensor.dtype != dtype:
            raise OperandError(f"{name} is {tensor.dtype}, W is {dtype}")
        if tensor.device.type != "cuda" or tensor.device != x.device:
            raise OperandError(f"{name} is on {tensor.device}, x on {x.device}: one GPU, please")
        if tensor.stride(-1) != 1:
            raise OperandError(f"{name}'s last dimension has stride {tensor.stride(-1)}, not 1")
    if out.shape[0] > 1 and out.stride(0) < columns:
        raise OperandError(
            f"out's rows of {columns} elements overlap: they are {out.stride(0)} apart"
        )
    if max(x.shape[0], w.rows) > _ROWS_MAX:
        raise OperandError(f"{max(x.shape[0], w.rows)} rows are too many for 32-bit coordinates")


def check_boxes(x: Tensor, w: WeightHandle) -> None:
    """Raise `OperandError` unless rows of x and W begin at multiples of 16 bytes, as TMA needs."""
    if w.k % 8:
        raise OperandError(f"K = {w.k} is not a multiple of 8: use `prefetch` or `resident`")
    if w.pointer % _ALIGNMENT or x.data_ptr() % _ALIGNMENT:
        raise OperandError("W and x must start at multiples of 16 bytes")
    if x.shape[0] > 1 and x.stride(0) % 8:
        raise OperandError(f"x's rows are {x.stride(0)} elements apart, not a multiple of 8")
