"""GEMMs that take as long as a model says, so that benchmarks run without a GPU."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import gemm_figures
import gemm_table
import pytest
from gemm_cases import Case, LinkHome

from c2cserve.kernels.gpu.gemm.choice.assumed import assumed_h200
from c2cserve.kernels.gpu.gemm.choice.choose import Chooser
from c2cserve.kernels.gpu.gemm.choice.rates import Rates
from c2cserve.kernels.gpu.gemm.dataflows.table import DataflowName, modelled, traffic
from c2cserve.kernels.gpu.gemm.traffic import Tiles, Traffic, grouped_traffic
from c2cserve.kernels.gpu.gemm.weight import OperandError

RATES = Rates(assumed_h200())
CHOOSER = Chooser(assumed_h200())
LINK_BYTES_PER_S: dict[LinkHome, float] = {"host": 55e9, "peer": 390e9}


@dataclass
class FakeContext:
    sms: int = 132

    def limit_link(self, bytes_per_s: float) -> None: ...


@dataclass
class FakeBench:
    homes: Sequence[LinkHome] = ("peer", "host")
    sms: int = 132
    context: FakeContext = field(default_factory=FakeContext)
    link_bytes_per_s = LINK_BYTES_PER_S


@dataclass
class FakeSlice:
    context: FakeContext

    def use(self) -> Any:
        return nullcontext()


@dataclass
class FakeRun:
    """A case whose GEMMs take a tenth more than the model says; `refuses` names dataflows that
    cannot run, `wrong` those whose result is off."""

    bench: FakeBench
    case: Case
    context: FakeContext | None = None
    own: bool = False
    refuses: Sequence[str] = ()
    wrong: Sequence[str] = ()

    @property
    def link_bytes_per_s(self) -> float:
        return LINK_BYTES_PER_S[self.case.home]

    @property
    def weight_bytes(self) -> float:
        one = self.case.linear
        return one.bytes / max(1, one.experts) * self.case.question.active_experts

    def cublas_s(self) -> tuple[float, str]:
        one = self.case.linear
        return RATES.matmul_s(self.case.m, one.n, one.k, self.case.sms), "cuBLAS"

    def seconds(self, dataflow: DataflowName, tiles: Tiles, count: int = 16) -> float:
        assert count >= 1
        if dataflow in self.refuses:
            raise OperandError(f"{dataflow} cannot run here")
        return 1.1 * modelled(RATES, self.case.question, dataflow, tiles).seconds

    def steps(
        self, dataflow: DataflowName, tiles: Tiles, count: int, first: int = 0
    ) -> list[float]:
        if dataflow == "resident":
            return [self.cublas_s()[0]] * count
        return [self.seconds(dataflow, tiles)] * count

    def error(self, dataflow: DataflowName, tiles: Tiles) -> float:
        return 0.5 if dataflow in self.wrong else 1e-3

    def traffic(self, dataflow: DataflowName, tiles: Tiles) -> Traffic:
        one = self.case.linear
        if dataflow == "grouped":
            rows = self.case.m * one.top_k // one.experts
            bounds = [rows * e for e in range(one.experts + 1)]
            return grouped_traffic(bounds, one.n, one.k, 2, tiles)
        return traffic(dataflow, self.case.m, one.n, one.k, 2, tiles)


def install(patch: pytest.MonkeyPatch, **how: Sequence[str]) -> None:
    """Benchmarks then run on fakes: what runs at once takes so many times as long."""

    def run(*given: Any, **more: Any) -> FakeRun:
        return FakeRun(*given, **more, **how)

    def fake_partitions(bench: FakeBench, sms: int, count: int) -> list[FakeSlice]:
        return [FakeSlice(FakeContext(sms)) for _ in range(count)]

    def together_s(
        slices: Sequence[FakeSlice], graphs: Sequence[Sequence[float]], *, at_least_s: float = 0.1
    ) -> list[float]:
        return [len(slices) * sum(graph) for graph in graphs]

    patch.setattr(gemm_table, "CaseRun", run)
    patch.setattr(gemm_figures, "CaseRun", run)
    patch.setattr(gemm_figures, "partitions", fake_partitions)
    patch.setattr(gemm_figures, "graph_of", lambda own, steps: steps)
    patch.setattr(gemm_figures, "together_s", together_s)
