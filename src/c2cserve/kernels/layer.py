"""A decoder layer's weights and a step's rows: what the operators that run whole layers take."""

from dataclasses import dataclass, field

from torch import Tensor

from c2cserve.core.tensors import Dtype

BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Shape of a model's KV blocks: [layers, 2, kv_heads, 16 tokens x head_dim], one block after
    another. V is [16, head_dim] inside a block; so is K on GPUs, on CPUs it is transposed."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: Dtype

    @property
    def block_bytes(self) -> int:
        item = 4 if self.dtype == "float32" else 2
        return self.layers * 2 * self.kv_heads * BLOCK_TOKENS * self.head_dim * item


@dataclass(frozen=True, slots=True)
class Mlp:
    """A dense layer's second half; `gate_up` has gate rows, then up rows."""

    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


@dataclass(frozen=True, slots=True)
class Experts:
    """A sparse layer's second half: router [E, H], w13 [E, 2 I, H], w2 [E, H, I]."""

    router: Tensor
    w13: Tensor
    w2: Tensor
    per_token: int
    renormalize: bool


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Matrices keep their dtype and are read in place; norms and biases are float32."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    qk_norms: tuple[Tensor, Tensor] | None
    o: Tensor
    o_bias: Tensor | None
    post_norm: Tensor
    mlp: Mlp | Experts
    window: int
    """Tokens a query sees, 0 for all."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What all layers of a model share."""

    kv: KvLayout
    hidden: int
    heads: int
    eps: float
    scale: float
    """The factor of attention scores."""


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """A layer as `Ops.prepare` made it; to be run by operators of the same kind."""

    index: int
    weights: LayerWeights
    shape: LayerShape


@dataclass(frozen=True, slots=True)
class TokenRows:
    """T new tokens of S sequences, concatenated, and where their keys and values lie."""

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
    host: "TokenRows | None" = field(default=None, kw_only=True)
    """The same on the host, where these were moved from there."""
