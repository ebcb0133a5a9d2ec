"""Operators of `kernels.ops.Ops` that combine several steps, for devices without a fused kernel."""

from abc import ABC, abstractmethod

from torch import Tensor

from c2cserve.kernels.layer import KvLayout, Layer, TokenRows


class Apart(ABC):
    """`Ops.gated` and `Ops.attend`, one part after the other."""

    @abstractmethod
    def linear(self, x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
        """`Ops.linear`."""

    @abstractmethod
    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Return silu of the first half of the last dimension, times the second half."""

    @abstractmethod
    def rope_store(
        self,
        qkv: Tensor,
        positions: Tensor,
        cos: Tensor,
        sin: Tensor,
        norms: tuple[Tensor, Tensor] | None,
        eps: float,
        arena: Tensor,
        kv: KvLayout,
        layer: int,
        slots: Tensor,
    ) -> None:
        """Rotate q and k of qkv [T, (Hq + 2 Hkv) D] in place, and write k and v into the arena.

        With `norms`, the weights [D] of q's and k's norms, they are normed first. `slots` int64 [T]
        are block byte offset * 16 + place in the block.
        """

    @abstractmethod
    def attention(
        self,
        qkv: Tensor,
        arena: Tensor,
        kv: KvLayout,
        layer: int,
        q_start: Tensor,
        context_len: Tensor,
        block_table: Tensor,
        scale: float,
        window: int,
    ) -> Tensor:
        """Return the causal attention [T, Hq D] of each sequence's new tokens over its cache.

        `q_start` int32 [S + 1]; `context_len` int32 [S], new tokens included; `block_table`
        int64 [S, *], byte offsets. `window`: the number of tokens that a query sees, 0 for all.
        """

    def gated(self, x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.silu_mul(self.linear(x, w, bias))

    def attend(
        self,
        qkv: Tensor,
        layer: Layer,
        rows: TokenRows,
        rope: tuple[Tensor, Tensor],
        arena: Tensor,
    ) -> Tensor:
        weights, shape = layer.weights, layer.shape
        self.rope_store(
            qkv, rows.positions, *rope, weights.qk_norms, shape.eps, arena, shape.kv, layer.index,
            rows.slots,
        )  # fmt: skip
        return self.attention(
            qkv, arena, shape.kv, layer.index, rows.q_start, rows.context_len, rows.block_table,
            shape.scale, weights.window,
        )  # fmt: skip
