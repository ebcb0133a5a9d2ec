"""A machine to profile that is a cost model: it answers at once, and its clock moves as if not."""

from collections.abc import Callable, Sequence

from c2cserve.core.tensors import LinkHome
from c2cserve.kernels.gpu.gemm.choice.assumed import assumed_h200
from c2cserve.kernels.gpu.gemm.choice.cost import Question
from c2cserve.kernels.gpu.gemm.choice.profile import MachineFacts
from c2cserve.kernels.gpu.gemm.choice.rates import Rates
from c2cserve.kernels.gpu.gemm.dataflows.table import DataflowName, modelled
from c2cserve.kernels.gpu.gemm.traffic import Tiles
from c2cserve.profiling.survey import Refused

H200 = assumed_h200()
RATES = Rates(H200)

Measurement = tuple[Question, DataflowName, Tiles, int]
"""What was asked for, and the chain's length."""


class FakeBench:
    """`truth` says how many times what the model believes a GEMM takes; `refuses` what it cannot
    run and why. `overhead_s` passes with every measurement."""

    facts: MachineFacts = H200.machine

    def __init__(
        self,
        homes: Sequence[LinkHome] = ("peer", "host"),
        sms: Sequence[int] = (132, 64, 16),
        slices: int = 7,
        *,
        overhead_s: float = 0.05,
        truth: Callable[[Question, DataflowName, Tiles], float] = lambda q, d, t: 1.0,
        refuses: Callable[[Question, DataflowName], str] = lambda q, d: "",
        notes: Sequence[str] = (),
    ) -> None:
        self.homes, self.sms, self.slices, self.notes = homes, sms, slices, notes
        self.now_s = 1000.0
        self.asked: list[Measurement] = []
        self._overhead_s, self._truth, self._refuses = overhead_s, truth, refuses

    def clock(self) -> float:
        return self.now_s

    def copies(self, home: LinkHome) -> tuple[float, float, float]:
        link = H200.links[home]
        self.now_s += self._overhead_s
        return link.to_gpu_bytes_per_s, link.from_gpu_bytes_per_s, link.duplex_bytes_per_s

    def write_bytes_per_s(self, sms: int) -> float:
        self.now_s += self._overhead_s
        return 4e12 * sms / self.sms[0]

    def seconds(
        self, question: Question, dataflow: DataflowName, tiles: Tiles, chain: int
    ) -> float:
        self.asked.append((question, dataflow, tiles, chain))
        if why := self._refuses(question, dataflow):
            raise Refused(why)
        model_s = modelled(RATES, question, dataflow, tiles).seconds
        taken_s = model_s * self._truth(question, dataflow, tiles)
        runs = 10 if question.neighbours else 4
        self.now_s += self._overhead_s + max(0.02, runs * chain * taken_s)
        return taken_s
