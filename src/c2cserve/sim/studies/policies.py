"""A small figure for each policy: the same load with the rule and without it, or over its setting.

Loads are synthetic and chosen so that the rule has something to decide; what it is worth elsewhere
the other studies say. Prompts of 300 and answers of 150 tokens on average unless said otherwise.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from c2cserve.policy.baselines.presets import C2CSERVE, FCFS, SLINFER, SUPERINFER, Preset
from c2cserve.policy.cluster.admission import AdmissionSettings
from c2cserve.sim.report import Report, report
from c2cserve.sim.run import slo_rule
from c2cserve.sim.studies.figure import Figure
from c2cserve.sim.studies.registry import Finding, StudyOptions, StudyResult
from c2cserve.sim.workload.build import WorkloadSettings, workload
from c2cserve.sim.world.hardware import SimMachine, SliceSettings, build
from c2cserve.sim.world.shapes import catalogue, interleaved
from c2cserve.sim.world.simulation import Settings, Simulation


@dataclass(frozen=True, slots=True)
class _Run:
    preset: Preset = C2CSERVE
    hardware: str = "gh200:mig3"
    models: str = "llama-3.2-3b*8"
    rate: float = 6.0
    seconds: float = 120.0
    prompt: int = 300
    output: int = 150
    cv: float = 1.0
    slo: str = "1,0.1"
    patience: float = 20.0
    slices: SliceSettings = SliceSettings()
    change: Callable[[SimMachine], SimMachine] = field(default=lambda machine: machine)


def _simulate(run: _Run, seed: int) -> Report:
    models = interleaved(catalogue(run.models))
    trace = (
        f"synthetic:rate={run.rate},duration={run.seconds},sources={len(models)},cv={run.cv},"
        f"prompt={run.prompt},output={run.output}"
    )
    requests = workload(WorkloadSettings(trace, seed=seed), models)
    machine = run.change(build(run.hardware, run.slices, run.preset))
    admission = AdmissionSettings(max_waiting=10**6, patience=run.patience)
    settings = Settings(run.preset, admission, seed, 0.05)
    simulation = Simulation(machine, models, requests, slo_rule(run.slo), settings)
    simulation.run()
    return report(simulation)


@dataclass(frozen=True, slots=True)
class _Case:
    """`curves`: by name, what is run at each x."""

    policy: str
    title: str
    x: str
    y: str
    xs: Sequence[float]
    curves: Mapping[str, Callable[[float], _Run]]
    value: Callable[[Report], float]


def _met(result: Report) -> float:
    return 100 * result.slo_attainment


def _p99_ms(result: Report) -> float:
    return 1e3 * result.tpot.p99


def _preset(**fields: object) -> Preset:
    return replace(C2CSERVE, **fields)  # pyright: ignore[reportArgumentType]


def _pool(share: float) -> Callable[[SimMachine], SimMachine]:
    """Host memory for a share of 24 models of 3B."""

    def change(machine: SimMachine) -> SimMachine:
        pool_bytes = int(share * 24 * 6.45e9)
        return replace(machine, hardware=replace(machine.hardware, pool_bytes=pool_bytes))

    return change


def _link(share: float) -> Callable[[SimMachine], SimMachine]:
    """Links of so many times the speed."""

    def change(machine: SimMachine) -> SimMachine:
        slices = tuple(
            replace(
                simulated,
                slice=replace(
                    simulated.slice, link_bytes_per_s=share * simulated.slice.link_bytes_per_s
                ),
                load_bytes_per_s=share * simulated.load_bytes_per_s,
            )
            for simulated in machine.slices
        )
        links = tuple((name, share * rate) for name, rate in machine.links)
        return replace(machine, slices=slices, links=links)

    return change


_LONG = _Run(models="llama-3.2-3b*12", prompt=2000, output=100, slo="2,0.05", seconds=60.0)
_MANY = _Run(models="llama-3.2-3b*24", seconds=60.0)
_FEW = _Run(models="llama-3.2-3b*12", rate=3.0, seconds=60.0)
_TESTBED = _Run(
    SLINFER, "a100x4+xeon6462cx4", "llama-2-7b*64", seconds=60.0, slo="slinfer", patience=1.0
)
_ONE = _Run(
    FCFS, "gh200-144", "qwen2.5-32b", seconds=20.0, prompt=220, output=500, slo="5,0.1",
    patience=0.0, slices=SliceSettings(kv_share=0.05, max_batch=512),
)  # fmt: skip
_PAUSING = replace(_ONE.slices, host_kv_bytes=400_000_000_000)
_RATE = "requests per second"
_STREAMS = _preset(keeps=False)

_CASES = (
    _Case(
        "headroom", "Whose turn it is", _RATE, "% in time", (8.0, 12.0, 16.0, 20.0),
        {
            "least headroom": lambda x: replace(_FEW, prompt=1500, rate=x),
            "first come": lambda x: replace(
                _FEW, prompt=1500, preset=_preset(turn="arrival"), rate=x
            ),
        },
        _met,
    ),
    _Case(
        "placement", "Which slice takes a request", _RATE, "% in time", (4.0, 8.0, 16.0, 24.0),
        {
            "c2cserve": lambda x: replace(_MANY, rate=x),
            "any free slice": lambda x: replace(_MANY, preset=_preset(placing="scatter"), rate=x),
        },
        _met,
    ),
    _Case(
        "keeping", "Weights: kept while they are used, or streamed", _RATE, "% in time",
        (2.0, 4.0, 8.0, 16.0),
        {
            "kept, or swapped": lambda x: replace(_MANY, rate=x),
            "streamed": lambda x: replace(_MANY, preset=_STREAMS, rate=x),
        },
        _met,
    ),
    _Case(
        "link_budget", "Speed of the link", "times the link's speed", "% in time",
        (0.25, 0.5, 1.0, 2.0),
        {
            "kept, or swapped": lambda x: replace(_FEW, change=_link(x)),
            "streamed, within its budget": lambda x: replace(
                _FEW, preset=_STREAMS, change=_link(x)
            ),
        },
        _met,
    ),
    _Case(
        "residency", "HBM that is left for weights that stream", "share of HBM", "% in time",
        (0.0, 0.1, 0.2, 0.35, 0.5),
        {
            "streamed": lambda x: replace(
                _FEW, preset=_STREAMS, slices=SliceSettings(kv_share=1.0 - x)
            )
        },
        _met,
    ),
    _Case(
        "admission", "Refusing what would be late", _RATE, "% in time", (12.0, 16.0, 20.0, 24.0),
        {
            "patience 1": lambda x: replace(_FEW, prompt=1000, patience=1.0, rate=x),
            "20 (default)": lambda x: replace(_FEW, prompt=1000, patience=20.0, rate=x),
            "0: never": lambda x: replace(_FEW, prompt=1000, patience=0.0, rate=x),
        },
        _met,
    ),
    _Case(
        "pool", "Host memory that does not hold all models", "share of the models", "% in time",
        (0.5, 0.7, 0.85, 1.0),
        {"3 requests per second": lambda x: replace(_MANY, rate=3.0, change=_pool(x))},
        _met,
    ),
    _Case(
        "chunking", "Sizes of prompts' chunks", _RATE, "time per token, p99, ms", (2.0, 4.0, 6.0),
        {
            "by headroom": lambda x: replace(_LONG, rate=x),
            "as large as may be": lambda x: replace(_LONG, preset=_preset(chunks="fixed"), rate=x),
            "smallest that is in time": lambda x: replace(
                _LONG, preset=_preset(chunks="smallest"), rate=x
            ),
        },
        _p99_ms,
    ),
    _Case(
        "rotation", "KV that makes room", _RATE, "first tokens in time, %", (4.0, 8.0, 12.0),
        {
            "rotation": lambda x: replace(_ONE, preset=SUPERINFER, rate=x, slices=_PAUSING),
            "first come": lambda x: replace(_ONE, rate=x),
        },
        lambda result: 100 * result.ttft_attainment,
    ),
    _Case(
        "consolidation", "SLINFER: largest batches first", _RATE, "GPUs held", (1.0, 2.0, 4.0),
        {
            "consolidation": lambda x: replace(_TESTBED, rate=x),
            "without": lambda x: replace(
                _TESTBED, preset=replace(SLINFER, consolidate=False), rate=x
            ),
        },
        lambda result: result.nodes_held.get("gpu", 0.0),
    ),
    _Case(
        "memory", "SLINFER: KV memory beyond what is required", "watermark", "% in time",
        (0.0, 0.1, 0.25, 0.5, 1.0),
        {
            "5 requests per second": lambda x: replace(
                _TESTBED, preset=replace(SLINFER, watermark=x), rate=5.0
            )
        },
        _met,
    ),
)  # fmt: skip


def study(options: StudyOptions) -> StudyResult:
    """Some minutes; `quick` takes seconds."""
    figures: list[Figure] = []
    findings: list[Finding] = []
    for case in _CASES:
        series: dict[str, list[tuple[float | str, float]]] = {}
        for name, run_at in case.curves.items():
            for x in case.xs[-1:] if options.quick else case.xs:
                run = run_at(x)
                run = replace(run, seconds=5.0) if options.quick else run
                value = case.value(_simulate(run, options.seed))
                series.setdefault(name, []).append((x, round(value, 2)))
        name = f"policy_{case.policy}"
        figures.append(Figure(name, case.title, case.x, case.y, series, small=True))
        ours = "; ".join(f"{one}: {points[-1][1]:g}" for one, points in series.items())
        findings.append(Finding(f"{case.policy}, {case.y} at {case.xs[-1]} {case.x}", ours))
    return StudyResult("What each policy does", findings, figures)
