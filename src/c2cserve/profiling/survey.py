"""What `c2cserve profile` measures of a machine, in what order, and where it stops.

First come the rates of links, memory and cuBLAS. Then come dataflows, part by part, the most useful
parts first. Each part is planned with what was measured before: candidates that the corrected model
finds slow are left out. When the time is up, the rest is cut, and the profile says so. The `Bench`
does the measuring; nothing here uses a GPU.
"""

import datetime
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Protocol, TypeVar

import msgspec

from c2cserve.core.tensors import Home, LinkHome
from c2cserve.kernels.gpu.gemm.choice.choose import Chooser, Estimate, describe
from c2cserve.kernels.gpu.gemm.choice.cost import Question
from c2cserve.kernels.gpu.gemm.choice.profile import (
    HbmRate,
    LinkRates,
    MachineFacts,
    MatmulRate,
    Point,
    Profile,
    ReadRate,
)
from c2cserve.kernels.gpu.gemm.dataflows.table import PUBLISHED, DataflowName
from c2cserve.kernels.gpu.gemm.traffic import BW, Tiles

SLICE_SMS, SLICES = 16, 7
"""The smallest slices, and how many of them a GPU is cut into (by MIG, too)."""
LARGE_SLICE_SMS = 64

Linear = tuple[int, int]
"""n and k: W [n, k]."""
Experts = tuple[int, int, int, int]
"""n, k, experts, top_k."""

READ_CTAS = (1, 2, 4, 8, 16, 32, 64)
"""Numbers of CTAs that read at once. All SMs are measured, too."""
_READ_K = 4096
_READ_BYTES = 64 << 20
_READ_CHAIN = 4
_READ_M = 16
MATMUL_ROWS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 10240)
MATMUL: Linear = (16384, 4096)
_FLOPS_PER_S = 700e12
_HBM_BYTES_PER_S = 4e12
"""The rates of the largest GPUs, to estimate the time of a GEMM before any was run."""

ROWS = (1, 16, 64, 256, 1024, 4096)
ROWS_BETWEEN = (4, 128, 512, 2048, 10240)
ROWS_DECODED = (1, 16, 32, 64)
ROWS_SOME = (16, 512, 2048)
LINEARS: tuple[Linear, ...] = ((4096, 4096), (28672, 4096))
"""A small and a large linear of an 8B model (Llama-3)."""
LINEARS_MORE: tuple[Linear, ...] = (
    (4096, 14336), (10240, 8192), (2048, 2048), (6144, 4096), (8192, 28672), (57344, 8192),
)  # fmt: skip
"""The other linears of that model, those of a 70B model, and of a small one."""
EXPERTS: tuple[Experts, ...] = ((1536, 2048, 128, 8), (2048, 768, 128, 8))
"""The experts of a 30B mixture (Qwen3)."""

_CHAIN_S = 0.025
_CHAIN_MIN, _CHAIN_MAX = 4, 16
_SETUP_S = 0.05
"""Time around a measurement: launching, graph capture, and runs that are too short to be one."""
_RUNS = 5
"""The runs of a chain: one to warm up, one unmeasured, and three that count."""
_COST_MAX_S = 1.5
"""A measurement that takes longer is not worth its time."""


T = TypeVar("T")


class Refused(Exception):
    """This machine cannot run this measurement. The message says why."""


class Failed(Refused):
    """The measurement broke its process, which was replaced. The next one may be asked for."""


class Lost(Exception):
    """Nothing can be measured any more. The message says why."""


class Bench(Protocol):
    """A machine to measure. Every measurement may raise `Refused` or `Lost`."""

    @property
    def facts(self) -> MachineFacts: ...

    @property
    def homes(self) -> Sequence[LinkHome]:
        """The homes of weights besides the GPU's own memory."""
        ...

    @property
    def sms(self) -> Sequence[int]:
        """SMs of the whole GPU, then of the slices it can be cut into, the largest first."""
        ...

    @property
    def slices(self) -> int:
        """The number of the smallest slices that exist at once."""
        ...

    @property
    def notes(self) -> Sequence[str]:
        """What it cannot measure, and why."""
        ...

    def copies(self, home: LinkHome) -> tuple[float, float, float]:
        """Return the copy engines' bytes/s: to the GPU, from it, and the sum of both at once."""
        ...

    def write_bytes_per_s(self, sms: int) -> float:
        """Return the rate at which so many SMs write HBM."""
        ...

    def seconds(
        self, question: Question, dataflow: DataflowName, tiles: Tiles, chain: int
    ) -> float:
        """Return the seconds of one GEMM in a chain of `chain`.

        It runs on as many SMs as the question says, while as many other slices as it says read
        from the same home.
        """
        ...


@dataclass(frozen=True, slots=True)
class Part:
    """Questions that belong together, and which candidates are measured for them."""

    name: str
    sms: int
    rows: Sequence[int]
    linears: Sequence[Linear] = ()
    experts: Sequence[Experts] = ()
    neighbours: int = 0
    within: float = 1.5
    """Candidates are left out if they are predicted to take longer than this times the best."""
    tiles_each: int = 2
    """The best tiles of a dataflow that are measured. Where the link binds, tiles differ little."""
    published: bool = False
    """Only the published dataflows, or only all others."""
    by_map: bool = False
    """Measure weights in HBM, by kernels that graphs can replay with other weights."""


@dataclass(frozen=True, slots=True)
class Task:
    """One measurement to come."""

    question: Question
    dataflow: DataflowName
    tiles: Tiles
    expected_s: float
    """Seconds of one GEMM."""

    @property
    def chain(self) -> int:
        return chain_length(self.expected_s, self.dataflow)

    @property
    def cost_s(self) -> float:
        """The seconds that it takes to measure it. With neighbours, they must start first."""
        runs = 2 * _RUNS if self.question.neighbours else _RUNS
        return _SETUP_S + runs * self.chain * self.expected_s


def chain_length(expected_s: float, dataflow: DataflowName) -> int:
    """Return the number of GEMMs in a chain. They are enough to make the first and the last, which
    do not overlap, negligible. The published dataflows never overlap."""
    least = 2 if dataflow in PUBLISHED else _CHAIN_MIN
    return max(least, min(_CHAIN_MAX, round(_CHAIN_S / expected_s)))


def survey(
    bench: Bench,
    *,
    commit: str,
    until_s: float,
    clock: Callable[[], float],
    tell: Callable[[str], None] = lambda _: None,
) -> Profile:
    """Measure until `until_s` by the clock. `tell` is called with what is measured next.

    The rates are always measured, in a few seconds. A measurement that fails is left out, and
    `Profile.cut` says so. If the bench is `Lost`, the profile has what was measured before. Raises
    `Refused`, or `Lost`, if there is no rate of any link, of HBM, or of cuBLAS.
    """
    cut = list(bench.notes)
    profile = _rates(bench, commit, cut, tell)
    points: list[Point] = []
    for part in parts(bench):
        tasks, left = plan(part, tuple(profile.links), Chooser(profile)), 0
        for number, task in enumerate(tasks, 1):
            if task.cost_s > _COST_MAX_S or clock() + task.cost_s > until_s:
                left += 1
                continue
            tell(f"{part.name}: {number} of {len(tasks)}")
            try:
                points.append(_measured(bench, task))
            except Refused as error:
                cut.append(f"{_named(task, error)}: {error}")
            except Lost as error:
                cut.append(f"{_named(task, error)}, and all after it: {error}")
                return _with(profile, points, cut)
        if left:
            cut.append(f"{part.name}: {left} of {len(tasks)} measurements, for lack of time")
        profile = _with(profile, points, cut)
    return profile


def _with(profile: Profile, points: Sequence[Point], cut: Sequence[str]) -> Profile:
    return msgspec.structs.replace(profile, points=tuple(points), cut=tuple(dict.fromkeys(cut)))


def _named(task: Task, error: Exception) -> str:
    """Return what was not measured. A refusal holds for all shapes, so it names the dataflow alone.
    A measurement that broke its process is named with its shape."""
    q = task.question
    what = describe(task.dataflow, task.tiles)
    if isinstance(error, Failed | Lost):
        experts = f", {q.top_k} of {q.experts} experts" if q.experts else ""
        beside = f" beside {q.neighbours} others" if q.neighbours else ""
        what = f"{what} of M {q.m}, N {q.n}, K {q.k}{experts}, W at {q.home}{beside}"
    return f"{what} on {q.sms} SMs"


def parts(bench: Bench) -> Iterator[Part]:
    """Yield the parts in order. The first ones have most candidates, as few points correct the
    model yet. Frequent questions of serving come before rare ones."""
    whole, smallest = bench.sms[0], bench.sms[-1]
    sliced, crowd = smallest < whole, bench.slices - 1
    yield Part("whole GPU", whole, ROWS, LINEARS, within=3.0, tiles_each=99)
    linears = (*LINEARS, *LINEARS_MORE)
    yield Part("weights in HBM", whole, ROWS_DECODED, linears, tiles_each=99, by_map=True)
    yield Part("published dataflows", whole, ROWS_SOME, LINEARS[:1], published=True)
    if sliced:
        yield Part("a slice", smallest, ROWS, LINEARS, within=2.0, tiles_each=3)
    if crowd > 0:
        name = f"a slice and {crowd} neighbours"
        yield Part(name, smallest, ROWS_SOME, LINEARS[:1], neighbours=crowd)
    yield Part("experts", whole, ROWS, experts=EXPERTS)
    yield Part("rows in between", whole, ROWS_BETWEEN, LINEARS)
    yield Part("more linears", whole, ROWS, LINEARS_MORE, within=1.3)
    for sms in bench.sms[1:-1]:
        yield Part(f"a slice of {sms} SMs", sms, ROWS, LINEARS)
    if crowd > 1:
        yield Part("a slice and a neighbour", smallest, ROWS_SOME, LINEARS[:1], neighbours=1)
    if sliced:
        yield Part("experts on a slice", smallest, ROWS, experts=EXPERTS)
        yield Part("more linears on a slice", smallest, ROWS, LINEARS_MORE, within=1.3)
    yield Part("more linears, rows in between", whole, ROWS_BETWEEN, LINEARS_MORE, within=1.3)


def plan(part: Part, homes: Sequence[LinkHome], chooser: Chooser) -> list[Task]:
    """Return the best candidate of every question, then the second best of each, and so on. So what
    is cut for lack of time matters least."""
    ranked: list[tuple[int, Task]] = []
    for question in _questions(part, homes):
        worth = _worth_measuring(part, chooser.estimates(question))
        ranked += [
            (rank, Task(question, one.dataflow, one.tiles, one.predicted_s))
            for rank, one in enumerate(worth)
        ]
    return [task for _, task in sorted(ranked, key=lambda pair: pair[0])]


def _questions(part: Part, homes: Sequence[LinkHome]) -> Iterator[Question]:
    shapes = [(n, k, 0, 0) for n, k in part.linears] + list(part.experts)
    where: Sequence[Home] = ("hbm",) if part.by_map else homes
    for (n, k, experts, top_k), m, home in product(shapes, part.rows, where):
        yield Question(
            m, n, k, "bfloat16", home, part.sms, experts, top_k, part.neighbours, part.by_map
        )  # fmt: skip


def _worth_measuring(part: Part, estimates: Sequence[Estimate]) -> list[Estimate]:
    """Return the fastest first, but every dataflow's best before any dataflow's second."""
    mine = [one for one in estimates if (one.dataflow in PUBLISHED) == part.published]
    before: Counter[DataflowName] = Counter()
    ranked: list[tuple[int, Estimate]] = []
    for one in mine:
        near = part.published or one.predicted_s <= part.within * mine[0].predicted_s
        if near and before[one.dataflow] < part.tiles_each:
            ranked.append((before[one.dataflow], one))
            before[one.dataflow] += 1
    return [one for _, one in sorted(ranked, key=lambda pair: pair[0])]


def _measured(bench: Bench, task: Task) -> Point:
    q = task.question
    return Point(
        task.dataflow, task.tiles, q.m, q.n, q.k, q.dtype, q.home, q.sms,
        bench.seconds(q, task.dataflow, task.tiles, task.chain), q.neighbours, q.experts, q.top_k,
    )  # fmt: skip


def _tried(what: str, cut: list[str], measure: Callable[[], T]) -> T | None:
    """Return the measurement. If it is refused, note that for the profile and return None."""
    try:
        return measure()
    except Refused as error:
        cut.append(f"{what}: {error}")
        return None


def _there(rates: Iterable[T | None]) -> tuple[T, ...]:
    return tuple(rate for rate in rates if rate is not None)


def _rates(bench: Bench, commit: str, cut: list[str], tell: Callable[[str], None]) -> Profile:
    """Measure the rates. Raises `Refused` if there is none of any link, of HBM, or of cuBLAS."""
    links: dict[LinkHome, LinkRates] = {}
    for home in bench.homes:
        tell(f"link to {home}")
        link = _link_rates(bench, home, cut)
        if link is not None:
            links[home] = link
    tell("HBM")
    hbm = _there(
        _tried(f"HBM by {sms} SMs", cut, partial(_hbm_rate, bench, sms)) for sms in bench.sms
    )
    matmul_flops: list[MatmulRate] = []
    for sms in bench.sms:
        tell(f"cuBLAS on {sms} SMs")
        matmul_flops += _there(
            _tried(f"cuBLAS, M {m}, on {sms} SMs", cut, partial(_matmul_rate, bench, m, sms))
            for m in MATMUL_ROWS
        )
    if not (links and hbm and matmul_flops):
        raise Refused(cut[-1])
    return Profile(
        machine=bench.facts,
        date=datetime.datetime.now(datetime.UTC),
        commit=commit,
        links=links,
        hbm=hbm,
        matmul_flops=tuple(matmul_flops),
    )


def _link_rates(bench: Bench, home: LinkHome, cut: list[str]) -> LinkRates | None:
    copies = _tried(f"copies to and from {home}", cut, lambda: bench.copies(home))
    if copies is None:
        return None
    whole, smallest = bench.sms[0], bench.sms[-1]

    def rate(ctas: int, slices: int) -> ReadRate:
        return ReadRate(ctas, slices, _read_bytes_per_s(bench, home, ctas, slices - 1))

    alone = _there(
        _tried(f"{ctas} CTAs that read from {home}", cut, partial(rate, ctas, 1))
        for ctas in [ctas for ctas in READ_CTAS if ctas < whole] + [whole]
    )
    if not alone:
        return None
    shared = _there(
        _tried(
            f"{slices} slices that read from {home} at once", cut, partial(rate, smallest, slices)
        )
        for slices in range(2, bench.slices + 1)
    )
    return LinkRates(*copies, (*alone, *shared))


def _hbm_rate(bench: Bench, sms: int) -> HbmRate:
    return HbmRate(sms, _read_bytes_per_s(bench, "hbm", sms), bench.write_bytes_per_s(sms))


def _matmul_rate(bench: Bench, m: int, sms: int) -> MatmulRate:
    return MatmulRate(m, sms, _flops_per_s(bench, m, sms))


def _read_bytes_per_s(bench: Bench, home: Home, ctas: int, neighbours: int = 0) -> float:
    """Measure with a GEMM of few rows, which mostly reads W. Each CTA has as many tiles."""
    tiles_each = max(1, round(_READ_BYTES / (ctas * BW * _READ_K * 2)))
    n = ctas * BW * tiles_each
    question = Question(_READ_M, n, _READ_K, "bfloat16", home, ctas, neighbours=neighbours)
    seconds = bench.seconds(question, "direct", Tiles(bx=_READ_M), _READ_CHAIN)
    return n * _READ_K * 2 / seconds


def _flops_per_s(bench: Bench, m: int, sms: int) -> float:
    n, k = MATMUL
    question = Question(m, n, k, "bfloat16", "hbm", sms)
    share = sms / bench.sms[0]
    guess_s = max(2.0 * m * n * k / (share * _FLOPS_PER_S), 2.0 * n * k / _HBM_BYTES_PER_S)
    seconds = bench.seconds(question, "resident", Tiles(), chain_length(guess_s, "resident"))
    return 2.0 * m * n * k / seconds
