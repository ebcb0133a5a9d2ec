"""Every dataflow by name, in the order in which equals are preferred.

To add one, write its module beside these and name it here, in `DataflowName` and `DATAFLOWS`.
"""

from collections.abc import Mapping
from typing import Literal

from c2cserve.kernels.gpu.aot.variants import DTYPES, Variant
from c2cserve.kernels.gpu.gemm.choice.cost import Question, Speeds, Terms
from c2cserve.kernels.gpu.gemm.dataflow import Dataflow
from c2cserve.kernels.gpu.gemm.dataflows.direct import DIRECT
from c2cserve.kernels.gpu.gemm.dataflows.grouped import GROUPED
from c2cserve.kernels.gpu.gemm.dataflows.prefetch import PREFETCH
from c2cserve.kernels.gpu.gemm.dataflows.resident import RESIDENT
from c2cserve.kernels.gpu.gemm.dataflows.ring import RING
from c2cserve.kernels.gpu.gemm.dataflows.split import SPLIT
from c2cserve.kernels.gpu.gemm.dataflows.tee import TEE
from c2cserve.kernels.gpu.gemm.published.algorithm1 import ASYM, HYBRID, SYM
from c2cserve.kernels.gpu.gemm.traffic import Tiles, Traffic

DataflowName = Literal[
    "resident", "direct", "split", "prefetch", "tee", "ring", "grouped", "sym", "asym", "hybrid"
]
"""Profiles hold these names."""

DATAFLOWS: Mapping[DataflowName, Dataflow] = {
    "resident": RESIDENT,
    "direct": DIRECT,
    "split": SPLIT,
    "prefetch": PREFETCH,
    "tee": TEE,
    "ring": RING,
    "grouped": GROUPED,
    "sym": SYM,
    "asym": ASYM,
    "hybrid": HYBRID,
}
"""What leaves HBM alone comes first, what was published by others last."""

PUBLISHED: tuple[DataflowName, ...] = tuple(
    name for name, dataflow in DATAFLOWS.items() if dataflow.published
)
"""Other systems' dataflows: rarely the pick, and slow where rows are many."""

VARIANTS: tuple[Variant, ...] = tuple(
    variant
    for dtype in DTYPES
    for dataflow in DATAFLOWS.values()
    for variant in dataflow.variants
    if variant.dtype == dtype
)
"""Every kernel that `c2cserve kernels build` builds."""
SERVING_VARIANTS: tuple[Variant, ...] = tuple(
    variant for dataflow in DATAFLOWS.values() for variant in dataflow.serving
)
"""The kernels that a slice may launch; `serve` requires no others."""


def traffic(
    dataflow: DataflowName, m: int, n: int, k: int, item_bytes: int, tiles: Tiles
) -> Traffic:
    """Count the bytes of one GEMM whose X, W and O have `item_bytes` an element.

    `resident` has W in HBM; every other dataflow has it at the far end of the link. `grouped` is
    counted as one expert that has all rows (`grouped_traffic` counts by expert). Raises ValueError
    when m, n or k is below 1.
    """
    if min(m, n, k) < 1:
        raise ValueError(f"m, n and k must be at least 1, not {m}, {n}, {k}")
    return DATAFLOWS[dataflow].traffic(m, n, k, item_bytes, tiles)


def modelled(speeds: Speeds, question: Question, dataflow: DataflowName, tiles: Tiles) -> Terms:
    """Return the model's answer. Raises `ProfileMismatch` for a home without known speeds."""
    return DATAFLOWS[dataflow].model(speeds, question, tiles)
