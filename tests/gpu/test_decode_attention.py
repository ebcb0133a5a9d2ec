"""Attention on a GPU. Of single new tokens, where the programs that share a sequence really race:
rotated and stored as by `rope_store`, pieces put together once, in order, launch after launch.
Of prompts, the same bits however they are cut.

The harness is that of tests/cpu/kernels, which run on a GPU too where there is one.
"""

import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "cpu" / "kernels"))
from attention_case import ARRIVALS, DEVICE, Case, layout, on_device, rotated_apart

from c2cserve.kernels.gpu.attention.paged import attend

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
KINDS = [
    # heads, kv_heads, head_dim, norms, window
    (32, 8, 128, False, 0), (16, 8, 128, True, 0), (14, 2, 64, False, 0), (32, 32, 64, False, 0),
    (8, 4, 256, False, 0), (4, 4, 256, True, 100), (20, 1, 80, True, 300), (71, 1, 64, False, 0),
    (6, 2, 96, False, 1000), (16, 2, 128, False, 40),
]  # fmt: skip
LONG = [1, 16, 63, 64, 65, 255, 256, 257, 512, 1000, 1025, 2500]


def lengths(batch: int) -> list[tuple[int, int]]:
    chosen = random.Random(batch)
    return [(1, chosen.choice(LONG) + chosen.randrange(3)) for _ in range(batch)]


@pytest.mark.parametrize("batch", [1, 2, 7, 16, 33, 64])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "norm", "window"), KINDS)
def test_the_bits_of_turning_apart(
    heads: int, kv_heads: int, dim: int, norm: bool, window: int, batch: int
) -> None:
    case = Case(lengths(batch), heads, layout(kv_heads, dim, "bfloat16"), BF16, window, norm)
    out, arena = case.run()
    assert not out.isnan().any()
    again, kept = rotated_apart(case).run()
    assert torch.equal(again, out)
    assert torch.equal(kept, arena)


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "norm", "window"), KINDS)
def test_near_to_float64(heads: int, kv_heads: int, dim: int, norm: bool, window: int) -> None:
    some = [(1, 300), (40, 700), (1, 1), (1, 2100), (3, 3)]
    Case(some, heads, layout(kv_heads, dim, "bfloat16"), BF16, window, norm).check()


@pytest.mark.parametrize("batch", [1, 8, 64])
def test_replayed_launches_give_the_same_bits_and_leave_no_counts(batch: int) -> None:
    """Many launches in a row, each after the other's last arriver; whoever arrives last, pieces are
    put together in their order."""
    kind = layout(8, 128, "bfloat16")
    case = Case([(1, 2000 + 7 * i) for i in range(batch)], 32, kind, BF16)
    want, _ = case.run()
    rows, qkv = case.on_device(list(range(batch))), case.qkv.to(DEVICE)
    arena, layer, rope = case.arena.to(DEVICE), on_device(case.layer), case.rope_there
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph, outs = torch.cuda.CUDAGraph(), []
    with torch.cuda.stream(stream), torch.cuda.graph(graph, stream=stream):
        for _ in range(20):
            outs.append(attend(qkv, layer, rows, rope, arena, ARRIVALS))
    for _ in range(20):
        for out in outs:
            out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert not ARRIVALS.hold(1).any()
        for out in outs:
            assert torch.equal(out.cpu(), want)


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "norm", "window"), KINDS)
def test_a_prompt_is_the_same_in_any_chunks(
    heads: int, kv_heads: int, dim: int, norm: bool, window: int
) -> None:
    new, cached = 300, 70
    case = Case([(new, cached + new)], heads, layout(kv_heads, dim, "bfloat16"), BF16, window, norm)
    want, arena = case.run()
    whole = case.on_device([0])
    for chunk in (7, 24, 31, 64, 150):
        kept, outs = case.arena.to(DEVICE, copy=True), []
        for start in range(0, new, chunk):
            stop = min(new, start + chunk)
            rows = replace(
                whole,
                positions=whole.positions[start:stop],
                slots=whole.slots[start:stop],
                q_start=torch.tensor([0, stop - start], dtype=torch.int32, device=DEVICE),
                context_len=torch.tensor([cached + stop], dtype=torch.int32, device=DEVICE),
            )
            qkv = case.qkv[start:stop].to(DEVICE)
            layer = on_device(case.layer)
            outs.append(attend(qkv, layer, rows, case.rope_there, kept, ARRIVALS).cpu())
        assert torch.equal(torch.cat(outs), want), chunk
        assert torch.equal(kept.cpu(), arena), chunk
