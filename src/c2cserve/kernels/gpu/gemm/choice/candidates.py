"""The dataflows, and the tiles they are built with, that can compute a question's GEMM."""

from c2cserve.kernels.gpu.gemm.choice.cost import Question
from c2cserve.kernels.gpu.gemm.dataflows.table import DATAFLOWS, DataflowName
from c2cserve.kernels.gpu.gemm.traffic import BW, Tiles, ceil_div

Candidate = tuple[DataflowName, Tiles]


def candidates(question: Question) -> list[Candidate]:
    """Return all that fits, in the order in which equals are preferred.

    The list is empty only for a K that TMA cannot read, with experts or by map. W in HBM has
    `resident` alone, unless by map. Experts have `grouped` alone: the router's choice stays on the
    GPU.
    """
    found: list[Candidate] = []
    for name, dataflow in DATAFLOWS.items():
        found.extend((name, tiles) for tiles in dataflow.candidates(question))
    return _most_readers_first(question, found) if _streams_by_map(question) else found


def _streams_by_map(q: Question) -> bool:
    return q.by_map and not q.experts


def _most_readers_first(q: Question, found: list[Candidate]) -> list[Candidate]:
    """Order candidates by the SMs that read W, the most first.

    In a decode step, a kernel starts while another ends, on the SMs that happen to be free. If it
    uses few SMs, they may lie close together and share a path to memory.

        W [4096, 14336]      alone    in a decode step
        clusters of two      31 us    39 us
        clusters of three    32 us    31 us
    """

    def readers(candidate: Candidate) -> int:
        cluster = candidate[1].cluster
        return min(ceil_div(q.n, BW), q.sms // cluster) * cluster

    return sorted(found, key=readers, reverse=True)
