"""The bytes that each launcher gives its kernel, as they were when the kernels were measured.

The packing has changed since, and the kernels read what they read before.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gemm_operands import Context, Operand, described

from c2cserve.kernels.gpu import gemm
from c2cserve.kernels.gpu.gemm import parameters
from c2cserve.kernels.gpu.gemm.launchers import direct, hybrid, staged
from c2cserve.kernels.gpu.gemm.traffic import Tiles
from c2cserve.kernels.gpu.gemm.weight import WeightHandle

M, N, K = 6, 256, 128
X: Any = Operand(1 << 20, M, K, row_stride=K + 8)
OUT: Any = Operand(1 << 21, M, N, row_stride=N + 16)
BIAS: Any = Operand(1 << 22, N)
HALF: Any = Operand(1 << 23, M, N // 2)
OFFSETS: Any = Operand(1 << 27, 5, dtype=torch.int32)
SLOT: Any = Operand(1 << 28, N, K)
HOST = WeightHandle(1 << 24, (N, K), "bfloat16", "host")
MAPPED = WeightHandle(1 << 24, (N, K), "bfloat16", "hbm", map_pointer=1 << 25)
EXPERTS = WeightHandle(1 << 26, (4, N, K), "bfloat16", "peer")
TILES = Tiles(bx=16)
X_MAP = (1 << 20, M, K, K + 8, 16, "bfloat16")
W_MAP = (1 << 24, 1, N, K, 128, "bfloat16")

Launch = Callable[[Any], None]
Maps = list[tuple[object, ...] | None]
"""What each tensor map was made of; None: it lies in memory, and zeros take its place."""

LAUNCHES: dict[str, tuple[Launch, str, int, bool, str, Maps, int, str]] = {
    "direct": (
        lambda c: direct.direct(c, X, HOST, BIAS, OUT, Tiles(bx=16, cluster=2)),
        "direct-bfloat16-x16-c2", 4, True, "host",
        [X_MAP, (1 << 24, 1, N, K, 64, "bfloat16"), (1 << 24, 1, N, K, 64, "bfloat16")], 508,
        "0000200000000000 0000400000000000 1001000000000000 0001000000000000"
        "0000000000000000 0002000000000000 0600000000010000 80",
    ),
    "gated direct": (
        lambda c: direct.direct(c, X, HOST, None, HALF, TILES, gated=True),
        "direct-bfloat16-x16-gated", 2, True, "host",
        [X_MAP, (1 << 24, N // 2, K, 64, "bfloat16"), (1 << 24, N // 2, K, 64, "bfloat16")], 508,
        "0000800000000000 0000000000000000 8000000000000000 8000000000000000"
        "0000000000000000 0002000000000000 0600000080000000 80",
    ),
    "split": (
        lambda c: direct.split(c, X, HOST, BIAS, OUT, Tiles(bx=16, cluster=4)),
        "split-bfloat16-x16-c4", 8, True, "host", [X_MAP, W_MAP], 380,
        "0000200000000000 0000400000000000 1001000000000000 0001000000000000"
        "0000000000000000 0002000000000000 0600000000010000 80",
    ),
    "split, a map in memory": (
        lambda c: direct.split(c, X, MAPPED, None, OUT, TILES),
        "split-bfloat16-x16", 2, True, "hbm", [X_MAP, None], 380,
        "0000200000000000 0000000000000000 1001000000000000 0001000000000000"
        "0000000200000000 0000000000000000 0600000000010000 80",
    ),
    "storing": (
        lambda c: direct.storing(c, X, HOST, BIAS, OUT, TILES, SLOT),
        "direct-bfloat16-x16-tee", 2, True, "host",
        [X_MAP, W_MAP, (1 << 28, N, K, K, 128, "bfloat16")], 508,
        "0000200000000000 0000400000000000 1001000000000000 0001000000000000"
        "0000000000000000 0002000000000000 0600000000010000 80",
    ),
    "grouped": (
        lambda c: direct.grouped(c, X, EXPERTS, OFFSETS, OUT, TILES),
        "grouped-bfloat16-x16", 8, False, "peer",
        [X_MAP, (1 << 26, 4, N, K, 128, "bfloat16")], 388,
        "0000200000000000 0000000000000000 1001000000000000 0001000000000000"
        "0000000000000000 0002000000000000 0000000800000000 0400000000010000 80",
    ),
    "ring": (
        lambda c: staged.ring(c, X, HOST, BIAS, OUT, Tiles(bx=16, panel_rows=128, slots=2)),
        "ring-bfloat16-x16", 18, False, "hbm",
        [X_MAP, (1 << 33, 2, 128, K, 128, "bfloat16")], 408,
        "0000200000000000 0000400000000000 1001000000000000 0001000000000000"
        "0000000100000000 0000000002000000 0000000004000000 0800000004000000"
        "0600000000010000 8000000080000000 0200000010",
    ),
    "hybrid": (
        lambda c: hybrid.hybrid(c, X, HOST, None, OUT, Tiles(bx=16, partial_bytes=2)),
        "hybrid-bfloat16-x16-k256-p16", 100, False, "hbm",
        [X_MAP, W_MAP, (1 << 21, M, N, N + 16, 16, "bfloat16")], 500,
        "0000200000000000 0000000000000000 1001000000000000 0001000000000000"
        "0600000000010000 8000000080000000 32",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LAUNCHES)
def test_kernels_get_the_bytes_they_were_measured_with(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (direct, hybrid, staged):
        for made in ("tensor_map", "stack_map", "pair_map"):
            monkeypatch.setattr(module, made, described, raising=False)
    launch, kernel, ctas, pdl, home, maps, size, rest = LAUNCHES[name]
    context = Context()
    launch(context)
    ((found_kernel, found_ctas, data, found_pdl, found_home),) = context.launched
    assert (found_kernel, found_ctas, found_pdl, found_home) == (kernel, ctas, pdl, home)
    assert len(data) == size
    for number, made_of in enumerate(maps):
        expected = bytes(128) if made_of is None else described(*made_of)
        assert data[128 * number : 128 * (number + 1)] == expected
    assert data[128 * len(maps) :] == bytes.fromhex(rest).ljust(size - 128 * len(maps), b"\0")


CUDA = Path(gemm.__file__).parents[1] / "cuda"


@pytest.mark.parametrize("name", ["direct", "split", "grouped", "ring", "hybrid"])
def test_fields_are_in_the_order_of_the_struct(name: str) -> None:
    struct = re.search(r"struct \w+Params \{(.*?)\};", (CUDA / f"{name}.cu").read_text(), re.DOTALL)
    assert struct is not None
    declared: dict[str, str] = {}
    for line in re.sub(r"//.*", "", struct[1]).split(";")[:-1]:
        declaration = re.fullmatch(r"\s*(?:const )?(?P<kind>\w+)(?P<names>[\s*\w,]+)", line)
        assert declaration is not None
        for one in declaration["names"].split(","):
            declared[one.strip(" *")] = "pointer" if "*" in one else declaration["kind"]
    kinds = {
        "CUtensorMap": parameters.MAP, "Output": parameters.OUTPUT, "Feed": parameters.FEED,
        "pointer": parameters.POINTER, "int": parameters.NUMBER,
    }  # fmt: skip
    layout: parameters.Layout = getattr(parameters, name.upper())
    assert list(layout.fields.items()) == [(one, kinds[kind]) for one, kind in declared.items()]
