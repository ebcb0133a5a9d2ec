"""direct, split and grouped: W from its home straight into the multiply."""

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
    """W crosses the link once for each `tiles.cluster` x `tiles.bx` rows of x.

    With `gated` W's first half of rows is a gate: out [M, N / 2] is silu of what the first half
    gives times what the second does, both rounded before. No clusters then.

    Raises `OperandError`, `KernelMissingError`, `CudaError`.
    """
    check(x, w, bias, out, gated=gated)
    launch_direct(context, x, w, bias, out, tiles, slot=None, gated=gated)


def launch_direct(
    context: LaunchContext, x: Tensor, w: WeightHandle, bias: Tensor | None, out: Tensor,
    tiles: Tiles, slot: Tensor | None, gated: bool = False,
) -> None:  # fmt: skip
    """`direct`; with a `slot` (of W's bytes) every tile of W that passes by is kept in it."""
    check_boxes(x, w)
    variant = Variant("direct", w.dtype, tiles.bx, tiles.cluster, tee=slot is not None, gated=gated)
    m, share = x.shape[0], BW // tiles.cluster
    map_w = _weight_map(w, share, gated=gated)
    kept = map_w if slot is None else _slot_map(slot, w, share)
    work = _column_tiles(out, gated=gated) * -(-m // tiles.block_rows)
    context.launch(
        variant,
        min(work, context.clusters(variant)),
        parameters(
            x=_rows_map(x, tiles.bx, w), w=map_w, slot=kept,
            out=output(out, bias), feed=_feed(context, w), m=m, n=out.shape[1], k=w.k,
        ),
        pdl=_overlaps_previous(w),
    )  # fmt: skip


def split(
    context: LaunchContext, x: Tensor, w: WeightHandle, bias: Tensor | None, out: Tensor,
    tiles: Tiles, *, gated: bool = False,
) -> None:  # fmt: skip
    """Few rows of x: `tiles.cluster` CTAs share each tile's K, so that more of them read W.
    `gated` as in `direct`.

    Raises `OperandError`, `KernelMissingError`, `CudaError`.
    """
    check(x, w, bias, out, gated=gated)
    check_boxes(x, w)
    variant = Variant("split", w.dtype, tiles.bx, tiles.cluster, gated=gated)
    m = x.shape[0]
    work = _column_tiles(out, gated=gated) * -(-m // tiles.bx)
    context.launch(
        variant,
        min(work, context.clusters(variant)),
        parameters(
            x=_rows_map(x, tiles.bx, w), w=_weight_map(w, BW, gated=gated),
            out=output(out, bias), feed=_feed(context, w), m=m, n=out.shape[1], k=w.k,
        ),
        pdl=_overlaps_previous(w),
    )  # fmt: skip


def grouped(
    context: LaunchContext, x: Tensor, w: WeightHandle, offsets: Tensor, out: Tensor, tiles: Tiles
) -> None:
    """Rows offsets[e] up to offsets[e + 1] of x [M, K] meet W[e]; `offsets` int32 [experts + 1] on
    the GPU, offsets[-1] = M. Experts without rows are not read. The host waits for nothing.

    Raises `OperandError`, `KernelMissingError`, `CudaError`.
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
    # How many tiles there are is only known on the GPU.
    most = -(-w.n // BW) * (w.experts + x.shape[0] // tiles.block_rows)
    context.launch(
        variant,
        min(most, context.clusters(variant)),
        parameters(
            x=_rows_map(x, tiles.bx, w), w=map_w, out=output(out, None), feed=_feed(context, w),
            offsets_ptr=offsets.data_ptr(), experts=w.experts, n=w.n, k=w.k,
        ),
    )  # fmt: skip


def weight_map(w: WeightHandle) -> bytes:
    """What is to lie at `map_pointer` for `w` to be read, whole boxes of 128 rows: `split`, and
    `direct` and `grouped` without clusters, go by it. Raises `CudaError`."""
    return stack_map(w.pointer, max(1, w.experts), w.n, w.k, BW, w.dtype)


def gated_map(w: WeightHandle) -> bytes:
    """The same for launches that are `gated`: a box has 64 rows of each half."""
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
    """Whether W is sure to be there before earlier kernels have ended: not if they compute it.
    Weights that have a map in memory are never computed."""
    return w.home != "hbm" or w.map_pointer != 0


def _rows_map(x: Tensor, box_rows: int, w: WeightHandle) -> bytes:
    stride = x.stride(0) if x.shape[0] > 1 else w.k
    return tensor_map(x.data_ptr(), x.shape[0], w.k, stride, box_rows, w.dtype)


def _slot_map(slot: Tensor, w: WeightHandle, box_rows: int) -> bytes:
    return tensor_map(slot.data_ptr(), w.n, w.k, w.k, box_rows, w.dtype)
