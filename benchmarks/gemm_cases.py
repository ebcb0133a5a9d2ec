"""What `gemm.py` measures: the linears of three models over numbers of rows, and with what."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from c2cserve.core.tensors import LinkHome
from c2cserve.kernels.gpu.gemm.choice.choose import Estimate, describe
from c2cserve.kernels.gpu.gemm.choice.cost import Question
from c2cserve.kernels.gpu.gemm.dataflows.table import PUBLISHED, DataflowName
from c2cserve.kernels.gpu.gemm.traffic import Tiles

ROWS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 10240)
ROWS_QUICK = (1, 64, 512, 10240)
PUBLISHED_ROWS = (16, 512, 2048, 10240)
"""Numbers of rows for which published dataflows are timed: they are slow where rows are many."""
CHAIN = 16
ITEM_BYTES = 2


@dataclass(frozen=True, slots=True)
class Linear:
    """W [n, k] of a model; with `experts`, that many such W, `top_k` of them for a row."""

    model: str
    name: str
    n: int
    k: int
    experts: int = 0
    top_k: int = 0

    @property
    def bytes(self) -> int:
        return max(1, self.experts) * self.n * self.k * ITEM_BYTES


LINEARS = (
    Linear("Llama-3-8B", "qkv", 6144, 4096),
    Linear("Llama-3-8B", "o", 4096, 4096),
    Linear("Llama-3-8B", "gate_up", 28672, 4096),
    Linear("Llama-3-8B", "down", 4096, 14336),
    Linear("Llama-3-70B", "qkv", 10240, 8192),
    Linear("Llama-3-70B", "o", 8192, 8192),
    Linear("Llama-3-70B", "gate_up", 57344, 8192),
    Linear("Llama-3-70B", "down", 8192, 28672),
    Linear("Qwen3-30B-A3B", "qkv", 5120, 2048),
    Linear("Qwen3-30B-A3B", "o", 2048, 4096),
    Linear("Qwen3-30B-A3B", "experts_gate_up", 1536, 2048, experts=128, top_k=8),
    Linear("Qwen3-30B-A3B", "experts_down", 2048, 768, experts=128, top_k=8),
)
PAPER = Linear("C2CServe", "figure 4", 16384, 4096)
PAPER_ROWS = 10240


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the table: m rows of X meet `linear`, whose W is at `home`, on `sms` SMs."""

    linear: Linear
    m: int
    home: LinkHome
    sms: int

    @property
    def question(self) -> Question:
        one = self.linear
        return Question(
            self.m, one.n, one.k, "bfloat16", self.home, self.sms, one.experts, one.top_k
        )

    @property
    def published(self) -> bool:
        """The paper's dataflows are timed here too."""
        return self.linear.model == "Llama-3-8B" and self.m in PUBLISHED_ROWS

    def __str__(self) -> str:
        part = f"{self.linear.model} {self.linear.name}"
        return f"{part:<29} M={self.m:<5} {self.home:<4} {self.sms:>3} SMs"


def label(dataflow: DataflowName, tiles: Tiles, n: int) -> str:
    """`direct (bx 256, cluster 2)`; a prefetch in one panel is said to be one."""
    if dataflow == "prefetch" and tiles.panel_rows >= n:
        return "prefetch (whole)"
    return describe(dataflow, tiles)


def table_cases(homes: Iterable[LinkHome], sms: int, *, quick: bool = False) -> list[Case]:
    """Large weights last: what is cut when time runs short is their repetitions."""
    homes = list(homes)
    linears = sorted(LINEARS, key=lambda linear: linear.bytes)
    if quick:
        linears = [one for one in linears if one.model != "Llama-3-70B"]
    rows = ROWS_QUICK if quick else ROWS
    return [Case(linear, m, home, sms) for linear in linears for m in rows for home in homes]


def slice_cases(homes: Iterable[LinkHome], sms: int, *, quick: bool = False) -> list[Case]:
    """What is asked of a slice of a GPU, alone on the link."""
    linears = [linear for linear in LINEARS if linear.model == "Llama-3-8B"]
    rows = (1, 512) if quick else (1, 64, 512, 2048)
    return [Case(linear, m, home, sms) for linear in linears for m in rows for home in homes]


def worth_timing(
    estimates: list[Estimate], pick: tuple[DataflowName, Tiles], *, published: bool = False
) -> list[Estimate]:
    """What could matter, in the order of what it tells: the pick, each other dataflow at its best
    if that is believed to take less than 3 times as long, then whatever is within 1.6 times."""
    first = next(one for one in estimates if (one.dataflow, one.tiles) == pick)
    bests, rest = [first], list[Estimate]()
    seen = {first.dataflow}
    for one in estimates:
        if one is first or (one.dataflow in PUBLISHED and not published):
            continue
        slower = one.predicted_s / first.predicted_s
        if one.dataflow not in seen and (slower <= 3.0 or one.dataflow in PUBLISHED):
            bests.append(one)
        elif one.dataflow in seen and slower <= 1.6:
            rest.append(one)
        seen.add(one.dataflow)
    return bests + rest


def chain_length(expected_s: float, dataflow: DataflowName) -> int:
    """GEMMs in a row. All of them where one overlaps with the next; the paper's dataflows do not,
    and some take a second."""
    if dataflow not in PUBLISHED:
        return CHAIN
    return max(2, min(CHAIN, math.floor(0.06 / expected_s)))


class Budget:
    """Shares what time is left among the cases that are left. What a case must have (its floor and
    its pick) it gets in any case; the budget ends the list of other candidates."""

    def __init__(self, seconds: float, weights: Iterable[float], now_s: float) -> None:
        self._left = list(weights)
        self._end_s = now_s + seconds

    def next_until_s(self, now_s: float) -> float:
        """Until when the next case may go on."""
        weight, total = self._left[0], sum(self._left)
        del self._left[0]
        return now_s + max(0.0, self._end_s - now_s) * weight / total


def weight_of_case(case: Case) -> float:
    """How long a case will take, roughly: its setup, and its bytes and flops over and over."""
    flops = 2.0 * case.m * case.linear.n * case.linear.k * max(1, case.linear.top_k)
    speed = {"host": 50e9, "peer": 350e9}[case.home]
    return 0.1 + 40 * max(case.linear.bytes / speed, flops / 6e14)


def alphas(quick: bool) -> Iterator[float]:
    """Of `hybrid`, from all weight-stationary to all output-stationary."""
    yield from (0.25, 0.5, 0.75) if quick else (0.03125, 0.0625, 0.125, 0.25, 0.5, 0.75)
