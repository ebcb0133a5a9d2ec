"""Prompts through FlashInfer's kernel: results next to float64 and to ours, beside single tokens,
in an arena that models share, with steps in flight, and whole models' logits.

Needs a module for bfloat16 and heads of 128 (`c2cserve kernels build`); FlashInfer itself may be
missing, as it may be where we serve.
"""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_case import VOCAB, make, no_sampler, ours_at, shared_folder
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent / "cpu" / "kernels"))
from attention_case import ARRIVALS, DEVICE, Case, layout, on_device

from c2cserve.engine.gpu.segments import PinnedSegments
from c2cserve.engine.gpu.setup import open_gpu
from c2cserve.kernels.gpu.aot.flash_modules import FlashKind, installed
from c2cserve.kernels.gpu.attention.flash import Flash
from c2cserve.kernels.gpu.attention.flash_library import FlashInfer
from c2cserve.kernels.gpu.attention.paged import attend
from c2cserve.kernels.layer import TokenRows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(installed() is None, reason="FlashInfer is not installed"),
]

BF16 = torch.bfloat16
KIND = FlashKind("bfloat16", 128)
SIZES = {
    "a prompt": [(300, 300)],
    "a long prompt": [(2048, 2048)],
    "a chunk far in": [(700, 5000)],
    "several": [(300, 300), (65, 1000), (2, 33), (700, 701)],
    "beside single tokens": [(1, 900), (1, 16), (300, 300), (129, 1025)],
    "a single token between": [(1, 70), (90, 200), (1, 333), (40, 40)],
}


@pytest.fixture(scope="module")
def flash() -> Flash:
    found = FlashInfer(DEVICE)
    assert KIND in found.flash.kinds, "not built: `c2cserve kernels build`"
    return found.flash


def case_of(
    sizes: list[tuple[int, int]], heads: int = 8, kv_heads: int = 2, *, norm: bool = False,
    seed: int = 0, flash: Flash | None = None,
) -> Case:  # fmt: skip
    kind = layout(kv_heads, 128, "bfloat16")
    return Case(sizes, heads, kind, BF16, norm=norm, seed=seed, flash=flash)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_near_to_float64(flash: Flash, sizes: list[tuple[int, int]]) -> None:
    """And what lies between blocks, or behind the last token, is NaN."""
    case_of(sizes, flash=flash).check(roundings=6.0)  # the worst of two million numbers


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (14, 2), (5, 1), (40, 8)])
def test_groups_of_heads(flash: Flash, heads: int, kv_heads: int) -> None:
    sizes = [(1, 40), (150, 400)]
    case_of(sizes, heads, kv_heads, norm=True, flash=flash).check()


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_near_to_ours(flash: Flash, sizes: list[tuple[int, int]]) -> None:
    """Keys and values are stored alike, single tokens are ours to the bit, prompts within some
    roundings, and the same each time."""
    theirs, arena = case_of(sizes, flash=flash).run()
    again, _ = case_of(sizes, flash=flash).run()
    ours, kept = case_of(sizes).run()
    assert torch.equal(again, theirs)
    assert torch.equal(arena, kept)
    rows = [new for new, _ in sizes]
    for new, mine, other in zip(rows, theirs.split(rows), ours.split(rows), strict=True):
        if new == 1:
            assert torch.equal(mine, other)
    off = (theirs.double() - ours.double()).square().mean().sqrt()
    assert off < 2**-8 * ours.double().square().mean().sqrt()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("dim", [64, 128])
def test_what_is_built_ahead(flash: Flash, dtype: str, dim: int) -> None:
    kind = layout(2, dim, dtype)
    if FlashKind(kind.dtype, dim) not in flash.kinds:
        pytest.skip(f"no module for {dtype}, {dim} here: `c2cserve kernels build`")
    sizes = [(1, 20), (200, 300), (65, 65)]
    Case(sizes, 8, kind, getattr(torch, dtype), flash=flash).check()


# ---- a shared arena, steps in flight -------------------------------------------------------------


def _moved(case: Case, by: int) -> tuple[Tensor, TokenRows]:
    """Its rows on the GPU, with blocks `by` bytes later."""
    host = replace(
        case.rows, block_table=case.rows.block_table + by, slots=case.rows.slots + by * 16
    )
    there = {
        name: getattr(host, name).to(DEVICE)
        for name in ("positions", "q_start", "context_len", "block_table", "slots")
    }
    return case.qkv.to(DEVICE), TokenRows(**there, host=host)


def _attend(case: Case, flash: Flash, arena: Tensor, by: int) -> Tensor:
    qkv, rows = _moved(case, by)
    return attend(qkv, on_device(case.layer), rows, case.rope_there, arena, ARRIVALS, flash)


def test_two_models_share_an_arena(flash: Flash) -> None:
    """Blocks of 48 and of 32 KiB, the latter at odd multiples of 16: pages overlap."""
    small, large = case_of([(300, 350)], 8, 2), case_of([(1, 90), (150, 500)], 6, 3)
    assert (small.kv.block_bytes, large.kv.block_bytes) == (32 << 10, 48 << 10)
    by = large.arena.numel() + (16 << 10)
    gap = torch.full((16 << 10,), 255, dtype=torch.uint8)
    arena = torch.cat((large.arena, gap, small.arena)).to(DEVICE)
    got = [_attend(large, flash, arena, 0), _attend(small, flash, arena, by)]
    for case, mine in zip((large, small), got, strict=True):
        alone = case_of(case.lengths, case.heads, case.kv.kv_heads, flash=flash)
        assert torch.equal(mine.cpu(), alone.run()[0])


def test_steps_in_flight(flash: Flash) -> None:
    """The GPU is far behind while steps are planned one after another: each has its own plan."""
    cases = [case_of([(1, 30 + i), (70 + 90 * i, 200 + 150 * i)], seed=i) for i in range(6)]
    for case in cases:
        case.flash = flash
    want = [case.run()[0] for case in cases]
    arenas = [case.arena.to(DEVICE) for case in cases]
    moved = [_moved(case, 0) for case in cases]
    torch.cuda.synchronize()
    outs: list[Tensor] = []
    torch.cuda._sleep(200_000_000)  # a tenth of a second
    for case, arena, (qkv, rows) in zip(cases, arenas, moved, strict=True):
        layer, rope = on_device(case.layer), case.rope_there
        outs.append(attend(qkv, layer, rows, rope, arena, ARRIVALS, flash))
        torch.cuda._sleep(20_000_000)
    for mine, right in zip(outs, want, strict=True):
        assert torch.equal(mine.cpu(), right)


def test_planning_waits_for_nothing(flash: Flash) -> None:
    """With two wrappers at rest, two steps are launched while the GPU is busy."""
    cases = [case_of([(100, 300 + i)], seed=i) for i in range(2)]
    arenas = [case.arena.to(DEVICE) for case in cases]
    moved = [_moved(case, 0) for case in cases]
    ropes = [case.rope_there for case in cases]
    for case in cases:  # everything has run, everything is allocated
        case.flash = flash
        case.run()
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)
    busy = torch.cuda.Event()
    busy.record()
    for case, arena, (qkv, rows), rope in zip(cases, arenas, moved, ropes, strict=True):
        attend(qkv, case.layer, rows, rope, arena, ARRIVALS, flash)
    assert not busy.query(), "the host waited for the GPU"
    torch.cuda.synchronize()


# ---- whole models --------------------------------------------------------------------------------


@pytest.fixture
def folder() -> Iterator[Path]:
    with shared_folder() as path:
        yield path


def test_logits_are_those_of_our_kernel(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt in two chunks of more than 64 tokens and one of fewer, beside another sequence."""
    prompt = torch.randint(3, VOCAB, (300,), generator=torch.Generator().manual_seed(5)).tolist()
    make(folder, "llama")
    before = torch.cuda.current_stream()
    with torch.no_grad():
        gpu = open_gpu(0, 256 << 20, no_sampler, profile="assumed")
        segments = PinnedSegments()
        answers: list[Tensor] = []
        flash = gpu.flashinfer.flash
        ours = ours_at(folder, "hbm", gpu, segments)
        gpu.warm(ours.config)
        for seq, other, taken in ((0, 1, flash), (2, 3, None)):
            monkeypatch.setattr(gpu.ops, "_flash", taken)
            steps = flash.steps
            parts = [ours.step([(other, prompt[:9], 0), (seq, prompt[:150], 0)])[1]]
            parts.append(ours.step([(other, [prompt[9]], 9), (seq, prompt[150:250], 150)])[1])
            parts.append(ours.step([(seq, prompt[250:], 250)])[0])
            assert flash.steps - steps == (2 if taken is not None else 0)
            answers.append(torch.cat(parts).float().cpu())
        gpu.finish()
    torch.cuda.set_stream(before)
    theirs, mine = answers
    off = (theirs - mine).double().square().mean().sqrt()
    assert 0 < off < 0.05 * mine.double().std(), f"{off:.2g} of {mine.std():.2g}"
    assert (theirs.argmax(-1) == mine.argmax(-1)).float().mean() > 0.9
