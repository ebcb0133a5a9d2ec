"""direct, split and grouped: the multiplying CTAs read W from its home into shared memory."""

from typing import Any, Literal, NamedTuple

from torch import Tensor

from c2cserve.kernels.gpu.aot.variants import Variant
from c2cserve.kernels.gpu.driver import MAP_BYTES, pair_map, stack_map, tensor_map
from c2cserve.kernels.gpu.gemm.operands import check, check_boxes
from c2cserve.kernels.gpu.gemm.parameters import DIRECT, GROUPED, SPLIT, Layout, feed, output
from c2cserve.kernels.gpu.gemm.traffic import BW, Tiles
from c2cserve.kernels.gpu.gemm.weight import OperandError, WeightHandle
from c2cserve.kernels.gpu.launch_context import LaunchContext

_EXPERTS_MAX = 512
_PLANS_MAX = 4096


def direct(
    context: LaunchContext, x: Tensor, w: WeightHandle, bias: Tensor | None, out: Tensor,
    tiles: Tiles, *, gated: bool = False,
) -> None:  # fmt: skip
    """Launch `direct`. W crosses the link once for each `tiles.cluster` x `tiles.bx` rows of x.

        gated:   out [M, N / 2] = silu(x W0^T) * (x W1^T)    W0, W1: the halves of W's rows

    With `gated` both products are rounded first, and clusters are not allowed. Raises
    `OperandError`, `KernelMissingError`, `CudaError`.
    """
    plan = _plan(context, "direct", x, w, bias, out, tiles, gated=gated)
    map_w = _weight_map(w, _box_rows("direct", tiles), gated=gated)
    map_x = _rows_map(x, tiles.bx, w)
    no_slot = map_w
    _run(context, plan, w, bias, out, map_x, map_w, no_slot)


def split(
    context: LaunchContext, x: Tensor, w: WeightHandle, bias: Tensor | None, out: Tensor,
    tiles: Tiles, *, gated: bool = False,
) -> None:  # fmt: skip
    """Launch `split`, for few rows of x. `gated` as in `direct`.

    `tiles.cluster` CTAs divide each tile's K among them, so that more CTAs read W. Raises
    `OperandError`, `KernelMissingError`, `CudaError`.
    """
    plan = _plan(context, "split", x, w, bias, out, tiles, gated=gated)
    map_w = _weight_map(w, _box_rows("split", tiles), gated=gated)
    map_x = _rows_map(x, tiles.bx, w)
    _run(context, plan, w, bias, out, map_x, map_w)


def storing(
    context: LaunchContext, x: Tensor, w: WeightHandle, bias: Tensor | None, out: Tensor,
    tiles: Tiles, slot: Tensor,
) -> None:  # fmt: skip
    """Launch `direct`, which also stores every tile of W in a `slot` of W's size.

    The operands have been checked, all but their addresses. Raises as `direct`."""
    check_boxes(x, w)
    variant = Variant("direct", w.dtype, tiles.bx, tiles.cluster, tee=True)
    share = BW // tiles.cluster
    context.launch(
        variant,
        _clusters(context, variant, x, w, out, tiles),
        DIRECT.pack(
            _rows_map(x, tiles.bx, w), _weight_map(w, share), _slot_map(slot, w, share),
            *output(out, bias), *feed(w, context.share_pointer), x.shape[0], out.shape[1], w.k,
        ),
        pdl=_overlaps_previous(w), home=w.home,
    )  # fmt: skip


class _Plan(NamedTuple):
    """What all launches over operands of these shapes, strides and dtypes have in common."""

    kernel: Any
    ctas: int
    layout: Layout
    sizes: tuple[int, int, int]
    """m, n and k, as the kernel gets them."""


def _plan(
    context: LaunchContext, dataflow: Literal["direct", "split"], x: Tensor, w: WeightHandle,
    bias: Tensor | None, out: Tensor, tiles: Tiles, *, gated: bool,
) -> _Plan:  # fmt: skip
    """Check the operands, and return how to launch over such.

    Few rows take the GPU little time, so the host's counts. A key of all that is checked or derived
    takes it a third of doing so again. Addresses are not in it: they are checked each time.
    """
    key = (
        dataflow, tiles.bx, tiles.cluster, gated, w.shape, w.dtype, w.home, w.map_pointer != 0,
        _form(x), _form(out), None if bias is None else _form(bias),
    )  # fmt: skip
    plan: _Plan | None = context.plans.get(key)
    if plan is None:
        check(x, w, bias, out, gated=gated)
        _weight_map(w, _box_rows(dataflow, tiles), gated=gated)  # refuses what no map describes
        variant = Variant(dataflow, w.dtype, tiles.bx, tiles.cluster, gated=gated)
        clusters = _clusters(context, variant, x, w, out, tiles, gated=gated)
        plan = _Plan(
            context.repository.kernel(variant), clusters * variant.cluster,
            SPLIT if dataflow == "split" else DIRECT, (x.shape[0], out.shape[1], w.k),
        )  # fmt: skip
        if len(context.plans) >= _PLANS_MAX:
            context.plans.clear()
        context.plans[key] = plan
    check_boxes(x, w)
    return plan


def _box_rows(dataflow: Literal["direct", "split"], tiles: Tiles) -> int:
    """Return the rows of W in a box. CTAs of a cluster of `direct` read a part of a tile each."""
    return BW if dataflow == "split" else BW // tiles.cluster


def _form(tensor: Tensor) -> tuple[object, ...]:
    """Return all that `check` looks at."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _clusters(
    context: LaunchContext, variant: Variant, x: Tensor, w: WeightHandle, out: Tensor,
    tiles: Tiles, *, gated: bool = False,
) -> int:  # fmt: skip
    block_rows = tiles.bx if variant.source == "split" else tiles.block_rows
    work = _column_tiles(out, gated=gated) * -(-x.shape[0] // block_rows)
    return min(work, context.clusters(variant, w.home))


def _run(
    context: LaunchContext, plan: _Plan, w: WeightHandle, bias: Tensor | None, out: Tensor,
    *maps: bytes,
) -> None:  # fmt: skip
    context.run(
        plan.kernel, plan.ctas,
        plan.layout.pack(
            *maps, *output(out, bias), *feed(w, context.share_pointer), *plan.sizes
        ),
        pdl=_overlaps_previous(w), home=w.home,
    )  # fmt: skip


def grouped(
    context: LaunchContext, x: Tensor, w: WeightHandle, offsets: Tensor, out: Tensor, tiles: Tiles
) -> None:
    """Launch `grouped`: W[e] multiplies rows offsets[e] up to offsets[e + 1] of x [M, K].

    `offsets`: int32 [experts + 1] on the GPU, with offsets[-1] = M. Experts without rows are not
    read. The host does not wait. Raises `OperandError`, `KernelMissingError`, `CudaError`.
    """
    check(x, w, None, out, grouped=True)
    check_boxes(x, w)
    if w.experts > _EXPERTS_MAX:
        raise OperandError(f"{w.experts} experts are more than the {_EXPERTS_MAX} kernels take")
    if offsets.shape != (w.experts + 1,) or str(offsets.dtype) != "torch.int32":
        raise OperandError(
            f"offsets are int32 [{w.experts + 1}], not {offsets.dtype} {offsets.shape}"
        )
    if offsets.device != x.device or not offsets.is_contiguous():
        raise OperandError("offsets must be contiguous and on x's GPU")
    variant = Variant("grouped", w.dtype, tiles.bx, tiles.cluster)
    map_w = _weight_map(w, BW // tiles.cluster)
    # Only the GPU knows the number of tiles.
    most = -(-w.n // BW) * (w.experts + x.shape[0] // tiles.block_rows)
    context.launch(
        variant,
        min(most, context.clusters(variant, w.home)),
        GROUPED.pack(
            _rows_map(x, tiles.bx, w), map_w, *output(out, None), *feed(w, context.share_pointer),
            offsets.data_ptr(), w.experts, w.n, w.k,
        ),
        home=w.home,
    )  # fmt: skip


def weight_map(w: WeightHandle) -> bytes:
    """Return the tensor map that belongs at `w.map_pointer`, with boxes of 128 rows.

    `split` can read it, and so can `direct` and `grouped` without clusters. Raises `CudaError`.
    """
    return stack_map(w.pointer, max(1, w.experts), w.n, w.k, BW, w.dtype)


def gated_map(w: WeightHandle) -> bytes:
    """Return the same for `gated` launches: a box has 64 rows of each half."""
    return pair_map(w.pointer, w.n // 2, w.k, BW // 2, w.dtype)


def _weight_map(w: WeightHandle, box_rows: int, *, gated: bool = False) -> bytes:
    if not w.map_pointer and not gated:
        return stack_map(w.pointer, max(1, w.experts), w.n, w.k, box_rows, w.dtype)
    if box_rows != BW:
        raise OperandError(
            "clusters that share W need its map in the launch, not in memory, and no gate in it"
        )
    return bytes(MAP_BYTES) if w.map_pointer else gated_map(w)


def _column_tiles(out: Tensor, *, gated: bool) -> int:
    return -(-out.shape[1] // (BW // 2 if gated else BW))


def _overlaps_previous(w: WeightHandle) -> bool:
    """Return whether W can be read before earlier kernels have ended. It cannot if they write it.
    No kernel writes weights at another home, or weights that have a map in memory."""
    return w.home != "hbm" or w.map_pointer != 0


def _rows_map(x: Tensor, box_rows: int, w: WeightHandle) -> bytes:
    stride = x.stride(0) if x.shape[0] > 1 else w.k
    return tensor_map(x.data_ptr(), x.shape[0], w.k, stride, box_rows, w.dtype)


def _slot_map(slot: Tensor, w: WeightHandle, box_rows: int) -> bytes:
    return tensor_map(slot.data_ptr(), w.n, w.k, w.k, box_rows, w.dtype)
