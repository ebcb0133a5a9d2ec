"""Questions for the cost model and the pick, and profiles that answer them in known ways."""

from collections.abc import Sequence

import msgspec
from hypothesis import strategies as st

from c2cserve.kernels.gpu.gemm.choice.assumed import assumed_h200
from c2cserve.kernels.gpu.gemm.choice.candidates import Candidate, candidates
from c2cserve.kernels.gpu.gemm.choice.choose import Chooser, Estimate
from c2cserve.kernels.gpu.gemm.choice.cost import Question
from c2cserve.kernels.gpu.gemm.choice.profile import HOMES, Point, Profile
from c2cserve.kernels.gpu.gemm.choice.rates import Rates
from c2cserve.kernels.gpu.gemm.dataflows.table import modelled

H200 = assumed_h200()
RATES = Rates(H200)
PAPER = Question(10240, 16384, 4096, "bfloat16", "peer", 132)
"""The shape of C2CServe's figures."""

sizes = st.integers(1, 30000)
eighths = st.integers(1, 4000).map(lambda k: 8 * k)


@st.composite
def questions(draw: st.DrawFn) -> Question:
    experts = draw(st.sampled_from([0, 0, 8, 128]))
    return Question(
        m=draw(st.integers(1, 16384)),
        n=draw(sizes),
        k=draw(eighths),
        dtype=draw(st.sampled_from(["bfloat16", "float16"])),
        home=draw(st.sampled_from(HOMES)),
        sms=draw(st.sampled_from([1, 8, 16, 32, 64, 132])),
        experts=experts,
        top_k=draw(st.integers(1, 8)) if experts else 0,
        neighbours=draw(st.integers(0, 6)),
    )


def point(question: Question, candidate: Candidate, seconds: float) -> Point:
    dataflow, tiles = candidate
    q = question
    return Point(
        dataflow, tiles, q.m, q.n, q.k, q.dtype, q.home, q.sms, seconds, q.neighbours, q.experts,
        q.top_k,
    )  # fmt: skip


def measured(
    asked: Sequence[Question], factor: float = 1.0, only: set[str] | None = None
) -> list[Point]:
    """Points where every candidate of these questions took `factor` times what the model says."""
    return [
        point(one, (dataflow, tiles), factor * modelled(RATES, one, dataflow, tiles).seconds)
        for one in asked
        for dataflow, tiles in candidates(one)
        if only is None or dataflow in only
    ]


def with_points(points: Sequence[Point]) -> Profile:
    return msgspec.structs.replace(H200, points=tuple(points))


def estimate_of(chooser: Chooser, question: Question, candidate: Candidate) -> Estimate:
    [found] = [one for one in chooser.estimates(question) if (one.dataflow, one.tiles) == candidate]
    return found


def dataflow_of(question: Question) -> str:
    return Chooser(H200).pick(question).dataflow
