"""SLINFER figures 22, 23 and 32: its testbed, its traces, its baselines.

A request is served in time as in that paper's analysis (section IX-A), for every system:

- it finished
- its first token came within min(max(0.5, prompt / 512), 8) s, plus the time its instance loaded
- its mean time per token was at most 0.25 s
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from c2cserve.core.request import Slo
from c2cserve.policy.baselines.presets import GPU_ONLY, PRESETS, SLINFER, Preset
from c2cserve.policy.cluster.admission import AdmissionSettings
from c2cserve.sim.report import report
from c2cserve.sim.run import slo_rule
from c2cserve.sim.studies.figure import Figure
from c2cserve.sim.studies.registry import Finding, StudyOptions, StudyResult
from c2cserve.sim.workload.build import WorkloadSettings, workload
from c2cserve.sim.world.hardware import SimMachine, SliceSettings, build
from c2cserve.sim.world.requests import TrackedRequest
from c2cserve.sim.world.shapes import catalogue
from c2cserve.sim.world.simulation import Settings, Simulation

HARDWARE = "a100x4+xeon6462cx4"
SIZES = {"3B": "llama-3.2-3b", "7B": "llama-2-7b", "13B": "llama-2-13b"}
COUNTS = (32, 64, 128)
SYSTEMS = ("serverlessllm", "sllm+c", "sllm+c+s", "slinfer", "c2cserve")
_OURS = "c2cserve"
_AIM = 0.95
"""Policies aim at this share of the targets that requests are judged by, as the paper's code."""
_QUICK_S = 300.0
"""Seconds of the trace with `--quick`, from an empty machine: two minutes instead of half an hour.
It compares 128 models of 7B, ablates with 64, and scales over one and four nodes of each kind."""
_ABLATIONS = {
    "full": SLINFER,
    "no CPU": replace(SLINFER, kinds=GPU_ONLY),
    "no sharing": replace(SLINFER, share=False),
    "no consolidation": replace(SLINFER, consolidate=False),
}
_PUBLISHED_ABLATION = {"full": "2.5, 99 %", "no sharing": "89 % in time"}
_GAINS = {"serverlessllm": "+86 % to +154 %", "sllm+c": "+47 % to +62 %",
          "sllm+c+s": "+18 % to +70 %"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Outcome:
    requests: int
    met: int
    cpus: float
    """CPU nodes that had instances, mean over time; likewise GPUs."""
    gpus: float
    ttft_s: Sequence[float]
    """Times of all requests that got a first token, sorted."""

    @property
    def share(self) -> float:
        return self.met / max(1, self.requests)


def judged_by(prompt: int) -> Slo:
    """Return the targets that requests are judged by."""
    return replace(slo_rule("slinfer")(prompt), excuses_loads=True)


def target(prompt: int) -> Slo:
    """Return the targets that policies see."""
    slo = judged_by(prompt)
    return replace(slo, ttft_s=_AIM * slo.ttft_s, tpot_s=_AIM * slo.tpot_s)


def met(tracked: TrackedRequest) -> bool:
    slo = judged_by(tracked.request.prompt_len)
    in_time = tracked.sampled > 0 and tracked.ttft_s <= slo.ttft_s + tracked.grace_s
    return tracked.ending == "finished" and in_time and tracked.tpot_s <= slo.tpot_s


def run(
    preset: Preset,
    size: str,
    models: int,
    seed: int = 0,
    duration_s: float = float("inf"),
    nodes: int = 4,
) -> Outcome:
    """`duration_s`: how much of the trace; `nodes`: CPUs, and as many GPUs."""
    # 13B models have a CPU to themselves: half of one is too slow for them.
    whole_cpus = preset.parts > 1 and size == "13B"
    # Weights and KV share all memory: nothing streams over these links, so there is no cache.
    slices = SliceSettings(max_batch=256, max_step_tokens=4096, max_active=32, kv_share=1.0)
    machine = _first(build(HARDWARE, slices, preset), nodes, whole_cpus)
    names = catalogue(f"{SIZES[size]}*{models}")
    trace = WorkloadSettings(f"slinfer{models}", seed=seed, duration_s=duration_s)
    admission = AdmissionSettings(max_waiting=1_000_000, patience=1.0, foresee=False)
    settings = Settings(preset=preset, admission=admission, seed=seed, noise=0.05)
    simulation = Simulation(machine, names, workload(trace, names), target, settings)
    simulation.run()
    requests = simulation.requests.ended
    held = report(simulation).nodes_held
    parts = preset.parts
    return Outcome(
        requests=len(requests),
        met=sum(map(met, requests)),
        cpus=held.get("cpu", 0.0) / (1 if whole_cpus else parts),
        gpus=held.get("gpu", 0.0) / parts,
        ttft_s=sorted(tracked.ttft_s for tracked in requests if tracked.sampled),
    )


def _first(machine: SimMachine, nodes: int, whole_cpus: bool) -> SimMachine:
    """Return the first `nodes` of each kind. With `whole_cpus` a CPU is one slice."""
    chosen = [simulated for simulated in machine.slices if int(simulated.node[3:]) < nodes]
    if whole_cpus:
        chosen = [one for one in chosen if one.slice.kind != "cpu" or one.slice.id.endswith(".0")]
    return replace(machine, slices=tuple(chosen))


def study(options: StudyOptions) -> StudyResult:
    """Raises OSError, ValueError."""
    sizes = ["7B"] if options.quick else list(SIZES)
    counts = COUNTS[-1:] if options.quick else COUNTS
    on = partial(run, seed=options.seed, duration_s=_QUICK_S if options.quick else float("inf"))
    served = {
        (size, count, system): on(PRESETS[system], size, count)
        for size in sizes for count in counts for system in SYSTEMS
    }  # fmt: skip
    ablation = {name: on(preset, "7B", 64) for name, preset in _ABLATIONS.items()}
    scaled: dict[str, dict[int, Outcome]] = {}
    for system in ("sllm+c+s", "slinfer", _OURS):
        at = partial(on, PRESETS[system], "7B", counts[-1])
        scaled[system] = {n: at(nodes=n) for n in ((1, 4) if options.quick else (1, 2, 3, 4))}
    findings = [
        *_gains(served, sizes, counts[-1]),
        *(
            Finding(f"64 7B models, SLINFER {name}: GPUs used, served in time",
                    f"{one.gpus:.1f}, {one.share:.0%}", _PUBLISHED_ABLATION.get(name, ""))
            for name, one in ablation.items()
        ),
    ]  # fmt: skip
    return StudyResult(
        "SLINFER figures 22, 23 and 32", findings,
        [*_figures(served, sizes, counts), _ablation(ablation), _scaling(scaled)],
        {f"{size} x{n} {system}": _plain(one) for (size, n, system), one in served.items()},
    )  # fmt: skip


Served = Mapping[tuple[str, int, str], Outcome]


def _gains(served: Served, sizes: Iterable[str], models: int) -> Iterable[Finding]:
    for size in sizes:
        slinfer = served[size, models, "slinfer"]
        yield Finding(
            f"{models} {size} models: SLINFER serves in time", f"{slinfer.share:.1%}",
            "86 %" if (size, models) == ("7B", 128) else "",
        )  # fmt: skip
        for rival, published in _GAINS.items():
            gain = slinfer.met / max(1, served[size, models, rival].met) - 1
            yield Finding(
                f"{models} {size} models: SLINFER over {rival}", f"{gain:+.0%}", published
            )
        ours = served[size, models, _OURS].met
        for rival in ("slinfer", "serverlessllm"):
            factor = ours / max(1, served[size, models, rival].met)
            yield Finding(f"{models} {size} models: c2cserve over {rival}", f"{factor:.2f} x")


def _plain(one: Outcome) -> dict[str, float]:
    return {"requests": one.requests, "met": one.met, "cpus": one.cpus, "gpus": one.gpus}


def _figures(served: Served, sizes: Iterable[str], counts: Sequence[int]) -> Iterable[Figure]:
    for size in sizes:
        name = size.lower()
        yield Figure(
            f"slinfer_fig22_{name}_met", f"{size} models: requests served in time", "models",
            "requests",
            {s: [(str(n), float(served[size, n, s].met)) for n in counts] for s in SYSTEMS},
            kind="bars",
        )  # fmt: skip
        yield Figure(
            f"slinfer_fig22_{name}_nodes", f"{size} models: nodes used", "models", "nodes",
            {
                s: [(str(n), served[size, n, s].cpus + served[size, n, s].gpus) for n in counts]
                for s in SYSTEMS
            },
            kind="bars",
        )  # fmt: skip
        yield Figure(
            f"slinfer_fig22_{name}_ttft", f"{counts[-1]} {size} models: time to first token",
            "seconds", "share of requests",
            {s: _cdf(served[size, counts[-1], s]) for s in SYSTEMS},
        )  # fmt: skip


def _cdf(one: Outcome) -> list[tuple[float | str, float]]:
    """Return about a hundred points up to 8 s. Refused requests never get a first token."""
    shown = [ttft_s for ttft_s in one.ttft_s if ttft_s <= 8.0]
    every = max(1, len(shown) // 100)
    return [(shown[i], (i + 1) / one.requests) for i in range(0, len(shown), every)]


def _ablation(ablation: Mapping[str, Outcome]) -> Figure:
    return Figure(
        "slinfer_fig23", "SLINFER without one of its parts, 64 7B models", "", "GPUs used",
        {"slinfer": [(name, one.gpus) for name, one in ablation.items()]}, kind="bars",
    )  # fmt: skip


def _scaling(scaled: Mapping[str, Mapping[int, Outcome]]) -> Figure:
    return Figure(
        "slinfer_fig32", "128 7B models on more and more nodes", "CPUs and GPUs each",
        "requests served in time",
        {system: [(n, float(one.met)) for n, one in by.items()] for system, by in scaled.items()},
    )  # fmt: skip
