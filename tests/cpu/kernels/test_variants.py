"""The list of kernels: consistent with the device code, and all that a launcher can ask for."""

import re
from collections import defaultdict
from dataclasses import replace

import pytest
from gemm_questions import questions
from hypothesis import given
from hypothesis import strategies as st

from c2cserve.core.tensors import HalfDtype
from c2cserve.kernels.gpu.aot.compiler import SOURCES
from c2cserve.kernels.gpu.aot.variants import RELAY, SHARED_BYTES, Source, Variant
from c2cserve.kernels.gpu.gemm.choice.assumed import assumed_h200
from c2cserve.kernels.gpu.gemm.choice.candidates import candidates
from c2cserve.kernels.gpu.gemm.choice.choose import ROWS_STREAMED, Chooser
from c2cserve.kernels.gpu.gemm.choice.cost import Question
from c2cserve.kernels.gpu.gemm.dataflows.table import (
    DATAFLOWS,
    SERVING_VARIANTS,
    VARIANTS,
    DataflowName,
)
from c2cserve.kernels.gpu.gemm.traffic import Tiles

BY_SOURCE: dict[Source, list[Variant]] = defaultdict(list)
for one in VARIANTS:
    BY_SOURCE[one.source].append(one)
TILE_BYTES = 64 * 2
"""Of a row of W or X in a stage."""


def launched(dataflow: DataflowName, tiles: Tiles, dtype: HalfDtype) -> Variant | None:
    """What `launchers/` launch; None for what cuBLAS multiplies."""
    bx, cluster = tiles.bx, tiles.cluster
    match dataflow:
        case "resident" | "prefetch":
            return None
        case "sym" | "asym" | "hybrid":
            kp, partial_bytes = tiles.kp, tiles.partial_bytes
            return Variant("hybrid", dtype, bx, kp=kp, partial_bytes=partial_bytes)
        case "tee":
            return Variant("direct", dtype, bx, cluster, tee=True)
        case _:
            return Variant(dataflow, dtype, bx, cluster)


def test_names_are_unique_and_fit_for_files() -> None:
    names = [variant.name for variant in VARIANTS]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[a-z0-9-]+", name) for name in names)


def test_every_variant_is_there_for_both_dtypes() -> None:
    flipped = {"bfloat16": "float16", "float16": "bfloat16"}
    assert {replace(v, dtype=flipped[v.dtype]) for v in VARIANTS} == set(VARIANTS)


@pytest.mark.parametrize("source", sorted(BY_SOURCE))
def test_defines_are_those_the_source_is_built_with(source: Source) -> None:
    text = (SOURCES / f"{source}.cu").read_text()
    head = re.search(r"Built with -D: (.*?)\.\n", text.replace("\n//", ""), re.DOTALL)
    assert head is not None, f"{source}.cu does not say what it is built with"
    said = set(re.findall(r"\b[A-Z][A-Z_]+\b", re.sub(r"\(.*?\)", "", head[1])))
    for variant in BY_SOURCE[source]:
        assert set(variant.defines) == said
        assert int(variant.defines["BX"]) == variant.bx
        assert variant.defines["SHARED_BYTES"] == str(SHARED_BYTES)


def test_every_source_has_variants() -> None:
    assert {path.stem for path in SOURCES.glob("*.cu")} == {*BY_SOURCE, RELAY.source}


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_stages_hide_latency_and_fill_shared_memory(variant: Variant) -> None:
    """A link's latency needs at least 3 tiles on their way. Where their number is not capped, one
    more would not fit (that the rest of shared memory is accounted for, the compiler checks)."""
    stage = (128 + variant.bx) * TILE_BYTES
    assert variant.stages >= 3
    assert variant.stages * stage <= SHARED_BYTES
    rest = SHARED_BYTES - variant.stages * stage
    assert variant.stages == 12 or rest < stage + 40_000, "shared memory is left idle"


@given(questions(), st.integers(1, ROWS_STREAMED))
def test_whatever_streams_few_rows_is_built_for_gates_too(question: Question, rows: int) -> None:
    """What serves up to 64 rows is picked for the shape, whether its W is a gate's or not."""
    few = replace(question, m=rows, k=-(-question.k // 8) * 8, experts=0, top_k=0)
    dataflow, tiles = Chooser(assumed_h200()).serving(few)
    variant = launched(dataflow, tiles, few.dtype)
    assert variant is not None
    assert replace(variant, gated=True) in VARIANTS


def test_serving_requires_no_kernel_that_is_there_to_compare_with() -> None:
    published = {v for flow in DATAFLOWS.values() if flow.published for v in flow.variants}
    assert published
    assert set(SERVING_VARIANTS) < set(VARIANTS) - published


@given(questions(), st.booleans())
def test_whatever_a_slice_launches_is_required_to_serve(question: Question, few_rows: bool) -> None:
    q = replace(question, k=-(-question.k // 8) * 8)
    if few_rows:
        q = replace(q, m=1 + q.m % ROWS_STREAMED)
    variant = launched(*Chooser(assumed_h200()).serving(q), q.dtype)
    if variant is not None:
        assert variant in SERVING_VARIANTS
        assert variant.source == "grouped" or replace(variant, gated=True) in SERVING_VARIANTS


@given(questions())
def test_whatever_can_be_picked_is_built(question: Question) -> None:
    """While serving nothing compiles: a kernel that is not in the list would be an error then."""
    for dataflow, tiles in candidates(question):
        variant = launched(dataflow, tiles, question.dtype)
        assert variant is None or variant in VARIANTS, f"{dataflow} {tiles}"
        assert variant is None or variant.cluster <= question.sms
