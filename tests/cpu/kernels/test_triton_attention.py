"""Paged attention against float64: ragged batches, every kind of head, windows, long contexts, and
new keys and values rotated and stored on the way."""

from typing import Any

import pytest
import torch
from attention_case import Case, layout, rotated_apart
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreted import DEVICE
from triton.runtime import interpreter

from c2cserve.kernels.gpu.attention.paged import PIECE_TOKENS, Arrivals


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


def test_norms_of_heads() -> None:
    lengths = [(1, 30), (9, 20), (1, 300), (1, 1)]
    Case(lengths, 6, layout(2, 64), norm=True).check()
    Case(lengths, 3, layout(1, 24), norm=True).check()


@settings(max_examples=6, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 24), st.integers(0, 90)), min_size=1, max_size=4),
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
    whole = case.run()[0].split([new for new, _ in case.lengths])
    for s, part in enumerate(whole):
        assert torch.equal(case.run([s])[0], part)
    assert torch.equal(case.run([2, 0])[0], torch.cat((whole[2], whole[0])))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "norm", "window", "dtype"),
    [
        (8, 2, 64, False, 0, torch.bfloat16), (4, 2, 128, True, 0, torch.float16),
        (20, 1, 80, True, 40, torch.bfloat16), (2, 2, 24, False, 300, torch.float16),
    ],
)  # fmt: skip
def test_a_lone_token_is_turned_as_those_that_come_in_numbers(
    heads: int, kv_heads: int, dim: int, norm: bool, window: int, dtype: torch.dtype
) -> None:
    """Attention that turns and stores, and `rope_store` before attention that turns by nothing:
    the same bits."""
    name = "float16" if dtype is torch.float16 else "bfloat16"
    lengths = [(1, length) for length in (1, 64, 65, 300, 530)]
    case = Case(lengths, heads, layout(kv_heads, dim, name), dtype, window, norm)
    out, arena = case.run()
    again, kept = rotated_apart(case).run()
    assert torch.equal(again, out)
    assert torch.equal(kept, arena)


def test_counters_stay_where_graphs_know_them() -> None:
    arrivals = Arrivals(DEVICE)
    first = arrivals.hold(64)
    assert arrivals.hold(first.numel()) is first
    more = arrivals.hold(first.numel() + 1)
    assert more.numel() > first.numel()
    assert not more.any()
    assert arrivals.hold(64) is more
    assert more.data_ptr() != first.data_ptr()


@pytest.mark.skipif(DEVICE.type != "cpu", reason="a GPU's programs end in the order they like")
@pytest.mark.parametrize("window", [0, 400])
def test_pieces_may_end_in_any_order(monkeypatch: pytest.MonkeyPatch, window: int) -> None:
    case = Case([(1, 700), (1, 20), (1, 300)], 20, layout(1, 64), window=window)
    out, arena = case.run()
    builder: Any = interpreter.interpreter_builder
    in_order = builder.set_grid_idx

    def backwards(*program: int) -> None:
        in_order(*(n - 1 - i for n, i in zip(builder.grid_dim, program, strict=True)))

    monkeypatch.setattr(builder, "set_grid_idx", backwards)
    again, kept = case.run()
    assert torch.equal(again, out)
    assert torch.equal(kept, arena)
