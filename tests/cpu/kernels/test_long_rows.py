"""GEMMs of prompts are run once before prompts need them: all of them, and never at steps' cost."""

import pytest
import torch
from torch import Tensor

from c2cserve.kernels.gpu.gemm import long_rows
from c2cserve.kernels.gpu.gemm.choice.choose import ROWS_STREAMED
from c2cserve.kernels.gpu.gemm.long_rows import FirstUses, MatrixShape, padded_rows, usual_rows

SMALL, BIASED = MatrixShape(24, 16, "bfloat16"), MatrixShape(16, 8, "float16", biased=True)
Run = tuple[int, int, int, torch.dtype, bool]


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[Run]:
    ran: list[Run] = []

    def multiplied(x: Tensor, transposed: Tensor, bias: Tensor | None) -> Tensor:
        assert bias is None or (bias.shape[0], bias.dtype) == (transposed.shape[1], x.dtype)
        assert transposed.t().is_contiguous(), "as weights are"
        ran.append((x.shape[0], transposed.shape[1], x.shape[1], x.dtype, bias is not None))
        return x

    monkeypatch.setattr(long_rows, "multiplied", multiplied)
    return ran


def first_uses(clock: Clock) -> FirstUses:
    return FirstUses(torch.zeros(1 << 12, dtype=torch.uint8), clock)


def test_every_usual_number_of_rows_of_every_shape_runs_once(runs: list[Run]) -> None:
    uses = first_uses(Clock())
    assert not uses
    uses.add([SMALL, SMALL])
    uses.add([SMALL, BIASED])
    while uses.go_on(idle=True):
        assert uses
    uses.add([BIASED])
    assert not uses
    assert not uses.go_on(idle=True)
    assert len(runs) == len(set(runs)) == uses.done == 2 * len(usual_rows())
    wanted = {padded_rows(count) for count in range(ROWS_STREAMED + 1, 2049)}
    assert {rows for rows, *_ in runs} == wanted
    assert {run[1:] for run in runs} == {
        (24, 16, torch.bfloat16, False), (16, 8, torch.float16, True)
    }  # fmt: skip
    of_one = [rows for rows, n, *_ in runs if n == 24]
    assert of_one == sorted(of_one, reverse=True), "what is allocated first serves all others"


def test_beside_requests_there_is_time_between_two(runs: list[Run]) -> None:
    clock = Clock()
    uses = first_uses(clock)
    uses.add([SMALL])
    for _ in range(20):
        assert not uses.go_on(idle=False), "nobody is to hurry"
        clock.now += 0.03
    assert len(runs) == 10
    while uses.go_on(idle=True):
        pass
    assert not uses


def test_a_matrix_that_no_memory_could_hold_is_left_out(runs: list[Run]) -> None:
    uses = first_uses(Clock())
    uses.add([MatrixShape(1 << 10, 16, "bfloat16")])
    assert not uses


def test_without_memory_prompts_find_out_themselves(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> Tensor:
        raise torch.OutOfMemoryError("2 GiB more, please")

    monkeypatch.setattr(long_rows, "multiplied", full)
    uses = first_uses(Clock())
    uses.add([SMALL])
    assert not uses.go_on(idle=True)
    assert not uses
    assert "2 GiB more" in caplog.text
