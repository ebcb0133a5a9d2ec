"""The operators that models are written in. `CpuOps` and `engine.gpu.ops.GpuOps` are fast, `RefOps`
is the reference in tests.

Weights keep their dtype and are read in place. Norm weights, biases and rotary tables are float32:
they are widened once, when a model is attached. Activations are float32 on CPUs, and have the
weights' dtype on GPUs. Sums are float32 or better everywhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from c2cserve.kernels.layer import Layer, LayerShape, LayerWeights, TokenRows


@dataclass(frozen=True, slots=True)
class RowSampling:
    """How one row's token is sampled. `prompt` and `output` are the int32 tokens so far, which
    penalties need."""

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
    mask: Tensor | None = None
    """int32 [ceil(V / 32)], dense: bit v % 32 of word v // 32 says whether token v is allowed. None
    allows all."""
    top_logprobs: int = -1


@dataclass(frozen=True, slots=True)
class AwaitedMasks:
    """The masks of a sample's rows, in shared memory that another process writes meanwhile.

        words   [ ready | places [P] | masks [M, W] ]     int32

    Of `places` the first are the rows' own, as `RowMasks.places` of GPUs. A device reads the words
    by their `address`, and waits for a `ready` of 1 before it reads any others.
    """

    words: Tensor
    address: int
    places_at: int
    """The word with the first row's place,"""
    masks_at: int
    """and the first word of the masks."""
    count: int
    """M,"""
    width: int
    """W."""


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """The tokens of a finished sample, one entry per row. `ids[i]` is -1 if row i holds a NaN or an
    infinity, or if no token is allowed in it. It is a `Sample` itself, for operators that finish at
    once."""

    ids: list[int]
    logprobs: list[float]
    top: list[list[tuple[int, float]]] = field(default_factory=list[list[tuple[int, float]]])

    @property
    def done(self) -> bool:
        return True

    @property
    def chain(self) -> Tensor | None:
        return None

    def collect(self) -> "SampledTokens":
        return self


class Sample(Protocol):
    """A token per row, known or still to be computed. The samples of one `Ops` are done in the
    order of their launch."""

    @property
    def done(self) -> bool:
        """Whether `collect` returns at once."""
        ...

    @property
    def chain(self) -> Tensor | None:
        """The tokens, int32 [R], where the operators can read them in a later launch.

        Only entries of rows for which `Ops.chains` holds have a meaning. None without such rows.
        """
        ...

    def collect(self) -> SampledTokens:
        """Wait until the tokens are known."""
        ...


class Ops(Protocol):
    """Shapes: T tokens, S sequences, H hidden, Hq and Hkv heads, D head_dim."""

    def embed(self, table: Tensor, ids: Tensor) -> Tensor:
        """Return rows `ids` (int32 [T]) of `table` [V, H] as activations [T, H]."""
        ...

    def linear(self, x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x [T, K] times w [N, K] transposed, plus bias [N]. Rows may be strided."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Do `residual += x` in place, and return the norm of the sum."""
        ...

    def gated(self, x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return silu(gate) * up [T, I].

        gate and up are the two halves of x [T, K] times w [2 I, K] transposed, plus bias [2 I].
        """
        ...

    def attend(
        self,
        qkv: Tensor,
        layer: Layer,
        rows: TokenRows,
        rope: tuple[Tensor, Tensor],
        arena: Tensor,
    ) -> Tensor:
        """Return the causal attention [T, Hq D] of each sequence's new tokens over its cache.

        A query sees no further back than the layer's window. First, q and k of `qkv`
        [T, (Hq + 2 Hkv) D] are rotated, and k and v are written into the arena. If the layer has
        norms of heads, they come before the rotation. The contents of `qkv` are undefined
        afterwards. `rope`: cos and sin [positions, D / 2].
        """
        ...

    def router_logits(self, x: Tensor, router: Tensor) -> Tensor:
        """Return x [T, H] times router [E, H] transposed, with x as it is. `linear` may round x to
        the weights' dtype first, which can choose other experts."""
        ...

    def moe_route(self, logits: Tensor, k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
        """Choose the k largest of a softmax over all experts. Return their ids int32 [T, k] and
        weights float32 [T, k]."""
        ...

    def moe_experts(
        self, x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor
    ) -> Tensor:
        """Return the weighted sum of each token's experts [T, H].

        `w13` [E, 2 I, H] has an expert's gate rows, then its up rows; `w2` is [E, H, I]. The order
        in which a token's experts are added does not depend on the batch.
        """
        ...

    # ---- whole layers: the operators above in sequence (`kernels.composed`), in fewer calls -----

    def prepare(self, index: int, weights: LayerWeights, shape: LayerShape) -> Layer:
        """Return a layer, checked once. It points into its weights, which must stay in place."""
        ...

    def run_layers(
        self,
        hidden: Tensor,
        layers: Sequence[Layer],
        rows: TokenRows,
        rope: tuple[Tensor, Tensor],
        arena: Tensor,
        wanted: Tensor | None = None,
    ) -> None:
        """Run consecutive layers of one model over hidden [T, H], in place. `rope`: cos and sin
        [positions, D / 2].

        `wanted`: int64[R], ascending, the rows of hidden that are read afterwards; None: all. The
        last layer may leave out what only other rows need. Those then hold anything."""
        ...

    def run_attention(
        self,
        hidden: Tensor,
        layer: Layer,
        rows: TokenRows,
        rope: tuple[Tensor, Tensor],
        arena: Tensor,
    ) -> Tensor:
        """Run a layer's first half over hidden [T, H], in place. Return the norm of hidden, which
        is the input of its second half."""
        ...

    def sample(
        self, logits: Tensor, rows: Sequence[RowSampling], awaited: AwaitedMasks | None = None
    ) -> Sample:
        """Sample a token for each row of logits [R, V].

        The device waits for masks that are `awaited`; the caller does not. Rows that have some
        chain, and their own `mask` is None. Operators of the host get none.
        """
        ...

    def chained(self, ids: Tensor, sampled: Tensor) -> Tensor:
        """Return `ids` int32 [T] with every `-1 - row` replaced by `sampled[row]`, on their
        device."""
        ...

    def chains(self, row: RowSampling) -> bool:
        """Return whether such a row's token can be read from `Sample.chain`."""
        ...
