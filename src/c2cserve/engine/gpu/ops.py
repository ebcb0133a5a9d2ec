"""The `kernels.ops.Ops` of a GPU slice: dataflows for GEMMs, and Triton between them.

Weights stay at their home and are read there by every step. Activations are the only thing that is
always on the GPU. They have the weights' dtype.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from c2cserve.engine.gpu.graphs import DecodeGraphs
from c2cserve.engine.gpu.layers import (
    DenseHalf,
    GpuLayer,
    SparseHalf,
    gpu_layer,
    handle_of,
    run_padded,
)
from c2cserve.engine.gpu.sampling import HostSampler, OnStepEnd, Sampler, is_plain
from c2cserve.kernels.gpu import elementwise
from c2cserve.kernels.gpu.attention.flash import Flash
from c2cserve.kernels.gpu.attention.paged import Arrivals, attend
from c2cserve.kernels.gpu.gemm.experts import Routing, by_expert, choose, gather
from c2cserve.kernels.gpu.gemm.weight import WeightHandle
from c2cserve.kernels.layer import Layer, LayerShape, LayerWeights, TokenRows
from c2cserve.kernels.ops import AwaitedMasks, RowSampling, Sample
from c2cserve.memory.hbm_cache import HbmCache


class Multiply(Protocol):
    """The GEMMs of a slice: `kernels.gpu.gemm.linear.Linear`."""

    def __call__(self, x: Tensor, w: WeightHandle, bias: Tensor | None = None) -> Tensor: ...

    def gated(self, x: Tensor, w: WeightHandle, bias: Tensor | None = None) -> Tensor: ...

    def experts(self, x: Tensor, w: WeightHandle, offsets: Tensor, top_k: int) -> Tensor: ...


class GpuOps:
    """Operators that launch on the current stream of the calling thread. Nothing waits but
    `collect` of what `sample` returns.

    Kernels trust what they cannot check: slots and block tables come from the policy. Raises as
    `kernels.gpu.gemm.linear.Linear` does.
    """

    def __init__(
        self,
        multiply: Multiply,
        device: torch.device,
        host_sampler: HostSampler,
        on_step_end: OnStepEnd | None = None,
        flash: Flash | None = None,
    ) -> None:
        """`on_step_end`: see `Sampler`. `flash`: attention of long prompts, see `attend`."""
        self._multiply = multiply
        self._device = device
        self._sampler = Sampler(host_sampler, on_step_end)
        self._arrivals = Arrivals(device)
        self._flash = flash
        self.graphs: DecodeGraphs | None = None

    def embed(self, table: Tensor, ids: Tensor) -> Tensor:
        return elementwise.embed(table, ids, self._device)

    def linear(self, x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
        narrow = None if bias is None else bias.to(w.dtype)
        return self._multiply(x, handle_of(w, self._device), narrow)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return elementwise.rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return elementwise.add_rms_norm(x, residual, weight, eps)

    def gated(self, x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
        narrow = None if bias is None else bias.to(w.dtype)
        return self._multiply.gated(x, handle_of(w, self._device), narrow)

    def attend(
        self,
        qkv: Tensor,
        layer: Layer,
        rows: TokenRows,
        rope: tuple[Tensor, Tensor],
        arena: Tensor,
    ) -> Tensor:
        return attend(qkv, layer, rows, rope, arena, self._arrivals, self._flash)

    def router_logits(self, x: Tensor, router: Tensor) -> Tensor:
        return self.linear(x, router)

    def moe_route(self, logits: Tensor, k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
        ids, weights = choose(logits, k, renormalize=renormalize)
        return ids.int(), weights

    def moe_experts(
        self, x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor
    ) -> Tensor:
        routing = by_expert(ids, weights, w13.shape[0])
        return self._experts(x, routing, handle_of(w13, self._device), handle_of(w2, self._device))

    def _experts(self, x: Tensor, routing: Routing, w13: WeightHandle, w2: WeightHandle) -> Tensor:
        offsets, top_k = routing.offsets, routing.top_k
        gate_up = self._multiply.experts(gather(x, routing), w13, offsets, top_k)
        y = self._multiply.experts(elementwise.silu_mul(gate_up), w2, offsets, top_k)
        return elementwise.combine(y, routing.places, routing.weights, len(x))

    # ---- whole layers ---------------------------------------------------------------------------

    def prepare(self, index: int, weights: LayerWeights, shape: LayerShape) -> Layer:
        return gpu_layer(index, weights, shape, self._device)

    def run_layers(
        self,
        hidden: Tensor,
        layers: Sequence[Layer],
        rows: TokenRows,
        rope: tuple[Tensor, Tensor],
        arena: Tensor,
        wanted: Tensor | None = None,
    ) -> None:
        mine = [_gpu_layer(layer) for layer in layers]
        if self.graphs is None:
            run_padded(self._launch_layers, hidden, mine, rows, rope, arena)
        else:
            self.graphs.run(hidden, mine, rows, rope, arena)

    def _launch_layers(
        self,
        hidden: Tensor,
        layers: Sequence[GpuLayer],
        rows: TokenRows,
        rope: tuple[Tensor, Tensor],
        arena: Tensor,
    ) -> Tensor:
        """Launch layers. Return the last one's branch, which is still to be added to `hidden`.

        Rows of `hidden` after those of `rows` are padding.
        """
        # The branch of the layer before is added to `hidden` where the next norm reads it.
        branch: Tensor | None = None
        for layer in layers:
            x = self._first_half(hidden, branch, layer, rows, rope, arena)
            branch = self._second_half(x, layer, len(rows.positions))
        assert branch is not None, "no layers"
        return branch

    def capture_decoding(
        self, launched: Counter[str], cache: HbmCache | None, *, by_places: bool = False
    ) -> None:
        """Run steps of one new token a sequence as graphs from now on. `by_places`: see
        `DecodeGraphs`."""
        self.graphs = DecodeGraphs(self._launch_layers, launched, cache, by_places=by_places)

    def renew(self) -> None:
        """Forget what a failed step may have left half done. Nothing runs meanwhile.

        That is graphs with their memory and bindings, and attention's counters, which have to be 0
        between launches.
        """
        self._arrivals = Arrivals(self._device)
        if self.graphs is not None:
            self.graphs.renew()

    def run_attention(
        self,
        hidden: Tensor,
        layer: Layer,
        rows: TokenRows,
        rope: tuple[Tensor, Tensor],
        arena: Tensor,
    ) -> Tensor:
        return self._first_half(hidden, None, _gpu_layer(layer), rows, rope, arena)

    def _first_half(
        self,
        hidden: Tensor,
        branch: Tensor | None,
        layer: GpuLayer,
        rows: TokenRows,
        rope: tuple[Tensor, Tensor],
        arena: Tensor,
    ) -> Tensor:
        weights, shape = layer.weights, layer.shape
        if branch is None:
            x = elementwise.rms_norm(hidden, weights.input_norm, shape.eps)
        else:
            x = elementwise.add_rms_norm(branch, hidden, weights.input_norm, shape.eps)
        qkv = self._multiply(x, layer.qkv.weight, layer.qkv.bias)
        out = attend(qkv, layer, rows, rope, arena, self._arrivals, self._flash)
        out = self._multiply(out, layer.o.weight, layer.o.bias)
        return elementwise.add_rms_norm(out, hidden, weights.post_norm, shape.eps)

    def _second_half(self, x: Tensor, layer: GpuLayer, tokens: int) -> Tensor:
        """Return a layer's second branch. Rows of x after `tokens` are padding."""
        match layer.second:
            case DenseHalf(gate_up, down):
                act = self._multiply.gated(x, gate_up.weight, gate_up.bias)
                return self._multiply(act, down.weight, down.bias)
            case SparseHalf(router, w13, w2, per_token, renormalize):
                logits = self._multiply(x, router.weight)[:tokens]
                chosen = choose(logits, per_token, renormalize=renormalize)
                return self._experts(x, by_expert(*chosen, w13.experts), w13, w2)

    def sample(
        self, logits: Tensor, rows: Sequence[RowSampling], awaited: AwaitedMasks | None = None
    ) -> Sample:
        return self._sampler(logits, rows, awaited)

    def chained(self, ids: Tensor, sampled: Tensor) -> Tensor:
        return elementwise.chained(ids, sampled)

    def chains(self, row: RowSampling) -> bool:
        return is_plain(row)


def _gpu_layer(layer: Layer) -> GpuLayer:
    if not isinstance(layer, GpuLayer):
        raise ValueError(f"layer {layer.index} was prepared by other operators")
    return layer
