"""One simulation from plain settings, for the command line and the studies."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from c2cserve.core.request import Slo
from c2cserve.policy.baselines.compose import admission_of
from c2cserve.policy.baselines.presets import PRESETS, Preset
from c2cserve.policy.cluster.admission import AdmissionSettings
from c2cserve.sim.recording import Recorders, RecordFile, no_recorders
from c2cserve.sim.report import Report, report
from c2cserve.sim.workload.build import WorkloadSettings, workload
from c2cserve.sim.world.faults import Fault
from c2cserve.sim.world.hardware import SimMachine, SliceSettings, build
from c2cserve.sim.world.requests import SimRequest, SloRule
from c2cserve.sim.world.shapes import SimModel, catalogue, interleaved
from c2cserve.sim.world.simulation import Settings, Simulation


@dataclass(frozen=True, slots=True)
class Scenario:
    """Everything a run depends on; two runs of equal scenarios are equal."""

    hardware: str
    catalog: str
    workload: WorkloadSettings
    slo: str = "catalog"
    """`TTFT,TPOT` in seconds; `slinfer` (`slo_rule`); `catalog`: each model's own."""
    policy: str = "c2cserve"
    slices: SliceSettings = SliceSettings()
    patience: float = 20.0
    seed: int = 0
    noise: float = 0.05
    cold_pool: bool = False
    hybrid: bool = False
    lookahead: int = 64
    as_live: bool = False
    """`sim.world.simulation.Settings.as_live`."""
    faults: tuple[Fault, ...] = field(default=())


def slo_rule(text: str) -> SloRule:
    """Parse `TTFT,TPOT` in seconds for all requests, or `slinfer` (SLINFER section IX-A):

        TTFT = min(max(0.5, prompt / 512), 8), TPOT = 0.25

    Raises ValueError."""
    if text == "slinfer":
        return lambda prompt: Slo(min(max(0.5, prompt / 512), 8.0), 0.25)
    try:
        ttft_s, tpot_s = (float(part) for part in text.split(","))
    except ValueError as error:
        raise ValueError(
            f"the SLO {text!r} is not TTFT,TPOT in seconds, slinfer or catalog"
        ) from error
    if ttft_s <= 0 or tpot_s <= 0:
        raise ValueError(f"targets must be greater than 0: {text}")
    slo = Slo(ttft_s, tpot_s)
    return lambda prompt: slo


def preset_of(scenario: Scenario) -> Preset:
    """Raises ValueError if there is no such policy."""
    if scenario.policy not in PRESETS:
        raise ValueError(f"no policy {scenario.policy!r}; there are: {', '.join(PRESETS)}")
    return PRESETS[scenario.policy]


def prepare(
    scenario: Scenario,
    models: Sequence[SimModel] | None = None,
    requests: Iterable[SimRequest] | None = None,
    machine: SimMachine | None = None,
    recorders: Recorders = no_recorders,
) -> Simulation:
    """Make a simulation that has not run yet.

    `models`, `requests` and `machine` replace what the scenario names. Raises ValueError (and its
    kinds), OSError."""
    preset = preset_of(scenario)
    if models is None:
        models = interleaved(catalogue(scenario.catalog))
    if requests is None:
        requests = workload(scenario.workload, models)
    settings = Settings(
        preset=preset,
        admission=_admission(scenario),
        seed=scenario.seed,
        noise=scenario.noise,
        cold_pool=scenario.cold_pool,
        faults=scenario.faults,
        hybrid=scenario.hybrid,
        lookahead=scenario.lookahead,
        as_live=scenario.as_live,
    )
    if machine is None:
        machine = build(scenario.hardware, scenario.slices, preset)
    if not preset.streams:
        _check_fit(machine, models, scenario)
    slo = None if scenario.slo == "catalog" else slo_rule(scenario.slo)
    return Simulation(machine, models, requests, slo, settings, recorders)


def _admission(scenario: Scenario) -> AdmissionSettings:
    return AdmissionSettings(max_waiting=1_000_000, patience=scenario.patience)


def _check_fit(machine: SimMachine, models: Sequence[SimModel], scenario: Scenario) -> None:
    least = min(simulated.slice.hbm_bytes for simulated in machine.slices)
    for model in models:
        if model.spec.weight_bytes > least:
            raise ValueError(
                f"{scenario.policy} has whole models in slices: {model.spec.id} does not fit into "
                f"{least / 1e9:.0f} GB on {scenario.hardware}"
            )


def simulate(
    scenario: Scenario, models: Sequence[SimModel] | None = None, record: Path | None = None
) -> Report:
    """Run a scenario. `models` replace those that it names. `record`: the file to record it in.

    Raises ValueError (and its kinds), OSError, and AssertionError if an invariant breaks."""
    as_server = scenario.as_live and not scenario.hybrid
    settings = admission_of(PRESETS[scenario.policy], _admission(scenario)) if as_server else None
    file = None if record is None else RecordFile(record, settings, scenario.policy)
    simulation = prepare(scenario, models, recorders=file or no_recorders)
    try:
        simulation.run()
    finally:
        if file is not None:
            file.close()
    return report(simulation)
