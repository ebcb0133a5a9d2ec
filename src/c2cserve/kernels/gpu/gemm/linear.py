"""The linear layer of a launch context: the choice of the dataflow, and its launch.

    rows of x     multiplied by                  W is read
    up to 64      our kernels, direct or split   at its home, or in HBM
    more          cuBLAS                         in HBM, where a copy engine brings it

A model's answer must not change when its weights arrive in HBM. So a weight's place decides how its
bytes come, and only its shape and the number of rows decide what multiplies them.

Up to 64 rows, measurements choose the kernel and how it divides K, for each shape. They are those
of weights in HBM, where the choice matters most. The sums of a row do not depend on the number of
rows, so decoding does not depend on its batch.

With more rows, the next weight is copied while this one is multiplied. From host and peer this
comes within a few percent of the best dataflow (docs/kernels.md).
"""

from collections import Counter
from typing import Protocol

import torch
from torch import Tensor

from c2cserve.kernels.gpu.elementwise import silu_mul
from c2cserve.kernels.gpu.gemm.choice.choose import ROWS_STREAMED, Chooser
from c2cserve.kernels.gpu.gemm.choice.cost import Question
from c2cserve.kernels.gpu.gemm.dataflows.table import DATAFLOWS, DataflowName
from c2cserve.kernels.gpu.gemm.launchers.direct import direct, grouped, split
from c2cserve.kernels.gpu.gemm.launchers.staged import bring, prefetch
from c2cserve.kernels.gpu.gemm.traffic import Tiles
from c2cserve.kernels.gpu.gemm.weight import OperandError, WeightHandle, local_weight
from c2cserve.kernels.gpu.launch_context import LaunchContext

_SERVED_MAX = 4096


class WeightCache(Protocol):
    """Weights in HBM that have their home elsewhere; `memory.hbm_cache.HbmCache` in the product."""

    def find(self, w: WeightHandle) -> WeightHandle | None:
        """Return W in HBM, None if it is not there."""
        ...

    def source(self, w: WeightHandle) -> WeightHandle:
        """Return where to read a W that is not in HBM: its home, or a copy on another GPU."""
        ...

    def place(self, w: WeightHandle) -> WeightHandle | None:
        """Return the place in HBM to copy W into, None if W is not to be cached."""
        ...


class Linear:
    """out = x W^T (+ bias), for W at any home. There is one for each launch context."""

    def __init__(
        self, context: LaunchContext, chooser: Chooser, cache: WeightCache | None = None
    ) -> None:
        self.context = context
        self._chooser = chooser
        self._cache = cache
        self._served: dict[tuple[object, ...], tuple[DataflowName, Tiles]] = {}
        """What the chooser said. It says the same for as long as it lives."""
        self.neighbours = 0
        """Other slices that stream over the same link now. Each holds to an equal share of it."""
        self.launched: Counter[str] = Counter()
        """Launches by dataflow, for `/metrics`."""

    def __call__(
        self, x: Tensor, w: WeightHandle, bias: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """Multiply x [M, K], rows possibly strided -> out [M, N] of x's dtype.

        Without rows nothing is launched. Raises `OperandError`, `KernelMissingError`, `CudaError`,
        `ProfileMismatch`.
        """
        rows, near = x.shape[0], None
        if rows > ROWS_STREAMED:
            near = w if w.transposed is not None else self._find(w)
            if near.transposed is not None and out is None:
                # The usual case in long steps. It is kept short, and torch allocates.
                self.launched["resident"] += 1
                return multiplied(x, near.transposed, bias)
        if out is None:
            out = torch.empty(rows, w.n, dtype=x.dtype, device=x.device)
        if rows == 0:
            return out
        dataflow, tiles = self._serving(rows, w)
        if dataflow in ("direct", "split"):
            self._launch(dataflow, tiles, x, self._nearest(w), bias, out)
            return out
        near = near or self._find(w)
        if near.home == "hbm":
            self._launch("resident", tiles, x, near, bias, out)
            return out
        place = None if self._cache is None else self._cache.place(w)
        cached = None if place is None else local_weight(place)
        self.launched["prefetch"] += 1
        prefetch(self.context, x, w, bias, out, tiles, cached)
        return out

    def gated(self, x: Tensor, w: WeightHandle, bias: Tensor | None = None) -> Tensor:
        """Return `silu_mul(self(x, w, bias))`, bit for bit: x [M, K] -> [M, N / 2].

        The first half of W's rows is the gate. Up to 64 rows, this is a single launch. Raises as
        `__call__`.
        """
        rows = x.shape[0]
        if rows > ROWS_STREAMED:
            return silu_mul(self(x, w, bias))
        out = torch.empty(rows, w.n // 2, dtype=x.dtype, device=x.device)
        if rows == 0:
            return out
        dataflow, tiles = self._serving(rows, w)
        if dataflow not in ("direct", "split"):
            return silu_mul(self(x, w, bias))
        w = self._nearest(w)
        self._share_link(w)
        self.launched[dataflow] += 1
        flow = direct if dataflow == "direct" else split
        flow(self.context, x, w, bias, out, tiles, gated=True)
        return out

    def experts(self, x: Tensor, w: WeightHandle, offsets: Tensor, top_k: int) -> Tensor:
        """Multiply each row by its expert's W: x [M top_k, K], sorted by expert -> [M top_k, N].

        `offsets` int32 [experts + 1], on the GPU, are where experts' rows begin. Raises as
        `__call__`.
        """
        out = torch.empty(x.shape[0], w.n, dtype=x.dtype, device=x.device)
        if x.shape[0]:
            # Few rows choose few experts. To copy all experts to HBM would cost more than it saves.
            most = x.shape[0] >= w.experts
            w = self._nearest(w) if most else self._find(w)
            self._share_link(w)
            _, tiles = self._serving(-(-x.shape[0] // top_k), w, top_k)
            self.launched["grouped"] += 1
            grouped(self.context, x, w, offsets, out, tiles)
        return out

    def _serving(self, rows: int, w: WeightHandle, top_k: int = 0) -> tuple[DataflowName, Tiles]:
        key = rows, w.shape, w.dtype, w.home, top_k
        found = self._served.get(key)
        if found is None:
            sms = self.context.picked_for
            question = Question(rows, w.n, w.k, w.dtype, w.home, sms, w.experts, top_k)
            if len(self._served) >= _SERVED_MAX:
                self._served.clear()
            found = self._served[key] = self._chooser.serving(question)
        return found

    def _launch(
        self, dataflow: DataflowName, tiles: Tiles, x: Tensor, w: WeightHandle,
        bias: Tensor | None, out: Tensor,
    ) -> None:  # fmt: skip
        self._share_link(w)
        self.launched[dataflow] += 1
        launch(self.context, dataflow, tiles, x, w, bias, out)

    def _find(self, w: WeightHandle) -> WeightHandle:
        """Return where to read W."""
        if self._cache is None or w.home == "hbm" or w.map_pointer:
            return w
        return self._cache.find(w) or self._cache.source(w)

    def _nearest(self, w: WeightHandle) -> WeightHandle:
        """Return where to read W. If W is to be cached, a copy engine brings it to HBM first: no
        other way is faster."""
        found = self._find(w)
        if self._cache is None or found.home == "hbm" or w.map_pointer:
            return found
        place = self._cache.place(w)
        if place is None:
            return found
        bring(self.context, found, local_weight(place))
        return place

    def _share_link(self, w: WeightHandle) -> None:
        if w.home != "hbm":
            alone = self.neighbours == 0
            whole = 0.0 if alone else self._chooser.link_bytes_per_s(w.home)
            self.context.limit_link(whole / (1 + self.neighbours))


def launch(
    context: LaunchContext, dataflow: DataflowName, tiles: Tiles, x: Tensor, w: WeightHandle,
    bias: Tensor | None, out: Tensor,
) -> None:  # fmt: skip
    """Launch a dataflow by name. Raises as its launcher, and `OperandError` for `grouped`, whose
    rows need offsets."""
    launcher = DATAFLOWS[dataflow].launcher
    if launcher is None:
        raise OperandError("experts' rows come with offsets: Linear.experts")
    launcher()(context, x, w, bias, out, tiles)


def multiplied(x: Tensor, transposed: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply into new memory, as `resident` does into given memory."""
    return torch.mm(x, transposed) if bias is None else torch.addmm(bias, x, transposed)
