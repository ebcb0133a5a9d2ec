"""The attention benchmark without a GPU: floors, pages over an arena, what a peer is asked for, and
a whole run of naive attention against a FlashInfer of a few lines. (Interpreted, our kernels take
minutes for it.)"""

import json
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attention
import attention_peer
import attention_run
import pytest
import torch
from attention_cases import (
    CASES,
    Case,
    Pages,
    arena_bytes,
    block_offsets,
    error,
    floor,
    flops,
    kv_bytes,
    kv_pages,
    page_unit,
    pages_of,
    reference,
    table,
    token_rows,
    unit_heads,
    watched_tokens,
)
from attention_peer import FlashInfer
from fake_gpu import DEVICE, FakeMachine
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from c2cserve.kernels.layer import BLOCK_TOKENS, KvLayout, Layer, TokenRows

pytestmark = pytest.mark.skipif(DEVICE.type != "cpu", reason="kernels are interpreted here")

KV = KvLayout(layers=3, kv_heads=2, head_dim=16, dtype="bfloat16")
SPAN = 16384
"""Two blocks of 6,144 bytes, and a rest."""
MIXED = Case("mixed", (20, 5, 1, 1), (20, 40, 1, 33))
SINGLE = Case("decode", (1, 1, 1), (16, 31, 300))


def test_floors_are_what_is_read_and_computed() -> None:
    pairs = sum(seen for new, length in zip(MIXED.new, MIXED.context, strict=True)
                for seen in range(length - new + 1, length + 1))  # fmt: skip
    assert flops(MIXED, 4, 16) == 2 * 2 * 16 * 4 * pairs
    assert kv_bytes(MIXED, KV) == (20 + 40 + 1 + 33) * 2 * 2 * 16 * 2
    seconds, bound = floor(SINGLE, KV, 4, hbm_bytes_per_s=1e3, matmul_flops=1e9)
    assert (seconds, bound) == (kv_bytes(SINGLE, KV) / 1e3, "memory")
    seconds, bound = floor(MIXED, KV, 4, hbm_bytes_per_s=1e12, matmul_flops=1e3)
    assert (seconds, bound) == (flops(MIXED, 4, 16) / 1e3, "matrix")


def test_a_batch_ends_with_its_single_tokens() -> None:
    for case in CASES:
        first = len(case.new) - case.decodes
        assert all(count > 1 for count in case.new[:first])
        assert set(case.new[first:]) <= {1}
        assert all(new <= length for new, length in zip(case.new, case.context, strict=True))


def test_blocks_lie_in_spans_and_do_not_overlap() -> None:
    offsets = sorted(block_offsets(7, KV.block_bytes, SPAN))
    assert all(b - a >= KV.block_bytes for a, b in pairwise(offsets))
    assert all(at // SPAN == (at + KV.block_bytes - 1) // SPAN for at in offsets)
    assert offsets[-1] + KV.block_bytes <= arena_bytes(7, KV.block_bytes, SPAN)
    assert any(at % KV.block_bytes for at in offsets), "or a block's size would do for pages"
    with pytest.raises(ValueError, match="no room"):
        block_offsets(1, KV.block_bytes, 4096)


def test_a_page_is_the_block_at_its_bytes() -> None:
    unit = page_unit(KV.block_bytes, SPAN)
    assert unit < KV.block_bytes
    torch.manual_seed(0)
    size = arena_bytes(6, KV.block_bytes, SPAN)
    arena = torch.randn(size // 2).bfloat16().view(torch.uint8)
    keys, values = kv_pages(arena, KV, 1, unit)
    assert keys.stride() == values.stride()
    assert (len(keys) - 1) * unit + KV.block_bytes <= size < len(keys) * unit + KV.block_bytes
    for at in block_offsets(6, KV.block_bytes, SPAN):
        block = arena[at : at + KV.block_bytes].view(torch.bfloat16)
        plane = block.view(KV.layers, 2, KV.kv_heads, BLOCK_TOKENS, KV.head_dim)[1]
        assert torch.equal(keys[at // unit], plane[0])
        assert torch.equal(values[at // unit], plane[1])
    with pytest.raises(ValueError, match="do not meet"):
        kv_pages(arena, KV, 1, 4096)


def test_tables_become_page_numbers() -> None:
    unit = page_unit(KV.block_bytes, SPAN)
    rows = token_rows(MIXED, block_offsets(MIXED.blocks, KV.block_bytes, SPAN))
    pages = pages_of(rows, unit)
    assert pages.q_start.tolist() == [0, 20, 25, 26, 27]
    assert pages.starts.tolist() == [0, 2, 5, 6, 9]
    assert pages.last_tokens.tolist() == [4, 8, 1, 1]
    assert pages.numbers.dtype == torch.int32
    assert (pages.numbers.long() * unit)[2:5].tolist() == rows.block_table[1, :3].tolist()
    assert rows.positions.tolist() == [*range(20), *range(35, 40), 0, 32]
    assert int(rows.slots[-1]) == int(rows.block_table[3, 2]) * BLOCK_TOKENS
    with pytest.raises(ValueError, match="numbered"):
        pages_of(rows, KV.block_bytes)


def test_the_reference_is_attention() -> None:
    unit = page_unit(KV.block_bytes, SPAN)
    arena = unit_heads(arena_bytes(5, KV.block_bytes, SPAN) // 32, 16, DEVICE, 1).view(-1)
    keys, values = kv_pages(arena.view(torch.uint8), KV, 2, unit)
    numbers = torch.tensor([at // unit for at in block_offsets(5, KV.block_bytes, SPAN)])
    q = unit_heads(6, 16, DEVICE, 2)
    k, v = (part[numbers].transpose(0, 1).flatten(1, 2)[:, :70].float() for part in (keys, values))
    right = scaled_dot_product_attention(q.float()[:, None], k.repeat_interleave(3, 0),
                                         v.repeat_interleave(3, 0), scale=0.25)  # fmt: skip
    assert error(reference(q, keys, values, numbers, 70, 0.25), right[:, 0]) < 1e-5
    assert error(torch.tensor([float("nan")]), torch.ones(1)) == float("inf")


def test_heads_that_a_norm_leaves_as_they_are() -> None:
    heads = unit_heads(1000, 128, DEVICE, 3).float()
    normed = heads * (heads.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    assert torch.equal(normed.bfloat16(), heads.bfloat16())


def test_watched_tokens_see_what_comes_before_them() -> None:
    assert watched_tokens(MIXED) == [
        (0, 0, 1), (10, 0, 11), (19, 0, 20), (24, 1, 40), (25, 2, 1), (26, 3, 33),
    ]  # fmt: skip


# ---- a whole run ---------------------------------------------------------------------------------


class _Wrapper:
    """FlashInfer's two, as far as they are called: naive attention by what was planned."""

    wrong = False

    def __init__(self, room: Tensor, layout: str, *, backend: str, **buffers: Any) -> None:
        assert layout == "HND"
        assert not room.any()
        self._backend = backend

    def run(self, q: Tensor, cache: tuple[Tensor, Tensor], out: Tensor) -> None:
        if self._backend == "fa3" and isinstance(self, _Decode):
            raise ValueError("no such kernel here")
        counts = self._pages.starts.diff() - 1
        lengths = (counts * BLOCK_TOKENS + self._pages.last_tokens).tolist()
        _naive(q, self._pages, lengths, *cache, out)
        out += self.wrong


class _Prefill(_Wrapper):
    def plan(self, *tables: Any, causal: bool, **_: Any) -> None:
        assert causal
        self._pages = Pages(*tables[:4])


class _Decode(_Wrapper):
    def plan(self, *tables: Any, **_: Any) -> None:
        self._pages = Pages(torch.arange(len(tables[2]) + 1), *tables[:3])


def _attend(
    qkv: Tensor, layer: Layer, rows: TokenRows, rope: object, arena: Tensor, arrivals: object
) -> Tensor:
    """Naive, of what is neither normed nor rotated."""
    kv, unit = layer.shape.kv, page_unit(layer.shape.kv.block_bytes, attention_run.SPAN_BYTES)
    numbers, keys, values = pages_of(rows, unit), *kv_pages(arena, kv, layer.index, unit)
    parts = qkv.view(len(qkv), -1, kv.head_dim)
    heads = layer.shape.heads
    for token, slot in enumerate(rows.slots.tolist()):
        page, place = slot // BLOCK_TOKENS // unit, slot % BLOCK_TOKENS
        keys[page, :, place] = parts[token, heads : heads + kv.kv_heads]
        values[page, :, place] = parts[token, heads + kv.kv_heads :]
    out = torch.empty_like(parts[:, :heads])
    _naive(parts[:, :heads], numbers, rows.context_len.tolist(), keys, values, out)
    return out.view(len(qkv), -1)


def _attend_many(
    qkv: Tensor, layer: Layer, rows: TokenRows, arena: Tensor, out: Tensor, heads: int
) -> None:
    assert heads == layer.shape.heads
    out.copy_(_attend(qkv, layer, rows, None, arena, None))


def _naive(
    q: Tensor, pages: Pages, lengths: list[int], keys: Tensor, values: Tensor, out: Tensor
) -> None:
    for s, length in enumerate(lengths):
        first, past = pages.q_start[s : s + 2].tolist()
        mine = pages.numbers[slice(*pages.starts[s : s + 2].tolist())]
        for row in range(first, past):
            out[row] = reference(q[row], keys, values, mine, length - (past - 1 - row), 0.25)


@pytest.fixture
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "CASES", (SINGLE, MIXED, Case("prefill", (18,), (40,))))
    monkeypatch.setattr(attention, "_LIMITS_BYTES", 1 << 16)
    monkeypatch.setattr(attention, "SPAN_BYTES", 20480)
    monkeypatch.setattr(attention_run, "SPAN_BYTES", 20480)
    monkeypatch.setattr(attention_run, "_PIECE_HEADS", 999)
    monkeypatch.setattr(attention_run, "plan_copies", lambda *_: {"count": 5, "bytes": 99})
    monkeypatch.setattr(attention_peer, "_ROOM_BYTES", 16)
    monkeypatch.setattr(attention_peer, "_PLANS", 2)
    kernels = SimpleNamespace(attend=_attend, _attend_many=_attend_many, Arrivals=lambda _: None)
    monkeypatch.setattr(attention_run, "attention", kernels)
    torch.set_num_threads(1)


def _timed(steps: Any) -> list[float]:
    steps[0]()
    return [1e-4, 3e-4, 2e-4]


def _run(tmp_path: Path) -> tuple[list[str], dict[str, Any]]:
    out = tmp_path / "attention.json"
    given = attention._arguments(["--shapes", "tiny-llama", "--out", str(out)])
    wrong = attention.measure(FakeMachine(), _timed, given, time.monotonic())
    return wrong, json.loads(out.read_text())["results"]


@pytest.mark.usefixtures("_tiny")
def test_a_run_against_a_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = SimpleNamespace(
        __version__="0", BatchPrefillWithPagedKVCacheWrapper=_Prefill,
        BatchDecodeWithPagedKVCacheWrapper=_Decode,
    )  # fmt: skip
    monkeypatch.setattr(attention_peer.importlib, "import_module", lambda _: library)
    wrong, results = _run(tmp_path)
    assert wrong == ["tiny-llama decode (fa3)"]
    assert results["flashinfer"] == {"version": "0"}
    single, mixed, prefill = results["shapes"]["tiny-llama"]["cases"]
    assert single["peers"]["fa3"] == {"refused": "ValueError: no such kernel here"}
    assert set(single["peers"]) == {"fa2", "fa3", "cuda cores"}
    assert set(prefill["peers"]) == {"fa2", "fa3"}
    assert set(mixed["peers"]) == {
        "fa2", "fa3", "fa2, fa2 for single tokens", "fa3, fa2 for single tokens",
    }  # fmt: skip
    for row in (single, mixed, prefill):
        assert row["agrees"]
        assert row["ours"]["seconds"] == 2e-4
        for one in row["peers"].values():
            assert "refused" in one or (
                one["from_ours"] < 0.02 and one["plan_copies"]["count"] == 5
            )
    assert "attention_s" in prefill["ours"]
    assert "attention_s" not in mixed["ours"]
    text = table([single, mixed, prefill])
    assert len({line.count("|") for line in text.splitlines()}) == 1
    monkeypatch.setattr(_Wrapper, "wrong", True)
    assert "tiny-llama prefill" in _run(tmp_path)[0]


@pytest.mark.usefixtures("_tiny")
def test_without_a_peer_ours_runs_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(attention_peer.importlib, "import_module", missing)
    wrong, results = _run(tmp_path)
    assert wrong == []
    assert "No module named 'flashinfer'" in results["flashinfer"]["missing"]
    rows = results["shapes"]["tiny-llama"]["cases"]
    assert [row["peers"] for row in rows] == [{}] * 3
    assert table(rows).count("| - |") >= 3
    with pytest.raises(ImportError):
        FlashInfer(DEVICE)


def test_unknown_shapes_and_cases_are_refused() -> None:
    for wrong in (["--shapes", "llama"], ["--cases", "prefil 512"]):
        with pytest.raises(SystemExit):
            attention._arguments(wrong)
    given = attention._arguments(["--cases", "decode 32"])
    assert [case.context[0] for case in given.chosen] == [512, 2048, 8192]
    assert attention.arena_size(given) < 47 << 30
