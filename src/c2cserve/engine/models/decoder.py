"""One decoder for every supported architecture, written over `kernels.ops.Ops`.

A forward pass is a generator. It yields before it uses weights that are still loading, so that the
executor can go on with other models meanwhile. All state of a pass is in its `ForwardBatch` and its
frame: a slice runs many models, and nothing here is global.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch
from torch import Tensor

from c2cserve.engine.models.config import ModelConfig
from c2cserve.engine.models.layout import (
    EMBED,
    HEAD,
    NORM,
    expert_group,
    layer_group,
    layer_tensor,
)
from c2cserve.engine.models.placing import placed
from c2cserve.engine.models.rope import RopeTables
from c2cserve.engine.weights import Weights
from c2cserve.kernels.layer import (
    Experts,
    KvLayout,
    Layer,
    LayerShape,
    LayerWeights,
    Mlp,
    TokenRows,
)
from c2cserve.kernels.ops import Ops

Wait = Generator[list[int], None, None]
"""Yields the groups it waits for. It is resumed when they are ready."""


def _all_there() -> None:
    """No layer is on its way to where steps read weights."""


@dataclass(frozen=True, slots=True)
class ForwardBatch(TokenRows):
    """The rows of a pass: their tokens, and the rows whose logits are wanted."""

    ids: Tensor
    """int32[T]"""
    logit_rows: Tensor
    """int64[R]: tokens whose logits are wanted, in order."""
    longest: int
    """The largest of `context_len`."""

    @property
    def ids_to_read(self) -> Tensor:
        """The tokens, on the host if all are known there. To read them elsewhere takes a wait."""
        host = self.host
        if isinstance(host, ForwardBatch) and bool((host.ids >= 0).all()):
            return host.ids
        return self.ids


class Decoder:
    """A model on its segment. Making one is cheap: tables, no weights."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        max_context: int,
        device: torch.device | None = None,
    ) -> None:
        """`device`: where norms, biases and rotary tables are kept, None for the host. Matrices
        stay where `weights` has them."""
        self.config = config
        self._device = device
        self.kv = KvLayout(config.layers, config.kv_heads, config.head_dim, config.dtype)
        self._shape = LayerShape(
            self.kv, config.hidden, config.heads, config.norm_eps, config.head_dim**-0.5
        )
        self._weights = weights
        self._layers: list[Layer] = []
        """The first layers, as far as their weights are known to be loaded."""
        self._groups = [weights.group(layer_group(i)) for i in range(config.layers)]
        self._last: tuple[Tensor, Tensor] | None = None
        self._embed: Tensor | None = None
        self._head_group = weights.group(HEAD)
        self._embed_group = weights.group(HEAD if config.tied else EMBED)
        self._rope = RopeTables(config, max_context, device)

    def forward(
        self, batch: ForwardBatch, ops: Ops, arena: Tensor,
        arrived: Callable[[], int | None] = _all_there,
    ) -> Generator[list[int], None, Tensor]:  # fmt: skip
        """Return logits [R, vocab] of `batch.logit_rows`. Raises `WeightsLost`, and ValueError for
        a context longer than the longest served.

        `arrived` returns how many layers may be read, the first ones; the last one comes with the
        head. None: all of them. While the next one may not be, no groups are yielded."""
        rope = self._rope.upto(batch.longest)
        hidden = self._embedding(batch, ops)
        done = 0
        while done < self.config.layers:
            if done == len(self._layers):
                yield from self._wait([self._groups[done]])
                self._take_layers(ops)
            while (there := arrived()) is not None and there <= done:
                yield []
            layers = self._runnable(done)[: None if there is None else there - done]
            if self._weights.complete or isinstance(layers[0].weights.mlp, Mlp):
                ends = done + len(layers) == self.config.layers
                wanted = batch.logit_rows if ends else None
                ops.run_layers(hidden, layers, batch, rope, arena, wanted)
            else:
                x = ops.run_attention(hidden, layers[0], batch, rope, arena)
                yield from self._experts(hidden, layers[0], x, ops)
            done += len(layers)
        rows = batch.logit_rows
        wanted = rows.shape[0]
        if not wanted:
            return hidden.new_empty((0, self.config.vocab))  # a chunk that samples nothing
        if self._last is None:
            yield from self._wait([self._head_group])
        norm, head = self._norm_and_head()
        last = hidden if wanted == hidden.shape[0] else hidden[rows]
        return ops.linear(ops.rms_norm(last, norm, self._shape.eps), head)

    def prepared(self, ops: Ops) -> tuple[Sequence[Layer], Tensor] | None:
        """Return all layers and the head's matrix. None while weights are being loaded, those of
        layers are asked for then. Raises `WeightsLost`."""
        missing = self._weights.missing([*self._groups, self._head_group])
        self._weights.want(missing)
        if missing or not self._weights.complete:
            return None
        self._take_layers(ops)
        return self._layers, self._norm_and_head()[1]

    def _norm_and_head(self) -> tuple[Tensor, Tensor]:
        """Return the last norm's weight and the head's matrix, which are loaded."""
        if self._last is None:
            head = self._weights.tensor(EMBED if self.config.tied else HEAD)
            self._last = self._vector(NORM), head
        return self._last

    def _wait(self, groups: list[int]) -> Wait:
        while missing := self._weights.missing(groups):
            self._weights.want(missing)
            yield missing

    def _embedding(self, batch: ForwardBatch, ops: Ops) -> Tensor:
        if self._embed is None:
            if self._weights.missing([self._embed_group]):
                rows = self._weights.rows(EMBED, self._embed_group, batch.ids_to_read)
                rows = placed(rows, self._device)
                all_of_them = torch.arange(rows.shape[0], dtype=torch.int32, device=self._device)
                return ops.embed(rows, all_of_them)
            self._embed = self._weights.tensor(EMBED)
        return ops.embed(self._embed, batch.ids)

    def _take_layers(self, ops: Ops) -> None:
        """Prepare the next layers, as far as their weights are loaded."""
        while (index := len(self._layers)) < self.config.layers:
            if self._weights.missing([self._groups[index]]):
                return
            self._layers.append(ops.prepare(index, self._layer_weights(index), self._shape))

    def _runnable(self, done: int) -> list[Layer]:
        """Return layers from `done` on that can run without a wait between them.

        While weights are loading these are the layers before the next sparse one, or that one
        alone.
        """
        layers = self._layers[done:]
        if self._weights.complete:
            return layers
        dense = takewhile(lambda layer: isinstance(layer.weights.mlp, Mlp), layers)
        return list(dense) or layers[:1]

    def _experts(self, hidden: Tensor, layer: Layer, x: Tensor, ops: Ops) -> Wait:
        """Wait for the chosen experts only: a cold model answers before all of it is loaded."""
        experts = layer.weights.mlp
        assert isinstance(experts, Experts)
        logits = ops.router_logits(x, experts.router)
        ids, weights = ops.moe_route(logits, experts.per_token, experts.renormalize)
        chosen = sorted(set(ids.flatten().tolist()))
        group = self._weights.group
        yield from self._wait([group(expert_group(layer.index, expert)) for expert in chosen])
        hidden += ops.moe_experts(x, ids, weights, experts.w13, experts.w2)

    def _vector(self, name: str) -> Tensor:
        return placed(self._weights.tensor(name).float().contiguous(), self._device)

    def _layer_weights(self, index: int) -> LayerWeights:
        """Views of one layer's weights; the small vectors are widened to float32 once."""

        def view(name: str) -> Tensor:
            return self._weights.tensor(layer_tensor(index, name))

        def wide(name: str) -> Tensor:
            return self._vector(layer_tensor(index, name))

        def bias(name: str) -> Tensor | None:
            return wide(name) if self._weights.has(layer_tensor(index, name)) else None

        config, moe = self.config, self.config.moe
        if moe is not None and config.sparse(index):
            mlp = Experts(view("router"), view("w13"), view("w2"), moe.per_token, moe.renormalize)
        else:
            mlp = Mlp(view("gate_up"), bias("gate_up_bias"), view("down"), bias("down_bias"))
        return LayerWeights(
            input_norm=wide("input_norm"),
            qkv=view("qkv"),
            qkv_bias=bias("qkv_bias"),
            qk_norms=(wide("q_norm"), wide("k_norm")) if config.qk_norm else None,
            o=view("o"),
            o_bias=bias("o_bias"),
            post_norm=wide("post_norm"),
            mlp=mlp,
            window=config.windows[index],
        )


def run_to_end(forward: Generator[list[int], None, Tensor]) -> Tensor:
    """Drive a pass whose weights are all there."""
    try:
        while True:
            next(forward)
    except StopIteration as end:
        logits: Tensor = end.value
        return logits
