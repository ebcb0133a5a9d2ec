"""The linear layer of a lane: asks what was measured, and launches that dataflow."""

from collections import Counter
from typing import Protocol

import torch
from torch import Tensor

from c2cserve.kernels.gpu.choose import Choice, Chooser
from c2cserve.kernels.gpu.cost import Question
from c2cserve.kernels.gpu.dataflows.direct import direct, grouped, split
from c2cserve.kernels.gpu.dataflows.published import hybrid
from c2cserve.kernels.gpu.dataflows.staged import prefetch, resident, ring, tee
from c2cserve.kernels.gpu.lane import Lane
from c2cserve.kernels.gpu.profile import AnyDataflow
from c2cserve.kernels.gpu.traffic import Tiles
from c2cserve.kernels.gpu.weight import TORCH_DTYPES, OperandError, WeightHandle

_WHOLE = Tiles(panel_rows=1 << 20, panel_growth=1)


class Kept(Protocol):
    """Weights that stay in HBM; `memory.hbm_cache` in the product."""

    def find(self, w: WeightHandle) -> Tensor | None:
        """W [N, K] in HBM, if it is there."""
        ...

    def place(self, w: WeightHandle) -> Tensor | None:
        """Where W is to be brought, to stay; None: it only passes by."""
        ...


class Linear:
    """out = x W^T (+ bias), W wherever it is. One per lane."""

    def __init__(self, lane: Lane, chooser: Chooser, kept: Kept | None = None) -> None:
        self.lane = lane
        self._chooser = chooser
        self._kept = kept
        self.neighbours = 0
        """Other slices that stream over the same link now. Each holds to an equal share of it."""
        self.launched: Counter[str] = Counter()
        """By dataflow, for `/metrics`."""

    def __call__(
        self, x: Tensor, w: WeightHandle, bias: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """x [M, K], rows possibly strided -> out [M, N] of x's dtype. With no rows nothing is
        launched. Raises `OperandError`, `KernelMissingError`, `CudaError`, `ProfileMismatch`."""
        if out is None:
            out = torch.empty(x.shape[0], w.n, dtype=x.dtype, device=x.device)
        if x.shape[0] == 0:
            return out
        if self._kept is not None and w.home != "hbm":
            if (local := self._kept.find(w)) is not None:
                self.launched["resident"] += 1
                resident(x, local, bias, out)
                return out
            if (place := self._kept.place(w)) is not None:
                # What is to stay comes by copy engine: as fast as any, and the next call is local.
                self.launched["prefetch"] += 1
                prefetch(self.lane, x, w, bias, out, _WHOLE, place)
                return out
        self._share_link(w)
        choice = self.choose(x.shape[0], w)
        self.launched[choice.dataflow] += 1
        launch(self.lane, choice.dataflow, choice.tiles, x, w, bias, out)
        return out

    def experts(self, x: Tensor, w: WeightHandle, offsets: Tensor, top_k: int) -> Tensor:
        """x [M top_k, K] sorted by expert, `offsets` int32 [experts + 1] on the GPU
        -> [M top_k, N]. Raises as `__call__`."""
        out = torch.empty(x.shape[0], w.n, dtype=x.dtype, device=x.device)
        if x.shape[0]:
            self._share_link(w)
            choice = self.choose(-(-x.shape[0] // top_k), w, top_k)
            self.launched[choice.dataflow] += 1
            grouped(self.lane, x, w, offsets, out, choice.tiles)
        return out

    def _share_link(self, w: WeightHandle) -> None:
        if w.home != "hbm":
            alone = self.neighbours == 0
            whole = 0.0 if alone else self._chooser.link_bytes_per_s(w.home)
            self.lane.limit_link(whole / (1 + self.neighbours))

    def choose(self, m: int, w: WeightHandle, top_k: int = 0) -> Choice:
        """What a call with `m` rows (tokens, where there are experts) would launch."""
        return self._chooser.pick(
            Question(m, w.n, w.k, w.dtype, w.home, self.lane.sms, w.experts, top_k, self.neighbours)
        )


def launch(
    lane: Lane, dataflow: AnyDataflow, tiles: Tiles, x: Tensor, w: WeightHandle,
    bias: Tensor | None, out: Tensor,
) -> None:  # fmt: skip
    """One dataflow by name. Raises as its launcher, and `OperandError` for `grouped`, whose rows
    need offsets."""
    match dataflow:
        case "resident":
            resident(x, local_weight(w), bias, out)
        case "prefetch":
            prefetch(lane, x, w, bias, out, tiles)
        case "direct":
            direct(lane, x, w, bias, out, tiles)
        case "split":
            split(lane, x, w, bias, out, tiles)
        case "tee":
            tee(lane, x, w, bias, out, tiles)
        case "ring":
            ring(lane, x, w, bias, out, tiles)
        case "sym" | "asym" | "hybrid":
            hybrid(lane, x, w, bias, out, tiles)
        case "grouped":
            raise OperandError("experts' rows come with offsets: Linear.experts")


def local_weight(w: WeightHandle) -> Tensor:
    """W in this GPU's memory as a tensor, for libraries. Raises `OperandError` if it is not one:
    a handle made by `weight_of` from a tensor on the GPU is."""
    if w.home != "hbm" or not isinstance(w.owner, Tensor):
        raise OperandError(f"W at home {w.home!r} is not a tensor in this GPU's memory")
    base = w.owner.data_ptr()
    first = (w.pointer - base) // w.owner.element_size()
    flat = w.owner.view(TORCH_DTYPES[w.dtype]).flatten()
    return flat[first : first + w.rows * w.k].view(w.shape)
