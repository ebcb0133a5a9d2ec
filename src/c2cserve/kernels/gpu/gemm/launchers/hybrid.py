"""sym, asym and hybrid: the dataflows of C2CServe (Algorithm 1), for comparison."""

import torch
from torch import Tensor

from c2cserve.kernels.gpu.aot.variants import Variant
from c2cserve.kernels.gpu.driver import stack_map, tensor_map
from c2cserve.kernels.gpu.gemm.operands import check, check_boxes
from c2cserve.kernels.gpu.gemm.parameters import HYBRID, output
from c2cserve.kernels.gpu.gemm.traffic import BW, Tiles, sym_columns
from c2cserve.kernels.gpu.gemm.weight import OperandError, WeightHandle
from c2cserve.kernels.gpu.launch_context import LaunchContext


def hybrid(
    context: LaunchContext,
    x: Tensor,
    w: WeightHandle,
    bias: Tensor | None,
    out: Tensor,
    tiles: Tiles,
) -> None:
    """Launch one kernel that computes columns of `out` in two ways, on disjoint SMs.

        share of columns    way                           SMs
        alpha               sym: output-stationary        in proportion
        1 - alpha           asym: weight-stationary       the others

    `tiles.alpha` may change from launch to launch. With `tiles.partial_bytes` 4, asym adds partial
    sums in a float32 scratch, which is rounded once. With 2, each partial sum is rounded and added
    to `out`, and the error grows with K / kp.

    Raises `OperandError`, `KernelMissingError`, `CudaError`.
    """
    check(x, w, bias, out)
    check_boxes(x, w)
    kp, partial_bytes = tiles.kp, tiles.partial_bytes
    variant = Variant("hybrid", w.dtype, tiles.bx, kp=kp, partial_bytes=partial_bytes)
    m, n_sym = x.shape[0], sym_columns(w.n, tiles.alpha)
    n_asym = w.n - n_sym
    if partial_bytes == 2 and n_asym and (out.stride(0) % 8 or out.data_ptr() % 16):
        raise OperandError("16-bit partial sums need rows of `out` at multiples of 16 bytes")
    sums = _partial_sums(context, bias, out, n_sym, partial_bytes)
    columns = n_asym if partial_bytes == 4 else w.n
    map_sums = tensor_map(
        sums.data_ptr(), m, max(1, columns), sums.stride(0), min(64, tiles.bx),
        "float32" if partial_bytes == 4 else w.dtype,
    )  # fmt: skip
    sms = context.clusters(variant)
    stride = x.stride(0) if m > 1 else w.k
    context.launch(
        variant,
        sms,
        HYBRID.pack(
            tensor_map(x.data_ptr(), m, w.k, stride, tiles.bx, w.dtype),
            stack_map(w.pointer, 1, w.n, w.k, BW, w.dtype), map_sums,
            *output(out, bias), m, w.n, w.k, n_sym, _ctas_sym(sms, n_sym, n_asym),
        ),
    )  # fmt: skip
    if n_asym and partial_bytes == 4:
        target = out[:, n_sym:]
        if bias is None:
            target.copy_(sums)
        else:
            torch.add(sums, bias[n_sym:], out=target)


def _ctas_sym(sms: int, n_sym: int, n_asym: int) -> int:
    """Return the number of SMs for sym, in proportion to its columns. Each way that has columns
    gets at least one SM."""
    if n_asym == 0:
        return sms
    return min(sms - 1, max(1 if n_sym else 0, round(sms * n_sym / (n_sym + n_asym))))


def _partial_sums(
    context: LaunchContext, bias: Tensor | None, out: Tensor, n_sym: int, partial_bytes: int
) -> Tensor:
    """Return the memory in which asym adds: a cleared float32 scratch [M, N_asym], or `out` itself,
    which begins as the bias. Rows of the scratch begin at multiples of 16 bytes."""
    m, n_asym = out.shape[0], out.shape[1] - n_sym
    if partial_bytes == 2:
        if n_asym:
            target = out[:, n_sym:]
            target.zero_() if bias is None else target.copy_(bias[n_sym:].expand(m, n_asym))
        return out
    stride = -(-max(1, n_asym) // 4) * 4
    scratch = context.scratch("partial-sums", m * stride * 4).view(torch.float32).view(m, stride)
    scratch.zero_()
    return scratch[:, :n_asym]
