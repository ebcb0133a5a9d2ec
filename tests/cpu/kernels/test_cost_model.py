"""Which dataflows fit a question, and what the cost model says of them, in physical order."""

from dataclasses import replace
from random import Random

import msgspec
import pytest
from gemm_questions import (
    H200,
    PAPER,
    RATES,
    dataflow_of,
    estimate_of,
    measured,
    questions,
    sizes,
    with_points,
)
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from c2cserve.kernels.gpu.gemm.choice.candidates import Candidate, candidates
from c2cserve.kernels.gpu.gemm.choice.choose import Chooser, NothingFits
from c2cserve.kernels.gpu.gemm.choice.cost import Question, floor_s
from c2cserve.kernels.gpu.gemm.choice.profile import Profile, ProfileMismatch
from c2cserve.kernels.gpu.gemm.choice.rates import Rates
from c2cserve.kernels.gpu.gemm.dataflow import covers
from c2cserve.kernels.gpu.gemm.dataflows.table import modelled
from c2cserve.kernels.gpu.gemm.traffic import Tiles


def faster_links(times: float) -> Profile:
    links = {
        home: msgspec.structs.replace(
            rates,
            to_gpu_bytes_per_s=rates.to_gpu_bytes_per_s * times,
            reads=tuple(
                msgspec.structs.replace(read, bytes_per_s=read.bytes_per_s * times)
                for read in rates.reads
            ),
        )
        for home, rates in H200.links.items()
    }
    return msgspec.structs.replace(H200, links=links)


# What fits


@settings(deadline=None)
@given(questions())
def test_candidates_fit(question: Question) -> None:
    q, found = question, candidates(question)
    assert len(found) == len(set(found)) > 0
    for dataflow, tiles in found:
        assert tiles.cluster <= q.sms
        assert (dataflow == "grouped") == (q.experts > 0)
        assert (dataflow == "resident") == (q.home == "hbm" and not q.experts)
        match dataflow:
            case "tee":
                assert tiles.block_rows < q.m
            case "ring":
                assert 2 * tiles.cluster <= q.sms
            case "split":
                assert q.m <= min(64, tiles.bx)
                assert -(-q.n // 128) < q.sms
            case "direct":
                built = range(1, 2049) if q.sms >= 8 else range(1, 257)
                assert tiles.block_rows >= q.m or q.m not in built


@settings(deadline=None)
@given(st.integers(1, 5000))
def test_the_cover_wastes_the_fewest_rows(m: int) -> None:
    tiles = [Tiles(bx=bx, cluster=cluster) for cluster in (1, 2, 8) for bx in (16, 128, 256)]
    found = covers(tiles, m)
    assert len({one.block_rows for one in found}) == 1
    for one in tiles:
        if m <= one.block_rows:
            assert m <= found[0].block_rows <= one.block_rows
        elif found[0].block_rows < m:
            assert one.block_rows <= found[0].block_rows


def test_rows_tma_can_not_read_go_by_copy_engine() -> None:
    odd = Question(8, 4096, 4095, "bfloat16", "peer", 132)
    assert {dataflow for dataflow, _ in candidates(odd)} == {"prefetch"}
    assert dataflow_of(odd) == "prefetch"
    with pytest.raises(NothingFits, match="multiple of 8"):
        dataflow_of(replace(odd, experts=8, top_k=2))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"m": 0}, "m must be at least 1"),
        ({"sms": 0}, "sms must be"),
        ({"home": "moon"}, "home must be one of host, peer, hbm"),
        ({"dtype": "int8"}, "dtype must be one of"),
        ({"neighbours": -1}, "cannot be negative"),
        ({"experts": 4}, "top_k"),
        ({"experts": 4, "top_k": 5}, "top_k"),
        ({"top_k": 1}, "top_k"),
    ],
)
def test_questions_that_make_no_sense_are_refused(wrong: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        replace(PAPER, **wrong)


def test_a_home_the_machine_lacks_is_told() -> None:
    one_gpu = msgspec.structs.replace(H200, links={"host": H200.links["host"]})
    with pytest.raises(ProfileMismatch, match="no link to a peer: run `c2cserve profile`"):
        Chooser(one_gpu).pick(PAPER)


# The model


@settings(deadline=None)
@given(questions(), sizes)
def test_more_rows_never_take_less_time(question: Question, more: int) -> None:
    """With the same tiles. (Experts are apart: which of them more tokens choose is a guess.)"""
    assume(not question.experts)
    for dataflow, tiles in candidates(question):
        before = modelled(RATES, question, dataflow, tiles)
        after = modelled(RATES, replace(question, m=question.m + more), dataflow, tiles)
        assert after.seconds >= before.seconds * (1 - 1e-9)
        assert after.traffic.link_bytes >= before.traffic.link_bytes


@settings(deadline=None)
@given(questions(), st.floats(1.0, 20.0))
def test_a_faster_link_never_takes_more_time(question: Question, times: float) -> None:
    faster = Rates(faster_links(times))
    for dataflow, tiles in candidates(question):
        before = modelled(RATES, question, dataflow, tiles).seconds
        assert modelled(faster, question, dataflow, tiles).seconds <= before * (1 + 1e-9)
    assert floor_s(faster, question) <= floor_s(RATES, question) * (1 + 1e-9)


@settings(deadline=None)
@given(questions(), st.integers(1, 6))
def test_more_neighbours_never_take_less_time(question: Question, more: int) -> None:
    crowded = replace(question, neighbours=question.neighbours + more)
    for dataflow, tiles in candidates(question):
        before = modelled(RATES, question, dataflow, tiles).seconds
        assert modelled(RATES, crowded, dataflow, tiles).seconds >= before * (1 - 1e-9)


@settings(deadline=None)
@given(questions(), questions(), st.floats(1.0, 3.0))
def test_nothing_beats_the_floor(question: Question, other: Question, factor: float) -> None:
    near = replace(other, home=question.home, experts=question.experts, top_k=question.top_k)
    chooser = Chooser(with_points(measured([near], factor)))
    for estimate in chooser.estimates(question):
        assert estimate.predicted_s >= chooser.floor_s(question) * (1 - 1e-9)


@settings(deadline=None)
@given(questions())
def test_only_chosen_experts_cross_the_link(question: Question) -> None:
    assume(question.experts)
    q = question
    weights = q.n * q.k * 2
    least = min(q.top_k, q.experts) * weights
    assert q.top_k - 1e-6 <= q.active_experts <= min(q.experts, q.m * q.top_k) + 1e-6
    assert q.rows * q.active_experts >= q.m * q.top_k - 1e-6
    for dataflow, tiles in candidates(q):
        moved = modelled(RATES, q, dataflow, tiles).traffic
        if q.home == "hbm":
            assert moved.link_bytes == 0
            assert moved.hbm_read_bytes >= least - 1
        else:
            assert moved.link_bytes >= least - 1


@settings(deadline=None)
@given(st.integers(1, 20000), st.integers(1, 140), st.integers(1, 9))
def test_rates_meet_their_points_and_stay_sane_between(m: int, sms: int, slices: int) -> None:
    for rate in H200.matmul_flops:
        seconds = RATES.matmul_s(rate.m, 100, 100, rate.sms)
        assert 2 * rate.m * 100 * 100 / seconds == pytest.approx(rate.flops_per_s)
    for read in H200.links["peer"].reads:
        found = RATES.read_bytes_per_s("peer", read.ctas, read.slices)
        assert found == pytest.approx(read.bytes_per_s)
    assert RATES.matmul_s(m, 8, 8, sms) >= RATES.matmul_s(m, 8, 8, sms + 1)
    assert RATES.read_bytes_per_s("host", sms, slices) <= 51.4e9 / slices * (1 + 1e-9)
    assert RATES.engine_bytes_per_s("host", slices) == pytest.approx(55.6e9 / slices)


def test_noise_in_measured_rates_does_not_make_more_rows_faster() -> None:
    slow = msgspec.structs.replace(H200.matmul_flops[2], flops_per_s=1e14)
    rates = (*H200.matmul_flops[:2], slow, *H200.matmul_flops[3:])
    noisy = Rates(msgspec.structs.replace(H200, matmul_flops=rates))
    seconds = [noisy.matmul_s(m, 4096, 4096, 132) for m in range(1, 4096, 7)]
    assert seconds == sorted(seconds)


def test_the_published_dataflows_take_what_they_were_measured_to() -> None:
    """FACTS: plain tiling 29 ms, weight-stationary 4.39 ms with 16-bit partial sums and 9.8 ms
    with float32 ones in K tiles of 128, where the floor is 1.71."""
    assert floor_s(RATES, PAPER) == pytest.approx(1.71e-3)
    narrow = modelled(RATES, PAPER, "sym", Tiles(bx=128)).seconds
    assert narrow == pytest.approx(29.0e-3, rel=0.05)
    exact = modelled(RATES, PAPER, "asym", Tiles(bx=128, kp=128, partial_bytes=4)).seconds
    assert exact == pytest.approx(9.8e-3, rel=0.1)
    rounded = modelled(RATES, PAPER, "asym", Tiles(bx=128, kp=128, partial_bytes=2)).seconds
    assert rounded == pytest.approx(4.39e-3, rel=0.2)


def test_in_a_slice_among_seven_the_link_is_shared() -> None:
    """7 slices of 16 SMs pull 55 GB/s each from a peer."""
    question = Question(8, 16384, 4096, "bfloat16", "peer", 16, neighbours=6)
    direct: Candidate = ("direct", Tiles(bx=16))
    terms = estimate_of(Chooser(H200), question, direct).terms
    assert terms.bound == "link"
    assert terms.traffic.link_bytes / terms.link_s == pytest.approx(55e9)
    alone = estimate_of(Chooser(H200), replace(question, neighbours=0), direct).terms
    assert alone.traffic.link_bytes / alone.link_s == pytest.approx(337e9)


def test_few_tiles_leave_sms_idle() -> None:
    """8 tiles of W for 2,048 rows: 8 clusters of 8 CTAs on 132 SMs, so half of them have work."""
    question = Question(2048, 1024, 4096, "bfloat16", "peer", 132)
    busy = modelled(RATES, replace(question, n=16384), "direct", Tiles(bx=256, cluster=8))
    idle = modelled(RATES, question, "direct", Tiles(bx=256, cluster=8))
    assert 0.45 * 132 / 128 < (busy.compute_s / 16) / idle.compute_s < 0.55 * 132 / 128


def test_tee_is_direct_on_the_first_rows_and_resident_on_the_rest() -> None:
    tiles = Tiles(bx=256, cluster=8)
    head = modelled(RATES, replace(PAPER, m=2048), "tee", tiles)
    rest = modelled(RATES, replace(PAPER, m=8192, home="hbm"), "resident", tiles)
    tee = modelled(RATES, PAPER, "tee", tiles)
    assert tee.traffic == head.traffic + rest.traffic
    assert tee.traffic.link_bytes == 16384 * 4096 * 2
    assert tee.link_s == head.link_s
    assert tee.compute_s == pytest.approx(head.compute_s + rest.compute_s)
    assert tee.seconds == pytest.approx(head.seconds + rest.seconds - rest.overhead_s)


def test_a_ring_is_filled_by_a_quarter_of_a_slice() -> None:
    """At most 16 CTAs copy, and their SMs do not multiply."""
    tiles = Tiles(bx=128)
    for sms, ctas in ((132, 16), (16, 4)):
        question = replace(PAPER, m=128, sms=sms)
        ring = modelled(RATES, question, "ring", tiles)
        rate = RATES.read_bytes_per_s("peer", ctas, 1)
        assert ring.traffic.link_bytes / ring.link_s == pytest.approx(rate)
        direct = modelled(RATES, question, "direct", tiles)
        assert ring.compute_s == pytest.approx(direct.compute_s / (1 - ctas / sms))


def test_fewer_rows_than_were_measured_take_what_the_fewest_did() -> None:
    assert RATES.matmul_s(1, 4096, 4096, 132) == RATES.matmul_s(8, 4096, 4096, 132)


@pytest.mark.parametrize("block_rows", [16, 64, 128, 256])
@pytest.mark.parametrize("m", [1, 16, 300, 2048])
def test_blocks_of_experts_rows_are_those_of_a_random_router(m: int, block_rows: int) -> None:
    random, experts, top_k = Random(m), 64, 4
    asked = Question(m, 256, 256, "bfloat16", "peer", 132, experts=experts, top_k=top_k)
    drawn = 0
    for _ in range(30):
        counts = [0] * experts
        for _ in range(m):
            for expert in random.sample(range(experts), top_k):
                counts[expert] += 1
        drawn += sum(-(-count // block_rows) for count in counts)
    assert asked.blocks(block_rows) == pytest.approx(drawn / 30, rel=0.04)
