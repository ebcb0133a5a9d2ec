"""The linear layer of a slice that runs C2CServe's GEMMs (its Algorithm 1).

    W                           multiplied by
    in HBM                      as in `linear`
    experts                     `grouped`: Algorithm 1 has no rows by expert
    K not a multiple of 8       `prefetch`, as TMA cannot read it
    any other                   `hybrid`, for any number of rows

A far W is read where it is and never copied to HBM. Sums are added in the order in which CTAs
arrive, and alpha changes between steps, so results do not repeat bit for bit.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from c2cserve.kernels.gpu.elementwise import silu_mul
from c2cserve.kernels.gpu.gemm.choice.choose import Chooser
from c2cserve.kernels.gpu.gemm.dataflows.table import traffic
from c2cserve.kernels.gpu.gemm.linear import Linear, WeightCache, launch
from c2cserve.kernels.gpu.gemm.published.algorithm1 import served_tiles
from c2cserve.kernels.gpu.gemm.traffic import Tiles, Traffic
from c2cserve.kernels.gpu.gemm.weight import ITEM_BYTES, WeightHandle
from c2cserve.kernels.gpu.launch_context import LaunchContext

_TMA_ELEMENTS = 8


class HybridGemms:
    """Alpha of each model's GEMMs on a slice, and what they have moved; one for all its lanes.

    A model's alpha is found by the address of the weight. So a step that was parked resumes with
    its own model's, whatever was submitted since.
    """

    def __init__(self, alpha: float, model_of: Callable[[int], str] | None = None) -> None:
        """All models begin with `alpha`. `model_of` returns the model of a weight at its home;
        without it, all models keep that alpha."""
        self.first_alpha = alpha
        self._model_of = model_of
        self._alphas: dict[str, float] = {}
        self.changes = 0
        """How often an alpha was set."""
        self.reread_bytes = 0
        """Bytes of weights that crossed a link again within a GEMM,"""
        self.reread_peer_bytes = 0
        """and the part of them that came from another GPU's memory."""
        self.hbm_bytes = 0
        """Bytes that kernels asked of HBM. L2 serves a part of them."""

    def alpha(self, w: WeightHandle) -> float:
        """Return the share of O's columns to compute output-stationary."""
        if not self._alphas or self._model_of is None:
            return self.first_alpha
        return self._alphas.get(self._model_of(w.pointer), self.first_alpha)

    def set_alpha(self, model: str, alpha: float) -> None:
        self._alphas[model] = alpha
        self.changes += 1

    def forget(self, model: str) -> None:
        """Forget a model that is detached. It begins anew if it comes again."""
        self._alphas.pop(model, None)

    def count(self, w: WeightHandle, moved: Traffic) -> None:
        """Count a GEMM that reads W at `w.home`. Its first read is counted where W is found."""
        again = moved.link_bytes - w.bytes
        self.reread_bytes += again
        self.reread_peer_bytes += again if w.home == "peer" else 0
        self.hbm_bytes += moved.hbm_read_bytes + moved.hbm_write_bytes


class HybridLinear(Linear):
    """out = x W^T (+ bias), W at any home. There is one for each launch context."""

    def __init__(
        self,
        context: LaunchContext,
        chooser: Chooser,
        cache: WeightCache | None,
        gemms: HybridGemms,
    ) -> None:
        super().__init__(context, chooser, cache)
        self._gemms = gemms

    def __call__(
        self, x: Tensor, w: WeightHandle, bias: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """Multiply as `Linear` does, with the same arguments and errors."""
        rows = x.shape[0]
        if not rows or w.home == "hbm" or w.map_pointer or w.k % _TMA_ELEMENTS:
            return super().__call__(x, w, bias, out)
        if out is None:
            out = torch.empty(rows, w.n, dtype=x.dtype, device=x.device)
        near = self._find(w)
        if near.home == "hbm":
            self._launch("resident", Tiles(), x, near, bias, out)
            return out
        tiles = served_tiles(w.dtype, rows, self._gemms.alpha(w))
        # Nothing holds it to a share of the link: the published system lets slices contend.
        self.launched["hybrid"] += 1
        launch(self.context, "hybrid", tiles, x, near, bias, out)
        self._gemms.count(near, traffic("hybrid", rows, w.n, w.k, ITEM_BYTES, tiles))
        return out

    def gated(self, x: Tensor, w: WeightHandle, bias: Tensor | None = None) -> Tensor:
        """Return `silu_mul(self(x, w, bias))`: x [M, K] -> [M, N / 2]."""
        return silu_mul(self(x, w, bias))
