"""A profile outlives what breaks the process that measures: its death, CUDA's errors, hangs."""

import multiprocessing

import pytest
from breaking_bench import Make, breaking, dead, doomed, refuses_all, refusing, without_gpu

from c2cserve.kernels.gpu.gemm.choice.cost import Question
from c2cserve.kernels.gpu.gemm.choice.profile import Profile, decode_profile, encode_profile
from c2cserve.kernels.gpu.gemm.traffic import Tiles
from c2cserve.profiling.measuring_process import Limits, ProcessBench
from c2cserve.profiling.survey import Bench, Failed, Refused, survey
from c2cserve.terminal.output import CliError

LIMITS = Limits(start_s=60.0, answer_s=1.0)


def profile_of(bench: Bench) -> Profile:
    return survey(bench, commit="abc", until_s=1.0, clock=lambda: -1e9)


@pytest.fixture(scope="module")
def survived() -> Profile:
    with ProcessBench(breaking, LIMITS) as bench:
        return profile_of(bench)


def test_all_other_points_are_in_the_profile(survived: Profile) -> None:
    expected = profile_of(refusing())
    assert len(expected.points) > 300
    assert survived.points == expected.points
    assert survived.links == expected.links
    assert survived.hbm == expected.hbm
    assert survived.matmul_flops == expected.matmul_flops
    assert not any(p.dataflow == "direct" and p.m == 16 and p.sms == 132 and p.n == 4096
                   and p.k == 4096 and p.home == "host" for p in survived.points)  # fmt: skip
    assert decode_profile(encode_profile(survived)) == survived


def test_the_lines_name_what_failed_and_how(survived: Profile) -> None:
    [rate] = [line for line in survived.cut if line.startswith("cuBLAS")]
    assert rate == "cuBLAS, M 64, on 16 SMs: RuntimeError: CUDA error: unspecified launch failure"
    shape = "N 4096, K 4096, W at host on 132 SMs"
    for begin, what in (
        ("direct (bx ", f" of M 16, {shape}: the process that measured it was killed by signal 9"),
        ("ring (bx ", f" of M 256, {shape}: RuntimeError: CUDA error: unspecified launch failure"),
        ("prefetch (", f" of M 64, {shape}: hangs: no answer within 1 s"),
    ):
        lines = [line for line in survived.cut if line.startswith(begin)]
        assert lines
        assert all(line.endswith(what) for line in lines)
    assert all("\n" not in line for line in survived.cut)


def test_the_gpu_is_given_up_after_some_failures_in_a_row_and_the_rates_are_kept() -> None:
    with ProcessBench(doomed, LIMITS) as bench:
        found = profile_of(bench)
    assert found.points == ()
    assert found.links["host"].reads
    assert len(found.cut) == LIMITS.failures
    assert ", and all after it: 3 measurements in a row ended their process: " in found.cut[-1]


def test_a_refusal_ends_nothing() -> None:
    with ProcessBench(refuses_all, LIMITS) as bench:
        question = Question(16, 4096, 4096, "bfloat16", "host", 132)
        for _ in range(5):
            with pytest.raises(Refused, match="broken") as refused:
                bench.seconds(question, "direct", Tiles(bx=16), 4)
            assert not isinstance(refused.value, Failed)
        [only] = multiprocessing.active_children()
        with pytest.raises(Refused, match="broken"):
            profile_of(bench)
        assert multiprocessing.active_children() == [only]
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize(
    ("make", "says"),
    [(without_gpu, "^there is no GPU to measure$"), (dead, "it was killed by signal 9")],
)
def test_a_gpu_that_cannot_be_opened_is_one_clear_line(make: Make, says: str) -> None:
    with ProcessBench(make, LIMITS) as bench, pytest.raises(CliError, match=says):
        profile_of(bench)
