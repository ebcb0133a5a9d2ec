"""Machines to profile that break the process that measures them, at questions of the test's choice.
They are made in that process, by name."""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from c2cserve.kernels.gpu.gemm.choice.cost import Question
from c2cserve.kernels.gpu.gemm.dataflows.table import DataflowName
from c2cserve.kernels.gpu.gemm.traffic import Tiles
from c2cserve.terminal.output import CliError

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))
from fake_bench import FakeBench

SMALL = {"homes": ("host",), "sms": (132, 16), "slices": 2}
CUDA = "CUDA error: unspecified launch failure\nSearch for `cudaErrorLaunchFailure' in the docs"


def kind_of(q: Question, dataflow: DataflowName) -> str:
    """How it goes wrong: in rates (chains of direct and resident GEMMs) and in points."""
    if q.home == "hbm" and q.sms == 16 and dataflow == "resident" and q.m == 64:
        return "error"
    if q.sms != 132 or q.home != "host" or (q.n, q.k) != (4096, 4096):
        return ""
    return {("direct", 16): "killed", ("ring", 256): "error", ("prefetch", 64): "hang"}.get(
        (dataflow, q.m), ""
    )


class BreakingBench(FakeBench):
    def seconds(
        self, question: Question, dataflow: DataflowName, tiles: Tiles, chain: int
    ) -> float:
        match kind_of(question, dataflow):
            case "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "error":
                raise RuntimeError(CUDA)
            case "hang":
                time.sleep(600)
            case _:
                pass
        return super().seconds(question, dataflow, tiles, chain)


def breaking() -> FakeBench:
    return BreakingBench(**SMALL)


def refusing() -> FakeBench:
    """The same questions, refused."""
    return FakeBench(**SMALL, refuses=kind_of)


class Doomed(FakeBench):
    """Rates can be measured; no dataflow can."""

    def seconds(
        self, question: Question, dataflow: DataflowName, tiles: Tiles, chain: int
    ) -> float:
        if (question.n, question.k) == (4096, 4096):
            raise RuntimeError(CUDA)
        return super().seconds(question, dataflow, tiles, chain)


def doomed() -> FakeBench:
    return Doomed(**SMALL)


def dead() -> FakeBench:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def without_gpu() -> FakeBench:
    raise CliError("there is no GPU to measure")


def refuses_all() -> FakeBench:
    return FakeBench(**SMALL, refuses=lambda q, d: "broken")


Make = Callable[[], FakeBench]
