"""resident, prefetch, tee and ring: W is in local memory, or is copied there."""

import torch
from torch import Tensor

from c2cserve.kernels.gpu import driver
from c2cserve.kernels.gpu.aot.variants import Variant
from c2cserve.kernels.gpu.driver import stack_map, tensor_map
from c2cserve.kernels.gpu.gemm.launchers.direct import storing
from c2cserve.kernels.gpu.gemm.operands import check, check_boxes
from c2cserve.kernels.gpu.gemm.parameters import RING, output
from c2cserve.kernels.gpu.gemm.traffic import BW, Tiles, panels, ring_copiers
from c2cserve.kernels.gpu.gemm.weight import (
    ITEM_BYTES,
    TORCH_DTYPES,
    OperandError,
    WeightHandle,
    local_weight,
)
from c2cserve.kernels.gpu.launch_context import LaunchContext


def resident(x: Tensor, w: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Multiply with cuBLAS, W [N, K] in HBM."""
    if bias is None:
        torch.mm(x, w.t(), out=out)
    else:
        torch.addmm(bias, x, w.t(), out=out)


def resident_weight(
    context: LaunchContext,
    x: Tensor,
    w: WeightHandle,
    bias: Tensor | None,
    out: Tensor,
    tiles: Tiles,
) -> None:
    """Do `resident` with a handle. Raises `OperandError` if W is not in this GPU's memory."""
    resident(x, local_weight(w), bias, out)


def prefetch(
    context: LaunchContext, x: Tensor, w: WeightHandle, bias: Tensor | None, out: Tensor,
    tiles: Tiles, place: Tensor | None = None,
) -> None:  # fmt: skip
    """Copy W to HBM in panels by copy engine, and multiply each with cuBLAS as it arrives.

    W goes into one of two slots, or into `place` [N, K], where it stays. The first panel has
    `tiles.panel_rows` rows, and each is `tiles.panel_growth` times as long as the one before. The
    next weight is copied while this one is multiplied. Raises `OperandError`, `CudaError`.
    """
    check(x, w, bias, out)
    compute = torch.cuda.current_stream(context.device)
    slot = context.next_slot() if place is None else None
    if slot is None:
        # The memory of `place` became free in the order of the compute stream.
        context.copies.wait_stream(compute)
    else:
        place = slot.hold(w.bytes).view(TORCH_DTYPES[w.dtype]).view(w.n, w.k)
        context.copies.wait_event(slot.free)
    assert place is not None
    row_bytes = w.k * ITEM_BYTES
    for start, stop in panels(w.n, tiles.panel_rows, tiles.panel_growth):
        size, first = (stop - start) * row_bytes, start * row_bytes
        target = place.data_ptr() + first
        _copy(target, w, first, size, context.copies.cuda_stream)
        compute.wait_event(context.copies.record_event())
        part = None if bias is None else bias[start:stop]
        resident(x, place[start:stop], part, out[:, start:stop])
    if slot is not None:
        slot.free.record(compute)


def bring(context: LaunchContext, w: WeightHandle, place: Tensor) -> None:
    """Copy W into `place` (of its shape, in HBM) by a copy engine. Later launches can read it."""
    compute = torch.cuda.current_stream(context.device)
    context.copies.wait_stream(compute)
    _copy(place.data_ptr(), w, 0, w.bytes, context.copies.cuda_stream)
    compute.wait_event(context.copies.record_event())


def tee(
    context: LaunchContext,
    x: Tensor,
    w: WeightHandle,
    bias: Tensor | None,
    out: Tensor,
    tiles: Tiles,
) -> None:
    """Compute the first rows of x with `direct`, which also stores W in a slot of HBM. Multiply all
    other rows with cuBLAS from there.

    The first rows are as many as one pass over W serves. Raises `OperandError`,
    `KernelMissingError`, `CudaError`.
    """
    check(x, w, bias, out)
    slot, compute = context.next_slot(), torch.cuda.current_stream(context.device)
    here = slot.hold(w.bytes)
    compute.wait_event(slot.free)
    head = min(x.shape[0], tiles.block_rows)
    storing(context, x[:head], w, bias, out[:head], tiles, here)
    if head < x.shape[0]:
        local = here.view(TORCH_DTYPES[w.dtype]).view(w.n, w.k)
        resident(x[head:], local, bias, out[head:])
    slot.free.record(compute)


def ring(
    context: LaunchContext, x: Tensor, w: WeightHandle, bias: Tensor | None, out: Tensor,
    tiles: Tiles, *, engines: bool = False,
) -> None:  # fmt: skip
    """Stream W through a ring of `tiles.slots` panels in local memory, and multiply from there.

    A panel has `tiles.panel_rows` rows. CTAs of the same launch copy them; with `engines`, copy
    engines do. Raises `OperandError`, `KernelMissingError`, `CudaError`.
    """
    check(x, w, bias, out)
    check_boxes(x, w)
    if tiles.slots < 2:
        raise OperandError("a ring has two slots or more: one is filled while one is read")
    if engines and w.home == "hbm":
        raise OperandError("copies within a GPU need the SMs that wait for them: no engines")
    variant = Variant("ring", w.dtype, tiles.bx, tiles.cluster)
    m, count = x.shape[0], -(-w.n // tiles.panel_rows)
    copiers = 0 if engines else ring_copiers(context.sms, tiles.cluster)
    clusters = context.clusters(variant)
    if clusters <= copiers:
        raise OperandError(f"ring needs more than {copiers} clusters, this slice has {clusters}")
    panel_bytes = tiles.panel_rows * w.k * ITEM_BYTES
    places = context.scratch("ring", tiles.slots * panel_bytes)
    flags = context.scratch("ring-flags", 2 * 4 * count).view(torch.int32)
    flags.zero_()
    filled, drained = flags.data_ptr(), flags.data_ptr() + 4 * count
    stride = x.stride(0) if m > 1 else w.k
    arguments = RING.pack(
        tensor_map(x.data_ptr(), m, w.k, stride, tiles.bx, w.dtype),
        stack_map(
            places.data_ptr(), tiles.slots, tiles.panel_rows, w.k, BW // tiles.cluster, w.dtype
        ),
        *output(out, bias), w.pointer, places.data_ptr(), filled, drained, m, w.n, w.k,
        tiles.panel_rows, tiles.slots, copiers,
    )  # fmt: skip
    if engines:
        context.copies.wait_stream(torch.cuda.current_stream(context.device))
    work = count * tiles.panel_rows // BW * -(-m // tiles.block_rows)
    context.launch(variant, min(copiers + work, clusters), arguments)
    if engines:
        _fill_ring(context, w, tiles, places, filled, drained, uses=-(-m // tiles.block_rows))


def _fill_ring(
    context: LaunchContext,
    w: WeightHandle,
    tiles: Tiles,
    places: Tensor,
    filled: int,
    drained: int,
    uses: int,
) -> None:
    """Copy the panels by copy engine, each once its place is free. `uses`: blocks of x's rows."""
    stream, row_bytes = context.copies.cuda_stream, w.k * ITEM_BYTES
    bounds = panels(w.n, tiles.panel_rows)
    for panel, (start, stop) in enumerate(bounds):
        if panel >= tiles.slots:
            before = bounds[panel - tiles.slots]
            tiles_before = -(-(before[1] - before[0]) // BW) * uses * tiles.cluster * 2
            driver.wait_at_least(stream, drained + 4 * (panel - tiles.slots), tiles_before)
        place = places.data_ptr() + panel % tiles.slots * tiles.panel_rows * row_bytes
        size = (stop - start) * row_bytes
        _copy(place, w, start * row_bytes, size, stream)
        driver.signal(stream, filled + 4 * panel, 0x7FFFFFFF)
    torch.cuda.current_stream(context.device).wait_stream(context.copies)


def _copy(target: int, w: WeightHandle, first: int, size: int, stream: int) -> None:
    """Copy `size` bytes of W from the offset `first` on, by a copy engine."""
    copy = driver.copy_from_host if w.home == "host" else driver.copy_async
    copy(target, w.pointer + first, size, stream)
