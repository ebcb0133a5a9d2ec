"""The measuring side of `c2cserve profile` on a real GPU: numbers that must hang together."""

import time

import pytest
import torch

from c2cserve.kernels.gpu.gemm.choice.choose import Chooser
from c2cserve.kernels.gpu.gemm.choice.cost import Question
from c2cserve.kernels.gpu.gemm.dataflows.table import DataflowName
from c2cserve.kernels.gpu.gemm.traffic import Tiles
from c2cserve.profiling.gpu_bench import GpuBench
from c2cserve.profiling.measuring_process import ProcessBench
from c2cserve.profiling.survey import Failed, survey

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

DIRECT = Tiles(bx=16)


@pytest.fixture(scope="module")
def bench() -> GpuBench:
    return GpuBench()


def streaming(home: str, sms: int, neighbours: int = 0) -> Question:
    assert home in ("host", "peer", "hbm")
    return Question(16, 16384, 4096, "bfloat16", home, sms, neighbours=neighbours)


def test_links_are_as_fast_one_way_as_their_copies_say(bench: GpuBench) -> None:
    for home in bench.homes:
        to_gpu, from_gpu, duplex = bench.copies(home)
        assert max(to_gpu, from_gpu) * 0.9 < duplex < 2.1 * max(to_gpu, from_gpu)
        question = streaming(home, bench.sms[0])
        read = question.n * question.k * 2 / bench.seconds(question, "direct", DIRECT, 4)
        assert 0.7 * to_gpu < read < 1.1 * to_gpu


def test_local_memory_is_faster_than_any_link(bench: GpuBench) -> None:
    whole = bench.sms[0]
    local = bench.seconds(streaming("hbm", whole), "direct", DIRECT, 16)
    assert all(
        local < bench.seconds(streaming(home, whole), "direct", DIRECT, 4) for home in bench.homes
    )
    assert bench.write_bytes_per_s(whole) > 5e11


def test_neighbours_take_their_share(bench: GpuBench) -> None:
    """A slice that streams beside k others that do gets 1 / (k + 1) of what SMs read of a link,
    not what the chip's arbiters would give it (between 0.8 and 1.4 of that)."""
    if bench.slices < 2:
        pytest.skip("one slice has no neighbours")
    crowd, sms = bench.slices - 1, bench.sms[-1]
    for home in bench.homes:
        whole = bench.seconds(streaming(home, bench.sms[0]), "direct", DIRECT, 4)
        beside = bench.seconds(streaming(home, sms, crowd), "direct", DIRECT, 4)
        assert 0.9 * bench.slices < beside / whole < 1.15 * bench.slices


def test_experts_are_measured_too(bench: GpuBench) -> None:
    few = Question(1, 768, 2048, "bfloat16", "host", bench.sms[0], experts=64, top_k=2)
    many = Question(512, 768, 2048, "bfloat16", "host", bench.sms[0], experts=64, top_k=2)
    taken = [bench.seconds(one, "grouped", Tiles(bx=16), 4) for one in (few, many)]
    assert taken[1] > 10 * taken[0], "2 experts' weights, or those of all 64"


def test_a_survey_ends_in_time_and_picks(bench: GpuBench) -> None:
    began_s = time.monotonic()
    found = survey(bench, commit="", until_s=began_s + 30, clock=time.monotonic)
    assert time.monotonic() - began_s < 40
    assert len(found.points) > 50
    chooser = Chooser(found)
    for m in (1, 64, 1024):
        choice = chooser.pick(Question(m, 4096, 4096, "bfloat16", "host", bench.sms[0]))
        assert choice.basis == "measured"
        assert choice.predicted_s < 2 * choice.floor_s


class BrokenByMany(GpuBench):
    """A measurement of 64 rows reads an index that is not there: an error that sticks."""

    def seconds(
        self, question: Question, dataflow: DataflowName, tiles: Tiles, chain: int
    ) -> float:
        if question.m == 64:
            nowhere = torch.tensor([1 << 20], device="cuda")
            torch.zeros(4, device="cuda")[nowhere] = 1.0
            torch.cuda.synchronize()
        return super().seconds(question, dataflow, tiles, chain)


def test_an_error_that_sticks_costs_one_measurement() -> None:
    with ProcessBench(BrokenByMany) as bench:
        few, many = (Question(m, 16384, 4096, "bfloat16", "host", bench.sms[0]) for m in (16, 64))
        before_s = bench.seconds(few, "direct", DIRECT, 4)
        with pytest.raises(Failed, match="CUDA error: device-side assert"):
            bench.seconds(many, "direct", Tiles(bx=64), 4)
        after_s = bench.seconds(few, "direct", DIRECT, 4)
    assert 0.8 < after_s / before_s < 1.25
