"""Small models of two layers that any operators can run."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from c2cserve.kernels import composed
from c2cserve.kernels.cpu_ops import CpuOps
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

HIDDEN, HEADS, KV_HEADS, DIM, INNER, LAYERS = 40, 6, 2, 8, 28, 2
KINDS = ("dense", "biases", "experts", "mixed")
LENGTHS = (37, 1, 20)


def noise(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def layer_weights(kind: str, index: int, dtype: torch.dtype = torch.bfloat16) -> LayerWeights:
    seeds = iter(range(100 * index, 100 * index + 100))

    def matrix(*shape: int) -> torch.Tensor:
        return (noise(*shape, seed=next(seeds)) * 0.2).to(dtype)

    def vector(length: int) -> torch.Tensor:
        return 1 + noise(length, seed=next(seeds)) * 0.1

    biased = kind == "biases"
    rows = (HEADS + 2 * KV_HEADS) * DIM
    mlp: Mlp | Experts = Mlp(
        matrix(2 * INNER, HIDDEN), vector(2 * INNER) if biased else None,
        matrix(HIDDEN, INNER), vector(HIDDEN) if biased else None,
    )  # fmt: skip
    if kind == "experts" or (kind == "mixed" and index == 1):
        mlp = Experts(
            matrix(5, HIDDEN), matrix(5, 2 * INNER, HIDDEN), matrix(5, HIDDEN, INNER), 2, True
        )
    return LayerWeights(
        input_norm=vector(HIDDEN),
        qkv=matrix(rows, HIDDEN),
        qkv_bias=vector(rows) if biased else None,
        qk_norms=(vector(DIM), vector(DIM)) if biased else None,
        o=matrix(HIDDEN, HEADS * DIM),
        o_bias=vector(HIDDEN) if biased else None,
        post_norm=vector(HIDDEN),
        mlp=mlp,
        window=9 if biased and index else 0,
    )


@dataclass
class Model:
    """Two layers and a cache that any operators can run over, in any chunking."""

    ops: Ops
    layers: list[Layer]
    arena: torch.Tensor

    @classmethod
    def of(cls, ops: Ops, kind: str, dtype: str = "bfloat16") -> "Model":
        kv = KvLayout(LAYERS, KV_HEADS, DIM, dtype)
        shape = LayerShape(kv, HIDDEN, HEADS, 1e-5, DIM**-0.5)
        weights = [layer_weights(kind, i, getattr(torch, dtype)) for i in range(LAYERS)]
        layers = [ops.prepare(i, one, shape) for i, one in enumerate(weights)]
        return cls(ops, layers, torch.zeros(6 * kv.block_bytes, dtype=torch.uint8))

    def rows(self, spans: dict[int, tuple[int, int]]) -> TokenRows:
        block = self.layers[0].shape.kv.block_bytes
        table = torch.tensor([[4, 1, 3], [0, 0, 0], [5, 2, 0]])[list(spans)] * block
        at = [(i, t) for i, (begin, end) in enumerate(spans.values()) for t in range(begin, end)]
        counts = torch.tensor([0, *(end - begin for begin, end in spans.values())])
        return TokenRows(
            positions=torch.tensor([t for _, t in at], dtype=torch.int32),
            q_start=counts.cumsum(0).int(),
            context_len=torch.tensor([end for _, end in spans.values()], dtype=torch.int32),
            block_table=table,
            slots=torch.tensor([int(table[i, t // 16]) * 16 + t % 16 for i, t in at]),
        )

    def rope(self) -> tuple[torch.Tensor, torch.Tensor]:
        angles = torch.outer(torch.arange(64), 0.5 ** torch.arange(DIM // 2))
        return angles.cos(), angles.sin()

    def run(self, spans: dict[int, tuple[int, int]]) -> dict[int, torch.Tensor]:
        hidden = torch.cat([noise(64, HIDDEN, seed=s)[a:b] for s, (a, b) in spans.items()])
        rows = self.rows(spans)
        self.ops.run_layers(hidden, self.layers, rows, self.rope(), self.arena)
        starts = rows.q_start.tolist()
        return {s: hidden[a:b] for s, (a, b) in zip(spans, pairwise(starts), strict=True)}


WHOLE = {s: (0, length) for s, length in enumerate(LENGTHS)}

WANTED: tuple[tuple[int, ...], ...] = ((), (57,), (36, 37, 57), tuple(range(3, 58)), (*range(58),))
"""Rows of `WHOLE` that are read afterwards: few, and more than tiles read in place."""


def check_wanted(ops: Ops, kind: str, wanted: tuple[int, ...]) -> None:
    """Rows that are wanted, and the cache, have the bits of a run for all rows."""
    whole, some = Model.of(ops, kind), Model.of(ops, kind)
    want = torch.cat(list(whole.run(WHOLE).values()))
    hidden = torch.cat([noise(64, HIDDEN, seed=s)[a:b] for s, (a, b) in WHOLE.items()])
    rows, picked = some.rows(WHOLE), torch.tensor(wanted, dtype=torch.int64)
    ops.run_layers(hidden, some.layers, rows, some.rope(), some.arena, picked)
    assert torch.equal(hidden[picked], want[picked])
    assert torch.equal(some.arena, whole.arena)


class OneByOne(CpuOps):
    """The native operators, each by a call of its own."""

    def run_layers(
        self, hidden: torch.Tensor, layers: Sequence[Layer], rows: TokenRows,
        rope: tuple[torch.Tensor, torch.Tensor], arena: torch.Tensor,
        wanted: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        composed.run_layers(self, hidden, layers, rows, rope, arena)

    def run_attention(
        self, hidden: torch.Tensor, layer: Layer, rows: TokenRows,
        rope: tuple[torch.Tensor, torch.Tensor], arena: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        return composed.run_attention(self, hidden, layer, rows, rope, arena)
