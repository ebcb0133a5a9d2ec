"""Launches over operands that came before: their own addresses, and no checks but of these.

Tensors are on the CPU, maps are texts, and a launch is recorded.
"""

from typing import Any

import pytest
import torch
from gemm_operands import Context, described
from torch import Tensor

from c2cserve.kernels.gpu.gemm.launchers import direct as launchers
from c2cserve.kernels.gpu.gemm.parameters import SPLIT, output
from c2cserve.kernels.gpu.gemm.traffic import Tiles
from c2cserve.kernels.gpu.gemm.weight import OperandError, WeightHandle

N, K = 256, 64
TILES = Tiles(bx=16)
W = WeightHandle(1 << 20, (N, K), "bfloat16", "host")


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """What was checked, as these tensors are on no GPU."""
    found: list[Tensor] = []

    def check(x: Tensor, *_: object, **__: object) -> None:
        found.append(x)

    monkeypatch.setattr(launchers, "check", check)
    for name in ("tensor_map", "stack_map", "pair_map"):
        monkeypatch.setattr(launchers, name, described)
    return found


def rows(count: int, columns: int = K) -> Tensor:
    return torch.zeros(count, columns, dtype=torch.bfloat16)


def launch(context: Any, x: Tensor, out: Tensor, bias: Tensor | None = None, **how: Any) -> None:
    launchers.split(context, x, how.pop("w", W), bias, out, TILES, **how)


def test_equal_operands_are_checked_once_and_have_their_own_addresses(
    checked: list[Tensor],
) -> None:
    context, bias = Context(), torch.zeros(N, dtype=torch.bfloat16)
    later = WeightHandle(1 << 21, (N, K), "bfloat16", "host")
    given = [(rows(4), W, rows(4, N)), (rows(4), later, rows(4, N))]
    for x, w, out in given:
        launch(context, x, out, bias, w=w)
    assert len(checked) == 1
    for (x, w, out), (kernel, ctas, found, pdl, home) in zip(given, context.launched, strict=True):
        assert (kernel, ctas, pdl, home) == ("split-bfloat16-x16", 2, True, "host")
        assert found == bytes(
            SPLIT.pack(
                described(x.data_ptr(), 4, K, K, 16, "bfloat16"),
                described(w.pointer, 1, N, K, 128, "bfloat16"),
                *output(out, bias), 0, 512, 4, N, K,
            )
        )  # fmt: skip


@pytest.mark.parametrize(
    "other",
    [
        {"x": rows(5), "out": rows(5, N)},
        {"x": rows(4, 2 * K)[:, :K]},
        {"x": rows(4).half()},
        {"out": rows(4, N + 8)[:, :N]},
        {"bias": torch.zeros(N, dtype=torch.bfloat16)},
        {"w": WeightHandle(1 << 20, (N, K), "bfloat16", "hbm")},
        {"w": WeightHandle(1 << 20, (N, K), "bfloat16", "host", map_pointer=4096)},
        {"out": rows(4, N // 2), "gated": True},
    ],
    ids="-".join,
)
def test_whatever_differs_is_checked(other: dict[str, Any], checked: list[Tensor]) -> None:
    context = Context()
    launch(context, rows(4), rows(4, N))
    launch(context, **{"x": rows(4), "out": rows(4, N), **other})
    assert len(checked) == 2


@pytest.mark.usefixtures("checked")
def test_addresses_are_checked_each_time() -> None:
    context = Context()
    launch(context, rows(4), rows(4, N))
    odd = torch.zeros(4 * K + 1, dtype=torch.bfloat16)[1:].view(4, K)
    with pytest.raises(OperandError, match="must start at multiples of 16 bytes"):
        launch(context, odd, rows(4, N))
    assert len(context.launched) == 1


@pytest.mark.usefixtures("checked")
def test_plans_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launchers, "_PLANS_MAX", 3)
    context = Context()
    for count in range(1, 9):
        launch(context, rows(count), rows(count, N))
        assert len(context.plans) <= 3
    assert len(context.launched) == 8
