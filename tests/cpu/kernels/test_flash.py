"""Prompts' way to FlashInfer: which steps take it, what is planned, and that steps in flight keep
their plans. A stand-in computes, late, by the definition."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_case import ARRIVALS, Case, layer_of, layout
from flash_stand_in import LateGpu
from interpreted import DEVICE

from c2cserve.kernels.gpu.aot.flash_modules import FlashKind
from c2cserve.kernels.gpu.attention import flash as flash_module
from c2cserve.kernels.gpu.attention.flash import Flash
from c2cserve.kernels.gpu.attention.flash_pages import paged, pages_of
from c2cserve.kernels.gpu.attention.paged import attend
from c2cserve.kernels.layer import BLOCK_TOKENS, TokenRows

pytestmark = pytest.mark.skipif(
    DEVICE.type == "cuda", reason="the stand-in computes on the host; tests/gpu has the real one"
)

F16 = FlashKind("float16", 64)
LONG = [(1, 30), (1, 5), (70, 100), (40, 40)]


class AtOnce(Flash):
    """For `Case`, which looks at results as soon as all is launched."""

    gpu: LateGpu

    def __call__(self, *given: Any) -> bool:
        taken = super().__call__(*given)
        self.gpu.catch_up()
        return taken


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> LateGpu:
    late = LateGpu()
    monkeypatch.setattr(torch.cuda, "Event", late.event)

    def pinned(count: int) -> torch.Tensor:
        return torch.full((count,), -7, dtype=torch.int32)

    monkeypatch.setattr(flash_module, "_pinned", pinned)
    return late


def made(gpu: LateGpu, *kinds: FlashKind, kind: type[Flash] = Flash) -> Any:
    flash = kind(DEVICE, gpu.wrapper)
    for one in kinds:
        flash.ready(one, 4, 2)
    gpu.catch_up()
    gpu.plans.clear()
    return flash


def at_once(gpu: LateGpu, *kinds: FlashKind) -> Flash:
    flash = made(gpu, *kinds, kind=AtOnce)
    flash.gpu = gpu
    return flash


# ---- what it computes ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "lengths",
    [
        [(300, 300)], [(70, 300)], LONG,
        [(1, 7), (66, 90), (1, 50), (3, 3), (1, 600)],
    ],
    ids=["a prompt", "a chunk", "decodes first", "a single token between"],
)  # fmt: skip
def test_results_of_mixed_steps(gpu: LateGpu, lengths: list[tuple[int, int]]) -> None:
    Case(lengths, 4, layout(2, 64), flash=at_once(gpu, F16)).check()
    assert len(gpu.plans) == 1


@pytest.mark.parametrize(
    "window",
    [1, pytest.param(16, marks=pytest.mark.slow), 40, pytest.param(400, marks=pytest.mark.slow)],
)
def test_windows(gpu: LateGpu, window: int) -> None:
    kind = replace(F16, windowed=True)
    case = Case(LONG, 2, layout(1, 64), window=window, flash=at_once(gpu, kind))
    case.check()
    assert gpu.plans[0]["window_left"] == window - 1


def test_single_tokens_keep_their_bits(gpu: LateGpu) -> None:
    """Theirs is our kernel, whatever else is in the step."""
    case = Case(LONG, 4, layout(2, 64))
    mixed = Case(LONG, 4, layout(2, 64), flash=at_once(gpu, F16))
    assert torch.equal(mixed.run()[0][:2], case.run([0, 1])[0])


# ---- which steps it takes ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lengths", "kinds", "taken", "counted"),
    [
        ([(65, 65)], [F16], True, (1, 0)),
        ([(64, 64)], [F16], False, (0, 0)),
        ([(1, 9), (63, 63)], [F16], False, (0, 0)),
        ([(65, 65)], [], False, (0, 1)),
        ([(65, 65)], [FlashKind("bfloat16", 64), FlashKind("float16", 128)], False, (0, 1)),
        ([(65, 65)], [FlashKind("float16", 64, windowed=True)], False, (0, 1)),
    ],
)
def test_which_steps(
    gpu: LateGpu, lengths: list[tuple[int, int]], kinds: list[FlashKind], taken: bool,
    counted: tuple[int, int],
) -> None:  # fmt: skip
    flash = made(gpu, *kinds)
    case = Case(lengths, 4, layout(2, 64))
    first = replace(case.layer, index=0)
    out = torch.empty(len(case.qkv), 4 * 64, dtype=torch.float16)
    rows = replace(case.rows, host=case.rows)
    for layer in (first, case.layer, case.layer):
        assert flash(case.qkv, layer, rows, case.arena, out) == taken
    assert (flash.steps, flash.missed) == counted, "a step counts once, not by its layers"
    assert not flash(case.qkv, first, case.rows, case.arena, out), "of a graph"
    assert (flash.steps, flash.missed) == counted


def test_without_flashinfer(gpu: LateGpu) -> None:
    flash = Flash(DEVICE, None)
    case = Case([(70, 70)], 4, layout(2, 64), flash=flash)
    case.layer = replace(case.layer, index=0)
    attend(
        case.qkv.clone(), case.layer, replace(case.rows, host=case.rows), case.rope,
        case.arena, ARRIVALS, flash,
    )  # fmt: skip
    assert (flash.steps, flash.missed) == (0, 1)


# ---- plans ---------------------------------------------------------------------------------------


def test_a_step_is_planned_once_for_all_layers(gpu: LateGpu) -> None:
    flash, case = made(gpu, F16), Case([(70, 100)], 4, layout(2, 64))
    rows = replace(case.rows, host=case.rows)
    out = torch.empty(70, 4 * 64, dtype=torch.float16)
    for index in (0, 1, 0, 1):
        assert flash(case.qkv, replace(case.layer, index=index), rows, case.arena, out)
    assert [(p["heads"], p["kv_heads"], p["head_dim"]) for p in gpu.plans] == [(4, 2, 64)]
    assert gpu.plans[0]["sm_scale"] == case.layer.shape.scale


def test_layers_with_and_without_a_window_have_a_plan_each(gpu: LateGpu) -> None:
    kinds = F16, replace(F16, windowed=True)
    flash, case = made(gpu, *kinds), Case([(70, 100)], 4, layout(2, 64))
    rows = replace(case.rows, host=case.rows)
    out = torch.empty(70, 4 * 64, dtype=torch.float16)
    for window in (0, 30, 0, 30, 50, 30, 0, 50):
        layer = layer_of(case.kv, 4, window)
        assert flash(case.qkv, layer, rows, case.arena, out)
    assert [plan["window_left"] for plan in gpu.plans] == [-1, 29, 49]


def _launch(flash: Flash, case: Case) -> torch.Tensor:
    out = torch.full((len(case.qkv), 4 * 64), torch.nan, dtype=torch.float16)
    assert flash(case.qkv, case.layer, replace(case.rows, host=case.rows), case.arena, out)
    return out


def _alone(gpu: LateGpu, case: Case) -> torch.Tensor:
    out = _launch(made(gpu, F16), case)
    gpu.catch_up()
    return out


def _steps(count: int) -> list[Case]:
    """Their prompts' keys and values are all stored."""
    sizes = [(66 + 20 * i, 150 + 30 * i) for i in range(count)]
    cases = [Case([size, (2, 40)], 4, layout(2, 64), seed=i) for i, size in enumerate(sizes)]
    for case in cases:
        random = torch.Generator().manual_seed(case.seed)
        filled = torch.randn(case.arena.numel() // 2, generator=random).half()
        case.arena = filled.view(torch.uint8)
    return cases


def test_steps_in_flight_keep_their_plans(gpu: LateGpu) -> None:
    """Two steps are launched before the first begins, and more after them: pinned memory is not
    written again before it was copied, and nothing is waited for that need not be."""
    cases = _steps(5)
    want = [_alone(gpu, case) for case in cases]
    flash = made(gpu, F16)
    before = gpu.done
    got = [_launch(flash, case) for case in cases[:2]]
    # The second's wrapper was new or idle: at most what made the module ready was waited for.
    assert gpu.done == before, "the first two steps wait for nothing"
    got += [_launch(flash, case) for case in cases[2:]]
    gpu.catch_up()
    for mine, right in zip(got, want, strict=True):
        assert torch.equal(mine, right)


def test_a_parked_step_plans_again(gpu: LateGpu) -> None:
    """It ran its first layer, two others were planned meanwhile, and it goes on."""
    cases = _steps(3)
    want = [_alone(gpu, case) for case in cases]
    flash = made(gpu, F16)
    parked = replace(cases[0].rows, host=cases[0].rows)
    outs = [torch.empty_like(want[0]) for _ in range(2)]
    assert flash(cases[0].qkv, cases[0].layer, parked, cases[0].arena, outs[0])
    others = [_launch(flash, case) for case in cases[1:]]
    assert flash(cases[0].qkv, cases[0].layer, parked, cases[0].arena, outs[1])
    gpu.catch_up()
    for mine, right in zip([*outs, *others], [want[0], *want], strict=True):
        assert torch.equal(mine, right)
    assert len(gpu.plans) == 4


# ---- pages ---------------------------------------------------------------------------------------


def _rows(new: list[int], context: list[int], offsets: list[list[int]]) -> TokenRows:
    width = max(map(len, offsets))
    nothing = torch.zeros(0)
    return TokenRows(
        nothing, torch.tensor([0, *new]).cumsum(0).int(), torch.tensor(context).int(),
        torch.tensor([[*row, *[-(2**40)] * (width - len(row))] for row in offsets]), nothing,
    )  # fmt: skip


def test_pages_are_those_of_prompts() -> None:
    block, slab = 3 << 16, 1 << 20
    offsets = [[0], [slab, slab + block, slab + 3 * block], [5 * slab + 2 * block, 7 * slab]]
    pages = pages_of(_rows([1, 40, 9], [9, 40, 20], offsets), block)
    assert (pages.begin, pages.end, pages.unit) == (1, 50, 1 << 16)
    assert pages.q_starts.tolist() == [0, 40, 49]
    assert pages.page_starts.tolist() == [0, 3, 5]
    flat = [at for row in offsets[1:] for at in row]
    assert [int(number) * pages.unit for number in pages.numbers] == flat
    assert pages.lengths.tolist() == [40, 20]
    assert pages.last_tokens.tolist() == [8, 4]


def test_a_full_page_and_the_arenas_first_block() -> None:
    pages = pages_of(_rows([2, 1], [16, 3], [[0], [640]]), 640)
    assert (pages.begin, pages.end, pages.unit) == (0, 2, 640)
    assert (pages.numbers.tolist(), pages.last_tokens.tolist()) == ([0], [16])


@pytest.mark.parametrize("offsets", [[[8, 32]], [[0, (1 << 37) + 16]]], ids=["odd", "far"])
def test_what_can_not_be_numbered(offsets: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="cannot be numbered"):
        pages_of(_rows([2], [32], offsets), 1 << 16)


def test_an_arena_that_two_models_share() -> None:
    """Blocks of one size between those of another: pages overlap, and are the right bytes."""
    small, large = layout(1, 64), layout(3, 64)
    numbers = torch.arange(40 * small.block_bytes // 2).short()
    unit = small.block_bytes  # three of which are one of the larger
    assert large.block_bytes == 3 * unit
    for kv, places in ((small, [3, 0, 11]), (large, [4, 17, 37])):
        for layer in range(2):
            keys, values = paged(numbers, kv, layer, unit)
            plane = kv.kv_heads * BLOCK_TOKENS * 64
            for page in places:
                first = page * unit // 2 + layer * 2 * plane
                assert torch.equal(keys[page].flatten(), numbers[first : first + plane])
                assert torch.equal(values[page].flatten(), numbers[first + plane :][:plane])
            assert len(keys) == 40 - kv.block_bytes // unit + 1, "none ends behind the arena"
