"""One decoder for every supported architecture, written over `kernels.ops.Ops`.

A forward pass is a generator: before it uses weights that are still loading it yields, so that the
executor can go on with other models meanwhile. All state of a pass is in its `ForwardBatch`: a
slice runs many models, nothing here is global.
"""

from collections.abc import Generator
from dataclasses import dataclass

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
from c2cserve.engine.models.rope import RopeTables
from c2cserve.engine.weights import Weights
from c2cserve.kernels.ops import KvLayout, Ops

Wait = Generator[list[int], None, None]
"""Yields the groups it waits for; to be resumed when they are ready."""


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """T new tokens of S sequences, concatenated."""

    ids: Tensor
    """int32[T]"""
    positions: Tensor
    """int32[T]"""
    q_start: Tensor
    """int32[S + 1]: where each sequence's tokens begin."""
    context_len: Tensor
    """int32[S]: tokens in the cache after this pass."""
    block_table: Tensor
    """int64[S, B]: byte offsets into the arena."""
    slots: Tensor
    """int64[T]: block offset * 16 + place in the block."""
    logit_rows: Tensor
    """int64[R]: tokens whose logits are wanted."""
    longest: int
    """The largest of `context_len`."""


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    qk_norms: tuple[Tensor, Tensor] | None
    o: Tensor
    o_bias: Tensor | None
    post_norm: Tensor
    gate_up: Tensor | None
    gate_up_bias: Tensor | None
    down: Tensor | None
    down_bias: Tensor | None
    router: Tensor | None
    w13: Tensor | None
    w2: Tensor | None


class Decoder:
    """A model on its segment. Making one is cheap: tables, no weights."""

    def __init__(self, config: ModelConfig, weights: Weights, max_context: int) -> None:
        self.config = config
        self.kv = KvLayout(config.layers, config.kv_heads, config.head_dim, config.dtype)
        self._weights = weights
        self._layers: list[_Layer | None] = [None] * config.layers
        self._groups = [weights.group(layer_group(i)) for i in range(config.layers)]
        self._head: Tensor | None = None
        self._norm: Tensor | None = None
        self._embed: Tensor | None = None
        self._head_group = weights.group(HEAD)
        self._embed_group = weights.group(HEAD if config.tied else EMBED)
        self._rope = RopeTables(config, max_context)
        self._scale = config.head_dim**-0.5

    def forward(
        self, batch: ForwardBatch, ops: Ops, arena: Tensor
    ) -> Generator[list[int], None, Tensor]:
        """Logits float32[R, vocab] of `batch.logit_rows`. Raises `WeightsLost`, and ValueError for
        a context longer than the longest served."""
        eps = self.config.norm_eps
        tables = self._rope.upto(batch.longest)
        residual = self._embedding(batch, ops)
        branch: Tensor | None = None
        for index in range(self.config.layers):
            layer = self._layers[index]
            if layer is None:
                yield from self._wait([self._groups[index]])
                layer = self._layers[index] = self._materialize(index)
            if branch is None:
                x = ops.rms_norm(residual, layer.input_norm, eps)
            else:
                x = ops.add_rms_norm(branch, residual, layer.input_norm, eps)
            x = self._attention(index, layer, x, tables, batch, ops, arena)
            x = ops.add_rms_norm(x, residual, layer.post_norm, eps)
            if layer.router is None:
                branch = self._mlp(layer, x, ops)
            else:
                branch = yield from self._experts(index, layer, x, ops)
        assert branch is not None
        if not len(batch.logit_rows):
            return residual.new_empty((0, self.config.vocab))  # a chunk that draws nothing
        if self._head is None or self._norm is None:
            yield from self._wait([self._head_group])
            self._norm = self._weights.tensor(NORM).float()
            self._head = self._weights.tensor(EMBED if self.config.tied else HEAD)
        rows = batch.logit_rows
        x = ops.add_rms_norm(branch[rows], residual[rows], self._norm, eps)
        return ops.linear(x, self._head)

    def _wait(self, groups: list[int]) -> Wait:
        while missing := self._weights.missing(groups):
            self._weights.want(missing)
            yield missing

    def _embedding(self, batch: ForwardBatch, ops: Ops) -> Tensor:
        if self._embed is None:
            if self._weights.missing([self._embed_group]):
                return self._weights.rows(EMBED, batch.ids)
            self._embed = self._weights.tensor(EMBED)
        return ops.embed(self._embed, batch.ids)

    def _attention(
        self, index: int, layer: _Layer, x: Tensor, tables: tuple[Tensor, Tensor],
        batch: ForwardBatch, ops: Ops, arena: Tensor,
    ) -> Tensor:  # fmt: skip
        qkv = ops.linear(x, layer.qkv, layer.qkv_bias)
        ops.rope_store(
            qkv, batch.positions, *tables, layer.qk_norms, self.config.norm_eps, arena, self.kv,
            index, batch.slots,
        )  # fmt: skip
        out = ops.attention(
            qkv, arena, self.kv, index, batch.q_start, batch.context_len, batch.block_table,
            self._scale, self.config.windows[index],
        )  # fmt: skip
        return ops.linear(out, layer.o, layer.o_bias)

    @staticmethod
    def _mlp(layer: _Layer, x: Tensor, ops: Ops) -> Tensor:
        assert layer.gate_up is not None
        assert layer.down is not None
        hidden = ops.silu_mul(ops.linear(x, layer.gate_up, layer.gate_up_bias))
        return ops.linear(hidden, layer.down, layer.down_bias)

    def _experts(
        self, index: int, layer: _Layer, x: Tensor, ops: Ops
    ) -> Generator[list[int], None, Tensor]:
        """Wait for the chosen experts only: a cold model answers before all of it is loaded."""
        moe = self.config.moe
        assert moe is not None
        assert layer.router is not None
        assert layer.w13 is not None
        assert layer.w2 is not None
        ids, weights = ops.moe_route(ops.linear(x, layer.router), moe.per_token, moe.renormalize)
        if not self._weights.complete:
            chosen = sorted(set(ids.flatten().tolist()))
            group = self._weights.group
            yield from self._wait([group(expert_group(index, expert)) for expert in chosen])
        return ops.moe_experts(x, ids, weights, layer.w13, layer.w2)

    def _materialize(self, index: int) -> _Layer:
        """Views of one layer's weights; the small vectors are widened to float32 once."""

        def view(name: str) -> Tensor | None:
            full = layer_tensor(index, name)
            return self._weights.tensor(full) if self._weights.has(full) else None

        def wide(name: str) -> Tensor | None:
            tensor = view(name)
            return None if tensor is None else tensor.float().contiguous()

        def need(tensor: Tensor | None) -> Tensor:
            assert tensor is not None
            return tensor

        q_norm, k_norm = wide("q_norm"), wide("k_norm")
        return _Layer(
            input_norm=need(wide("input_norm")),
            qkv=need(view("qkv")),
            qkv_bias=wide("qkv_bias"),
            qk_norms=None if q_norm is None else (q_norm, need(k_norm)),
            o=need(view("o")),
            o_bias=wide("o_bias"),
            post_norm=need(wide("post_norm")),
            gate_up=view("gate_up"),
            gate_up_bias=wide("gate_up_bias"),
            down=view("down"),
            down_bias=wide("down_bias"),
            router=view("router"),
            w13=view("w13"),
            w2=view("w2"),
        )


def run_to_end(forward: Generator[list[int], None, Tensor]) -> Tensor:
    """Drive a pass whose weights are all there."""
    try:
        while True:
            next(forward)
    except StopIteration as end:
        logits: Tensor = end.value
        return logits
