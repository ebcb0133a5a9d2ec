"""What the simulator's costs say of each phase, beside what was measured of it.

python benchmarks/cost_model.py [--hardware h200-x1] [--out FILE]

Nothing is run: the measured times are those of committed results (`benchmarks/results`), and of the
tables that were published with SLINFER. A row is one case of a phase. Its ratio is the simulator's
time over the measured one. Phases:

    decode     by model, batch and mean length: a live server's tokens, or the engine's steps.
               Of earlier servers those of 32 requests are a phase of their own, and prompts
    prefill    prompts long enough that the GPU is the bound, not the host that launches kernels.
               Each comes after a pause, so the GPU has its full clock
    in a row   the engine's steps with its host, from one to the next: at the GPU's power limit
    contexts   the engine's decodes by context, on a machine without a profile of its GEMMs
    load       weights of whole models, by a live server's counters
    switch     first token of a model that is absent, and tokens whose weights stream
    rotation   blocks of 2 MiB out of and into a GPU's memory, one way and both ways
    roofline   a GPU that we do not have: decode steps and prompts of published tables (A100)
    cpu        requests and steps of a CPU server, beside a profile that another load made
"""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kernel_times import PROFILE, predicted_s
from report import report

from c2cserve.core.step import SeqStep, Step
from c2cserve.kernels.gpu.gemm.choice.assumed import assumed_profile
from c2cserve.kernels.gpu.gemm.choice.choose import ROWS_STREAMED, Chooser
from c2cserve.kernels.gpu.gemm.choice.cost import Question
from c2cserve.kernels.gpu.gemm.choice.profile import load_profile
from c2cserve.sim.world.costs import Costs
from c2cserve.sim.world.hardware import SimMachine, SimulatedSlice, build
from c2cserve.sim.world.shapes import SimModel, catalogue
from c2cserve.sim.world.tables import StepTable, Tables, linear_bytes

RESULTS = Path(__file__).parent / "results"
_WAITED = ("weights_mix_h200_ninth.json", "weights_mix_h200_fourteenth.json")
"""Runs of earlier servers. Their tokens waited for KV that went out, where there was much of it."""
_EARLIER = ", earlier servers"
_MIXES = (*_WAITED, "weights_mix_h200_fifteenth.json")
"""Runs on different machines, each of which measured its step times."""
_LIVE = "live_decodes_h200.json"
_LOADS = (
    *_MIXES,
    "weights_mix_h200_eighth.json",
    "weights_mix_h200_fifth.json",
    "weights_mix_h200_sixth.json",
)
_SHAPES = {"llama-3b": "llama-3.2-3b", "llama-8b": "llama-3.1-8b"}
_LONG = 2048
"""Tokens of prompts that keep an H200 for longer than their launch takes."""
_CONTEXT = 600
"""Mean length of `step_launch.py`'s sequences."""
_STEPS, _STEPS_BY_CONTEXT = "step_launch_h200.json", "step_phases_h200.json"
_KNOWN = "known speeds"
"""By what GEMMs are picked without a profile."""
_IN_A_ROW = 12
"""Which one of the steps in a row is the median of those that the engine's benchmarks time."""
_ROTATED_KIB = 2048
_PAUSE_S = 1000.0
_FEW = 16
"""Decodes of a step whose time is that of its weights, for the most part."""
_A100 = "a100x4+xeon6462cx4"


@dataclass(frozen=True, slots=True)
class Row:
    phase: str
    case: str
    measured_s: float
    simulated_s: float
    file: str

    @property
    def ratio(self) -> float:
        return self.simulated_s / self.measured_s


class CostModel:
    """The costs of one slice of a machine."""

    def __init__(self, machine: SimMachine, slice_: SimulatedSlice, tables: Tables) -> None:
        self.links = dict(machine.links)
        self.slice = slice_
        self._costs = Costs(tables)
        self._idle_s = 0.0

    @classmethod
    def of(cls, hardware: str) -> "CostModel":
        machine = build(hardware)
        [slice_] = [one for one in machine.slices if one.h2d][:1]
        return cls(machine, slice_, machine.hardware.tables)

    def decode_s(self, model: SimModel, batch: int, length: float, steps: int = 1) -> float:
        """Return the seconds of the last one of so many steps in a row."""
        parts = [SeqStep(str(i), round(length), 1, (), False, True) for i in range(batch)]
        return self._step_s(model, parts, steps)

    def prefill_s(self, model: SimModel, tokens: int, steps: int = 1) -> float:
        return self._step_s(model, [SeqStep("0", 0, tokens, (), True, True)], steps)

    def streamed_s(self, model: SimModel, tokens: int, context: int = 0) -> float:
        """Return the seconds of a step whose weights all come over the link."""
        step = Step(0, model.spec.id, (SeqStep("0", context, tokens, (), not context, True),))
        cost = self._costs.step(step, model, self.slice, 0.0)
        return max(cost.floor_s, cost.link_bytes / self.slice.load_bytes_per_s)

    def _step_s(self, model: SimModel, parts: Sequence[SeqStep], steps: int) -> float:
        """The GPU was idle before the first of the steps."""
        step = Step(0, model.spec.id, tuple(parts))
        cost = self._costs.step(step, model, self.slice, 1.0)
        now = self._idle_s = self._idle_s + _PAUSE_S
        took_s = 0.0
        for _ in range(steps):
            took_s = self._costs.lasting_s(cost, self.slice, now)
            now += took_s
        return took_s


def model_of(name: str) -> SimModel:
    return catalogue(_SHAPES.get(name, name))[0]


def rows(hardware: str) -> Iterator[Row]:
    """Yield all rows: of the H200s by `hardware`, then of the A100 by its roofline."""
    ours = CostModel.of(hardware)
    for name in _MIXES:
        yield from _of_times(ours, name)
    yield from _of_decodes(ours, _LIVE)
    yield from _of_steps(ours, _STEPS)
    yield from by_context(ours, _STEPS_BY_CONTEXT)
    yield from _of_engine(ours)
    for name in _LOADS:
        yield from _of_loads(ours, name)
    yield from _of_rotation(ours, "transfers_small_h200.json")
    yield from _of_cpu("simulator_fidelity.json")
    yield from _of_published()


def _decode(batch: int) -> str:
    return f"decode, up to {_FEW}" if batch <= _FEW else "decode, 32 to 256"


def read(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / name).read_text())["results"]


def _of_times(ours: CostModel, file: str) -> Iterator[Row]:
    """Yield a live server's decode steps and long prompts, each model alone."""
    times, waited = read(file)["times"], file in _WAITED
    for shape, by_length in times["decode"].items():
        model = model_of(shape)
        for length, points in by_length.items():
            for batch, took_s in points:
                case = f"{shape}, batch {batch}, length {length}"
                simulated_s = ours.decode_s(model, batch, float(length))
                phase = _decode(batch) + (_EARLIER if waited and batch > _FEW else "")
                yield Row(phase, case, took_s, simulated_s, file)
    for shape, points in times["prefill"].items():
        for tokens, took_s in points:
            if tokens >= _LONG:
                simulated_s = ours.prefill_s(model_of(shape), tokens)
                phase = "prefill" + (_EARLIER if waited else "")
                yield Row(phase, f"{shape}, {tokens} tokens", took_s, simulated_s, file)


def _of_decodes(ours: CostModel, file: str) -> Iterator[Row]:
    """Yield `live_decodes.py`'s tokens as clients see them, in the second half of an answer."""
    for row in read(file)["decodes"]:
        shape, batch, output = row["shape"], row["batch"], row["output"]
        length = row["context"] + 0.75 * output
        case = f"{shape}, batch {batch}, length {length:.0f}, answers of {output}"
        simulated_s = ours.decode_s(model_of(shape), batch, length, _IN_A_ROW)
        yield Row(_decode(batch), case, row["client_s"], simulated_s, file)


def _of_steps(ours: CostModel, file: str) -> Iterator[Row]:
    """Yield the engine's steps of an 8B: the GPU's own time after a pause, and from step to step.
    (The host's part is simulated apart, by `sim.world.host_thread`.)"""
    model = model_of("llama-8b")
    for step in read(file)["steps"]:
        decodes, prompt = step["decodes"], step["prompt_tokens"]
        if decodes and prompt:
            continue
        if decodes:
            case = f"llama-8b, batch {decodes}, engine"
            once_s, again_s = (ours.decode_s(model, decodes, _CONTEXT, n) for n in (1, _IN_A_ROW))
        else:
            case = f"llama-8b, {prompt} tokens, engine"
            once_s, again_s = (ours.prefill_s(model, prompt, n) for n in (1, _IN_A_ROW))
        yield Row(_decode(decodes) if decodes else "prefill", case, step["gpu_s"], once_s, file)
        yield Row("in a row", case, step["wall_s"], again_s, file)


def by_context(ours: CostModel, file: str) -> Iterator[Row]:
    """Yield `step_phases.py`'s steps: decodes by context, and prompts after a pause and in a row.
    What picks of GEMMs by known speeds cost is added where there was no profile."""
    if not (RESULTS / file).exists():
        print(f"{file} is not among the results: its cases are left out")
        return
    results = read(file)
    profiled = not results["picked_by"].startswith(_KNOWN)
    for step in results["steps"]:
        model, prompt = model_of(step["shape"]), step.get("prompt_tokens")
        if prompt:
            case = f"{step['shape']}, {prompt} tokens, {step['attention']} attention, engine"
            once_s, again_s = (ours.prefill_s(model, prompt, n) for n in (1, _IN_A_ROW))
            yield Row("contexts, prefill", case, step["gpu_s"], once_s, file)
            yield Row("contexts, in a row", case, step["wall_s"], again_s, file)
            continue
        decodes, context = step["decodes"], step["context"]
        case = f"{step['shape']}, batch {decodes}, length {context}, engine"
        simulated_s = ours.decode_s(model, decodes, context, _IN_A_ROW)
        if not profiled and decodes <= ROWS_STREAMED:
            simulated_s += _unprofiled_s(model, decodes)
        yield Row("contexts, decode", case, step["wall_s"], simulated_s, file)
        if "after_prompts_s" in step:
            soon_s = step["after_prompts_s"]
            yield Row("contexts, decode after prompts", case, soon_s, simulated_s, file)


def _unprofiled_s(model: SimModel, rows: int) -> float:
    """Return by how much longer the GEMMs of a decode step are if they are picked without a
    profile. The profile of an H200 says what both picks take there."""
    gpu, sms = "NVIDIA H200", 132
    measured = Chooser(load_profile(RESULTS / PROFILE, gpu=gpu))
    known = Chooser(assumed_profile(gpu).profile)

    def more_s(n: int, k: int) -> float:
        asked = Question(rows, n, k, "bfloat16", "hbm", sms, by_map=True)
        return predicted_s(measured, asked, known) - predicted_s(measured, asked, measured)

    shape = model.shape
    hidden = shape.heads * shape.head_dim
    # A layer's parameters have some for norms, so what is left for GEMMs is not quite a shape's.
    qkv, out, gate_up, down = (64 * round(size / 128 / hidden) for size in linear_bytes(shape))
    layer_s = more_s(qkv, hidden) + more_s(out, hidden) + more_s(gate_up, hidden)
    layer_s += more_s(hidden, down)
    return shape.layers * layer_s + more_s(shape.vocabulary_parameters // hidden, hidden)


def _of_cpu(file: str) -> Iterator[Row]:
    """Yield a CPU server's requests beside simulated ones, and its steps beside its profile, which
    is of another load."""
    results = read(file)
    for name, what in (("ttft_p50_s", "first token, median"), ("tpot_p50_s", "token, median")):
        yield Row("cpu", what, results["live"][name], results["simulated"][name], file)
    kinds = results.get("phases")  # results before November 23 have one median of all steps
    if kinds is None:
        yield Row("cpu", "a step, over the profile's", results["step_drift"], 1.0, file)
        return
    for kind, one in kinds.items():
        took_s = one["measured_s"]
        yield Row("cpu", f"a step: {kind}", took_s, one["ratio"] * took_s, file)


def _of_engine(ours: CostModel) -> Iterator[Row]:
    """Yield prompts and steps of `gpu_engine.py`: the longest prompt, and weights that stream."""
    model = model_of("llama-8b")
    for file in ("gpu_engine_h200.json", "gpu_engine_h200x2_again.json"):
        found = {one["what"]: one for one in read(file)["shapes"]["llama-8b"]["figures"]}
        cases = {
            "prefill of 8192 tokens, weights in HBM": ("prefill", ours.prefill_s(model, 8192)),
            "TTFT of a switched model, prompt 512, from host": (
                "switch", ours.streamed_s(model, 512)
            ),
            "decode at batch 1, streamed from host": ("switch", ours.streamed_s(model, 1, 512)),
        }  # fmt: skip
        for what, (phase, simulated_s) in cases.items():
            if what in found:
                yield Row(phase, f"llama-8b, {what}", found[what]["seconds"], simulated_s, file)


def _of_loads(ours: CostModel, file: str) -> Iterator[Row]:
    """Yield the loads of each cell that has no lent memory: seconds of a GB."""
    for row in read(file)["rows"]:
        counters = row["live"]["counters"]
        moved = counters.get("weight_fetched_bytes_total", 0.0) / 1e9
        if moved and not row["lent_bytes"]:
            took_s = counters["weight_fetch_seconds_total"] / moved
            case = f"{row['cell']}, {counters['weight_fetches_total']:.0f} loads, a GB"
            yield Row("load", case, took_s, 1e9 / ours.slice.load_bytes_per_s, file)


def _of_rotation(ours: CostModel, file: str) -> Iterator[Row]:
    """Yield copies of blocks, by the method that a server uses: seconds of a GB."""
    [h2d, *shared], [d2h, *_] = ours.slice.h2d, ours.slice.d2h
    both = ours.links[h2d] + ours.links[d2h]
    limits = [ours.links[name] for name in shared if name in ours.slice.d2h]
    speeds = {"in": ours.links[h2d], "out": ours.links[d2h], "both": min([both, *limits])}
    for row in read(file)["small"]["rows"]:
        if row["kib"] == _ROTATED_KIB and row["method"] == "batch":
            for way, speed in speeds.items():
                yield Row("rotation", f"2 MiB, {way}, a GB", 1 / row[way], 1e9 / speed, file)


def _of_published() -> Iterator[Row]:
    """Yield the roofline of an A100 beside the tables that were published of one."""
    machine = build(_A100)
    [slice_] = [one for one in machine.slices if one.h2d][:1]
    roofline = CostModel(machine, slice_, Tables({}))
    for name, devices in machine.hardware.tables.steps.items():
        if slice_.table in devices:
            yield from _of_table(roofline, name, devices[slice_.table])


def _of_table(roofline: CostModel, name: str, table: StepTable) -> Iterator[Row]:
    model, file = catalogue(name)[0], "src/c2cserve/sim/data/tables"
    for length, points in table.decode:
        for batch, took_s in points:
            case = f"{name}, batch {batch:.0f}, length {length:.0f}"
            simulated_s = roofline.decode_s(model, int(batch), length)
            yield Row("roofline, decode", case, took_s, simulated_s, file)
    for tokens, took_s in table.prefill:
        case = f"{name}, {tokens:.0f} tokens"
        simulated_s = roofline.prefill_s(model, int(tokens))
        yield Row("roofline, prefill", case, took_s, simulated_s, file)


def summary(found: Sequence[Row]) -> dict[str, Mapping[str, float]]:
    """Return the least, median and largest ratio of each phase, and the share within 10 %."""
    phases: dict[str, list[float]] = {}
    for row in found:
        phases.setdefault(row.phase, []).append(row.ratio)
    return {phase: _of_ratios(sorted(ratios)) for phase, ratios in phases.items()}


def _of_ratios(ratios: Sequence[float]) -> Mapping[str, float]:
    within = sum(abs(ratio - 1) <= 0.1 for ratio in ratios) / len(ratios)
    return {
        "cases": len(ratios), "least": ratios[0], "median": ratios[len(ratios) // 2],
        "largest": ratios[-1], "within_tenth": within,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hardware", default="h200-x1", help="the H200's file")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    found = list(rows(given.hardware))
    for row in found:
        print(
            f"{row.phase:<18} {row.case:<62} {1e3 * row.measured_s:9.2f} ms"
            f" {1e3 * row.simulated_s:9.2f} ms {row.ratio:5.2f}"
        )
    phases = summary(found)
    for phase, one in phases.items():
        print(
            f"{phase:<18} {one['cases']:3.0f} cases: {one['least']:.2f} to {one['largest']:.2f},"
            f" median {one['median']:.2f}, {one['within_tenth']:.0%} within 10 %"
        )
    table = [{**asdict(row), "ratio": row.ratio} for row in found]
    report({"phases": phases, "rows": table}, given.out, show=False, hardware=given.hardware)


if __name__ == "__main__":
    main()
