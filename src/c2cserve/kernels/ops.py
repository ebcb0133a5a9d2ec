"""The operators models are written in. `CpuOps` and `engine.gpu.ops.GpuOps` are fast, `RefOps` is
the truth for tests.

Weights keep their dtype and are read in place; norm weights, biases and rotary tables are float32
(widened once when a model is attached). Activations are float32 on CPUs, of the weights' dtype on
GPUs; sums are float32 or better everywhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from c2cserve.kernels.layer import Layer, LayerShape, LayerWeights, TokenRows


@dataclass(frozen=True, slots=True)
class RowSampling:
    """How one row's token is drawn; `prompt` and `output` are int32 histories (penalties)."""

    seed: int
    position: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    prompt: Tensor | None = None
    output: Tensor | None = None
    bias_ids: Tensor | None = None
    bias: Tensor | None = None
    banned: Tensor | None = None
    top_logprobs: int = -1


@dataclass(frozen=True, slots=True)
class Drawn:
    """Lists, one entry per row. `ids[i]` is -1 when row i holds a NaN or an infinity. It is a
    `Draw` too, a finished one."""

    ids: list[int]
    logprobs: list[float]
    top: list[list[tuple[int, float]]] = field(default_factory=list[list[tuple[int, float]]])

    @property
    def done(self) -> bool:
        return True

    @property
    def chain(self) -> Tensor | None:
        return None

    def collect(self) -> "Drawn":
        return self


class Draw(Protocol):
    """A token per row, drawn or about to be. Draws of one `Ops` are done in order."""

    @property
    def done(self) -> bool:
        """Whether `collect` returns at once."""
        ...

    @property
    def chain(self) -> Tensor | None:
        """int32[R], where the operators read them once everything before is done: the tokens of
        the rows that `Ops.chains`. None when there are none."""
        ...

    def collect(self) -> Drawn: ...


class Ops(Protocol):
    """Shapes: T tokens, S sequences, H hidden, Hq and Hkv heads, D head_dim."""

    def embed(self, table: Tensor, ids: Tensor) -> Tensor:
        """Rows `ids` (int32[T]) of `table` [V, H] as activations [T, H]."""
        ...

    def linear(self, x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [T, K] times w [N, K] transposed, plus bias [N]; rows may be strided."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`residual += x`, in place; returns the norm of the sum."""
        ...

    def gated(self, x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [T, K] times w [2 I, K] transposed, plus bias [2 I]: silu of the first half of that,
        times the second -> [T, I]."""
        ...

    def attend(
        self,
        qkv: Tensor,
        layer: Layer,
        rows: TokenRows,
        rope: tuple[Tensor, Tensor],
        arena: Tensor,
    ) -> Tensor:
        """Causal attention of each sequence's new tokens over its cache, within the layer's window.
        Of qkv [T, (Hq + 2 Hkv) D] q and k are normed (if the layer does) and rotated, and k and v
        written into the arena, before -> [T, Hq D]. What is left in qkv is undefined. `rope`: cos
        and sin [positions, D / 2]."""
        ...

    def moe_route(self, logits: Tensor, k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
        """Softmax over all experts, the top k: ids int32[T, k] and weights float32[T, k]."""
        ...

    def moe_experts(
        self, x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor
    ) -> Tensor:
        """w13 [E, 2 I, H] (gate rows, then up rows), w2 [E, H, I]; sums in expert order."""
        ...

    # ---- whole layers: the operators above in a row (`kernels.composed`), by fewer calls --------

    def prepare(self, index: int, weights: LayerWeights, shape: LayerShape) -> Layer:
        """A layer, checked once. It points into its weights, which stay where they are."""
        ...

    def run_layers(
        self,
        hidden: Tensor,
        layers: Sequence[Layer],
        rows: TokenRows,
        rope: tuple[Tensor, Tensor],
        arena: Tensor,
    ) -> None:
        """Consecutive layers of one model over hidden [T, H], in place. `rope`: cos and sin
        [positions, D / 2]."""
        ...

    def run_attention(
        self,
        hidden: Tensor,
        layer: Layer,
        rows: TokenRows,
        rope: tuple[Tensor, Tensor],
        arena: Tensor,
    ) -> Tensor:
        """A layer's first half over hidden [T, H], in place; returns what its second half begins
        with, the norm of hidden."""
        ...

    def sample(self, logits: Tensor, rows: Sequence[RowSampling]) -> Draw: ...

    def chained(self, ids: Tensor, drawn: Tensor) -> Tensor:
        """int32[T]: `ids` with every -1 - row replaced by `drawn[row]`, on their device."""
        ...

    def chains(self, row: RowSampling) -> bool:
        """Whether such a row's token can be read from `Draw.chain`."""
        ...
