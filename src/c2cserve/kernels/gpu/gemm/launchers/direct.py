"""direct, split and grouped: the multiplying CTAs read W from its home into shared memory."""

from torch import Tensor

from c2cserve.kernels.gpu.aot.variants import Variant
from c2cserve.kernels.gpu.driver import MAP_BYTES, pair_map, stack_map, tensor_map
from c2cserve.kernels.gpu.gemm.operands import FeedParams, check, check_boxes, output, parameters
from c2cserve.kernels.gpu.gemm.traffic import BW, Tiles
from c2cserve.kernels.gpu.gemm.weight import OperandError, WeightHandle
from c2cserve.kernels.gpu.launch_context import LaunchContext

_EXPERTS_MAX = 512


def direct(
    context: LaunchContext, x: Tensor, w: WeightHandle, bias: Tensor | None, out: Tensor,
    tiles: Tiles, *, gated: bool = False,
) -> None:  # fmt: skip
    """Launch `direct`. W crosses the link once for each `tiles.cluster` x `tiles.bx` rows of x.

        gated:   out [M, N / 2] = silu(x W0^T) * (x W1^T)    W0, W1: the halves of W's rows

    With `gated` both products are rounded first, and clusters are not allowed. Raises
    `OperandError`, `KernelMissingError`, `CudaError`.
    """
    check(x, w, bias, out, gated=gated)
    launch_direct(context, x, w, bias, out, tiles, slot=None, gated=gated)


def launch_direct(
    context: LaunchContext, x: Tensor, w: WeightHandle, bias: Tensor | None, out: Tensor,
    tiles: Tiles, slot: Tensor | None, gated: bool = False,
) -> None:  # fmt: skip
    """Launch `direct`. With a `slot` of W's size, also store every tile of W in it."""
    check_boxes(x, w)
    variant = Variant("direct", w.dtype, tiles.bx, tiles.cluster, tee=slot is not None, gated=gated)
    m, share = x.shape[0], BW // tiles.cluster
    map_w = _weight_map(w, share, gated=gated)
    map_slot = map_w if slot is None else _slot_map(slot, w, share)
    work = _column_tiles(out, gated=gated) * -(-m // tiles.block_rows)
    context.launch(
        variant,
        min(work, context.clusters(variant, w.home)),
        parameters(
            x=_rows_map(x, tiles.bx, w), w=map_w, slot=map_slot,
            out=output(out, bias), feed=_feed(context, w), m=m, n=out.shape[1], k=w.k,
        ),
        pdl=_overlaps_previous(w), home=w.home,
    )  # fmt: skip


def split(
    context: LaunchContext, x: Tensor, w: WeightHandle, bias: Tensor | None, out: Tensor,
    tiles: Tiles, *, gated: bool = False,
) -> None:  # fmt: skip
    """Launch `split`, for few rows of x. `gated` as in `direct`.

    `tiles.cluster` CTAs divide each tile's K among them, so that more CTAs read W. Raises
    `OperandError`, `KernelMissingError`, `CudaError`.
    """
    check(x, w, bias, out, gated=gated)
    check_boxes(x, w)
    variant = Variant("split", w.dtype, tiles.bx, tiles.cluster, gated=gated)
    m = x.shape[0]
    work = _column_tiles(out, gated=gated) * -(-m // tiles.bx)
    context.launch(
        variant,
        min(work, context.clusters(variant, w.home)),
        parameters(
            x=_rows_map(x, tiles.bx, w), w=_weight_map(w, BW, gated=gated),
            out=output(out, bias), feed=_feed(context, w), m=m, n=out.shape[1], k=w.k,
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
        parameters(
            x=_rows_map(x, tiles.bx, w), w=map_w, out=output(out, None), feed=_feed(context, w),
            offsets_ptr=offsets.data_ptr(), experts=w.experts, n=w.n, k=w.k,
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


def _feed(context: LaunchContext, w: WeightHandle) -> FeedParams:
    return FeedParams(w.map_pointer, 0 if w.home == "hbm" else context.share_pointer)


def _overlaps_previous(w: WeightHandle) -> bool:
    """Return whether W can be read before earlier kernels have ended. It cannot if they write it.
    No kernel writes weights at another home, or weights that have a map in memory."""
    return w.home != "hbm" or w.map_pointer != 0


def _rows_map(x: Tensor, box_rows: int, w: WeightHandle) -> bytes:
    stride = x.stride(0) if x.shape[0] > 1 else w.k
    return tensor_map(x.data_ptr(), x.shape[0], w.k, stride, box_rows, w.dtype)


def _slot_map(slot: Tensor, w: WeightHandle, box_rows: int) -> bytes:
    return tensor_map(slot.data_ptr(), w.n, w.k, w.k, box_rows, w.dtype)
