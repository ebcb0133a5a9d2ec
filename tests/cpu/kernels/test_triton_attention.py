"""Paged attention against float64: ragged batches, every kind of head, windows, long contexts."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreted import DEVICE
from torch import Tensor
from triton_case import close, noise

from c2cserve.kernels.gpu.attention import PIECE_TOKENS, attention
from c2cserve.kernels.layer import BLOCK_TOKENS, KvLayout
from c2cserve.kernels.ref import RefOps, block_views

LAYER = 1


@dataclass
class Case:
    """Sequences (new tokens, tokens in all) whose caches lie scattered over an arena that is NaN
    wherever nothing was stored, for both layouts of keys."""

    lengths: list[tuple[int, int]]
    heads: int
    kv: KvLayout
    dtype: torch.dtype = torch.float16
    window: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        kv = self.kv
        counts = [-(-length // BLOCK_TOKENS) for _, length in self.lengths]
        order = torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(self.seed))
        self.table = torch.full((len(counts), max(counts)), -(2**40))
        size = len(order) * kv.block_bytes
        self.arena = torch.full((size,), 255).to(torch.uint8)
        self.reference = self.arena.clone()
        used = 0
        for s, count in enumerate(counts):
            self.table[s, :count] = order[used : used + count] * kv.block_bytes
            used += count
            self._fill(s, self.lengths[s][1])
        news = torch.tensor([0] + [new for new, _ in self.lengths])
        self.q_start = news.cumsum(0).int()
        self.context = torch.tensor([length for _, length in self.lengths]).int()
        width = (self.heads + 2 * kv.kv_heads) * kv.head_dim
        self.qkv = noise(int(news.sum()), width, seed=self.seed + 1).to(self.dtype)

    def _fill(self, seq: int, length: int) -> None:
        kv, random = self.kv, torch.Generator().manual_seed(77 * self.seed + seq)
        for i in range(0, length, BLOCK_TOKENS):
            at, count = int(self.table[seq, i // BLOCK_TOKENS]), min(BLOCK_TOKENS, length - i)
            planes = self.arena[at : at + kv.block_bytes].view(self.dtype)
            mine = planes.view(kv.layers, 2, kv.kv_heads, BLOCK_TOKENS, kv.head_dim)[LAYER]
            values = torch.randn(2, kv.kv_heads, count, kv.head_dim, generator=random)
            mine[:, :, :count] = values.to(self.dtype)
            for view, plane in zip(block_views(self.reference, kv, LAYER, at), mine, strict=True):
                view[:, :count] = plane[:, :count]

    def run(self, seqs: list[int] | None = None) -> Tensor:
        """The kernels' answer for some of the sequences, as one batch."""
        chosen = list(range(len(self.lengths))) if seqs is None else seqs
        parts = [self.qkv[self.q_start[s] : self.q_start[s + 1]] for s in chosen]
        starts = torch.tensor([0] + [len(part) for part in parts]).cumsum(0).int()
        return attention(
            torch.cat(parts).to(DEVICE), self.arena.to(DEVICE), self.kv, LAYER, starts.to(DEVICE),
            self.context[chosen].to(DEVICE), self.table[chosen].to(DEVICE), self.scale,
            self.window,
        ).cpu()  # fmt: skip

    @property
    def scale(self) -> float:
        return float(self.kv.head_dim**-0.5)

    def check(self) -> None:
        want = RefOps().attention(
            self.qkv, self.reference, self.kv, LAYER, self.q_start, self.context, self.table,
            self.scale, self.window,
        )  # fmt: skip
        # Weights are rounded before they meet the values.
        close(self.run(), want, roundings=2.5, mean=1.0)


def layout(kv_heads: int, dim: int, dtype: str = "float16") -> KvLayout:
    return KvLayout(2, kv_heads, dim, dtype)


@pytest.mark.parametrize("dim", [24, 64, 80, 96, 128, 256])
def test_head_sizes(dim: int) -> None:
    Case([(5, 21), (1, 35)], 2, layout(1, dim)).check()


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 2), (7, 1), (10, 2), (20, 1)])
def test_grouped_heads(heads: int, kv_heads: int) -> None:
    Case([(1, 17), (9, 9), (1, 1)], heads, layout(kv_heads, 64)).check()


def test_bfloat16() -> None:
    Case([(3, 20), (1, 40)], 4, layout(2, 64, "bfloat16"), torch.bfloat16).check()


def test_long_contexts_in_pieces() -> None:
    lengths = [PIECE_TOKENS - 1, PIECE_TOKENS, PIECE_TOKENS + 1, 3 * PIECE_TOKENS + 70]
    Case([(1, length) for length in lengths], 2, layout(1, 64)).check()


def test_a_chunk_far_into_a_prompt() -> None:
    Case([(70, 300), (1, 5), (2, 140)], 4, layout(2, 64)).check()


@pytest.mark.parametrize("window", [1, 16, 40, 400])
def test_windows(window: int) -> None:
    lengths = [(1, 300), (50, 130), (1, 7), (2, 2), (1, 2 * PIECE_TOKENS + 10)]
    Case(lengths, 2, layout(1, 64), window=window).check()


@settings(max_examples=10, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 90)), min_size=1, max_size=4),
    group=st.integers(1, 6), kv_heads=st.integers(1, 2), window=st.sampled_from([0, 0, 20]),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_any_batch(
    lengths: list[tuple[int, int]], group: int, kv_heads: int, window: int, seed: int
) -> None:
    full = [(new, old + new) for new, old in lengths]
    Case(full, group * kv_heads, layout(kv_heads, 64), window=window, seed=seed).check()


def test_a_sequence_does_not_depend_on_its_batch() -> None:
    case = Case([(1, 600), (30, 100), (1, 20), (7, 300)], 4, layout(2, 64))
    whole = case.run().split([new for new, _ in case.lengths])
    for s, part in enumerate(whole):
        assert torch.equal(case.run([s]), part)
    assert torch.equal(case.run([2, 0]), torch.cat((whole[2], whole[0])))
