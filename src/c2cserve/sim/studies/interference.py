"""C2CServe figures 4 and 6, and section 7 in closed loop: interference of streams on one link.

Two instances on halves of a GH200 (MIG 2 of Table 1) compute without pause. A pass begins with work
that needs no link (`pause_s`: launches, sampling, attention), and no part of the next pass overlaps
it. GEMMs follow, whose bytes come over the shared link.

    interference = 1 - (throughput of both together) / (sum of each alone)
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from c2cserve.policy.baselines.c2cserve.alpha import AlphaControl, GemmSample
from c2cserve.sim.studies.figure import Figure
from c2cserve.sim.studies.hybrid import ALONE_BYTES_PER_S, GemmShape
from c2cserve.sim.world.hardware import SimMachine, SimulatedSlice, build
from c2cserve.sim.world.links import Network
from c2cserve.sim.world.shapes import Shape, shape_of
from c2cserve.sim.world.timeline import Timeline

_PASSES_S = 60.0
"""Virtual time that throughput is measured over."""
_PAIRS = (
    ("llama-3.2-1b", "llama-3.2-1b"), ("llama-3.2-1b", "llama-3.2-3b"),
    ("llama-3.2-3b", "llama-3.2-3b"), ("llama-3.2-3b", "llama-3.1-8b"),
    ("llama-3.1-8b", "llama-3.1-8b"), ("llama-3.1-8b", "qwen2.5-14b"),
)  # fmt: skip
"""Pairs of 5 to 46 GB together. The paper says only Llama 3 models of 5 to 44 GB."""
_CHUNKS = (512, 1024, 2048, 4096, 8192)
_SLOW_ROWS = 340
"""Rows of a chunk at which GEMMs run at half speed, chosen so that the smallest chunk of figure
6(b) comes out. Nothing in the paper gives this; the study shows what comes out without it too."""


@dataclass(slots=True)
class _Instance:
    """Computes pass after pass of `tokens` tokens."""

    route: tuple[str, ...]
    link_bytes: float
    floor_s: float
    """What the GEMMs take if the link never makes them wait."""
    pause_s: float
    passes: int = 0

    def run(self, timeline: Timeline, network: Network, random: Random) -> None:
        """Passes differ a little, else two instances would keep in step or apart for ever."""
        rate = self.link_bytes / self.floor_s

        def gemms() -> None:
            network.start(self.route, self.link_bytes, rate, done)

        def done() -> None:
            self.passes += 1
            timeline.at(timeline.now + self.pause_s * random.uniform(0.5, 1.5), gemms)

        timeline.at(self.floor_s * random.random(), gemms)


def _throughput(machine: SimMachine, instances: list[_Instance]) -> float:
    """Passes per second of all together."""
    timeline = Timeline()
    network = Network(timeline, machine.links)
    random = Random(0)
    for instance in instances:
        instance.passes = 0
        instance.run(timeline, network, random)
    while timeline.now < _PASSES_S and timeline.step():
        pass
    return sum(instance.passes for instance in instances) / timeline.now


def _interference(machine: SimMachine, instances: list[_Instance]) -> tuple[float, float, float]:
    """Alone in sum, together, and the gap."""
    alone = sum(_throughput(machine, [instance]) for instance in instances)
    together = _throughput(machine, instances)
    return alone, together, 1 - together / alone


def footprint() -> Figure:
    """Figure 6(a). Decode passes of one sequence: every weight once, and next to no compute."""
    machine = build("gh200:mig2")
    gaps: list[tuple[float | str, float]] = []
    for names in _PAIRS:
        pair = [_decoder(machine.slices[i], shape_of(name)) for i, name in enumerate(names)]
        size = sum(shape_of(name).weight_bytes for name in names)
        gaps.append((size / 1e9, 100 * _interference(machine, pair)[2]))
    return Figure(
        "c2cserve_fig6a", "Interference of two models on one link (C2CServe fig. 6a)",
        "weights of both, GB", "throughput lost, %", {"simulated": gaps},
        {"simulated": [(5, 28), (44, 42)]},
    )  # fmt: skip


def _decoder(simulated: SimulatedSlice, shape: Shape) -> _Instance:
    floor_s = shape.weight_bytes / ALONE_BYTES_PER_S
    return _Instance(simulated.h2d, float(shape.weight_bytes), floor_s, simulated.step_s)


def chunk_size() -> Figure:
    """Figure 6(b): interference by chunk size, prefill of Llama-3-8B.

    Our dataflows and the paper's asymmetric one read weights once per chunk. The symmetric one
    reads them once per 256 rows."""
    machine = build("gh200:mig2")
    series: dict[str, list[tuple[float | str, float]]] = {}
    for name, alpha, slow in (
        ("weights once per chunk", 0.0, 0), ("once per 256 rows", 1.0, 0),
        ("once per 256 rows, short chunks slow", 1.0, _SLOW_ROWS),
    ):  # fmt: skip
        series[name] = [
            (chunk, 100 * _interference(machine, _prefills(machine, chunk, alpha, slow))[2])
            for chunk in _CHUNKS
        ]
    return Figure(
        "c2cserve_fig6b", "Interference by chunk (C2CServe fig. 6b), Llama-3-8B twice",
        "tokens per chunk", "throughput lost, %", series,
        {"once per 256 rows, short chunks slow": [(512, 2), (8192, 42)]}, log="x",
    )  # fmt: skip


def _prefills(machine: SimMachine, chunk: int, alpha: float, slow: int) -> list[_Instance]:
    shape = shape_of("llama-3.1-8b")
    gemm = GemmShape(n=shape.parameters // 4096, k=4096)
    pair: list[_Instance] = []
    for simulated in machine.slices:
        moved = gemm.moved(chunk, alpha, simulated)
        alone_s = moved.alone_s(ALONE_BYTES_PER_S, simulated.hbm_bytes_per_s)
        floor_s = alone_s * (1 + slow / chunk)
        pair.append(_Instance(simulated.h2d, moved.link_bytes, floor_s, simulated.step_s))
    return pair


def dataflows() -> Figure:
    """Figure 4: one GEMM (M 10240, K 4096, N 16384) by alpha and number of instances."""
    gemm = GemmShape(n=16384, k=4096)
    series: dict[str, list[tuple[float | str, float]]] = {}
    for layout, name in (("whole", "1 instance"), ("mig3", "3"), ("mig7", "7")):
        machine = build(f"gh200:{layout}")
        simulated, link = machine.slices[0], min(rate for _, rate in machine.links)
        points = [(step / 16, gemm.moved(10240, step / 16, simulated)) for step in range(17)]
        series[name] = [
            (alpha, 1e3 * moved.alone_s(link, simulated.hbm_bytes_per_s)) for alpha, moved in points
        ]
    return Figure(
        "c2cserve_fig4", "HybridGEMM by alpha (C2CServe fig. 4)", "alpha", "ms", series,
        {"1 instance": [(0, 4.0), (1, 16.4)]},
    )  # fmt: skip


def alpha_steps() -> Figure:
    """Section 7 in closed loop: the same GEMM on a third of a GH200.

    Every 100 control intervals the number of instances on the link changes."""
    gemm = GemmShape(n=16384, k=4096)
    machine = build("gh200:mig3")
    simulated, link = machine.slices[0], min(rate for _, rate in machine.links)
    control = AlphaControl()
    chosen: list[tuple[float | str, float]] = []
    best: list[tuple[float | str, float]] = []
    for interval in range(500):
        share = link / (1, 3, 2, 6, 1)[interval // 100]
        moved = gemm.moved(10240, control.variant, simulated)
        took_s = moved.alone_s(share, simulated.hbm_bytes_per_s)
        chosen.append((interval, 1e3 * took_s))
        best.append((interval, 1e3 * _best_s(gemm, simulated, share)))
        use = GemmSample(
            took_s,
            max(moved.hbm_bytes / simulated.hbm_bytes_per_s, moved.compute_s) / took_s,
            moved.link_bytes / share / took_s,
        )
        control.sample(use, budget_s=0.012)
    return Figure(
        "c2cserve_alpha", "Alpha under steps of contention (C2CServe section 7)",
        "control interval", "ms per GEMM", {"controlled": chosen, "best alpha": best},
    )  # fmt: skip


def _best_s(gemm: GemmShape, simulated: SimulatedSlice, share: float) -> float:
    return min(
        gemm.moved(10240, step / 64, simulated).alone_s(share, simulated.hbm_bytes_per_s)
        for step in range(65)
    )


FIGURES: tuple[Callable[[], Figure], ...] = (dataflows, footprint, chunk_size, alpha_steps)
