"""The paper's figures 4, 5, 6 and 8 on SM partitions and this machine's links; and fair shares.

Partitions split SMs and nothing else: HBM, unlike under MIG, stays whole, so a figure that lives
of a smaller share of HBM bandwidth is not reproduced by them (C2CServe, section 3.2).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gemm_cases import PAPER, PAPER_ROWS, Case, Linear, LinkHome, alphas, label
from gemm_run import Bench, CaseRun
from gemm_slices import Slice, graph_of, partitions, together_s
from gemm_summary import interference, shares

from c2cserve.kernels.gpu.driver import CudaError
from c2cserve.kernels.gpu.gemm.choice.choose import Chooser
from c2cserve.kernels.gpu.gemm.choice.cost import Question
from c2cserve.kernels.gpu.gemm.dataflows.table import DataflowName
from c2cserve.kernels.gpu.gemm.measure import Step
from c2cserve.kernels.gpu.gemm.traffic import Tiles
from c2cserve.kernels.gpu.gemm.weight import OperandError

Flow = tuple[DataflowName, Tiles]

SYM: Flow = ("sym", Tiles(bx=256, alpha=1.0))
ASYM: Flow = ("asym", Tiles(bx=256, alpha=0.0))
SETS = ((1, 132), (3, 40), (7, 16))
"""Slices and SMs of each: the whole GPU, thirds, sevenths."""


@dataclass(frozen=True, slots=True)
class Model:
    """What a layer's linears are made of."""

    name: str
    layers: int
    linears: tuple[Linear, ...]

    @property
    def bytes(self) -> int:
        return self.layers * sum(linear.bytes for linear in self.linears)


def _llama(name: str, layers: int, hidden: int, kv: int, inner: int) -> Model:
    shapes = {
        "qkv": (hidden + 2 * kv, hidden),
        "o": (hidden, hidden),
        "gate_up": (2 * inner, hidden),
        "down": (hidden, inner),
    }
    linears = tuple(Linear(name, part, n, k) for part, (n, k) in shapes.items())
    return Model(name, layers, linears)


LLAMA_1B = _llama("Llama-3.2-1B", 16, 2048, 512, 8192)
LLAMA_3B = _llama("Llama-3.2-3B", 28, 3072, 1024, 8192)
LLAMA_8B = _llama("Llama-3-8B", 32, 4096, 1024, 14336)
PAIRS = (
    (LLAMA_1B, LLAMA_1B), (LLAMA_1B, LLAMA_3B), (LLAMA_3B, LLAMA_3B), (LLAMA_3B, LLAMA_8B),
    (LLAMA_8B, LLAMA_8B),
)  # fmt: skip
CHUNKS = (512, 1024, 2048, 4096, 8192)
PAIR_ROWS = 2048
PAIR_SMS = 64


def figures(bench: Bench, chooser: Chooser, *, quick: bool) -> dict[str, Any]:
    """Every figure from every home."""
    sets = {count: partitions(bench, sms, count) for count, sms in SETS}
    pair = partitions(bench, PAIR_SMS, 2)
    return {
        home: {
            "fair_share": fair_share(bench, home, sets[7]),
            "figure_4": [row for own in sets.values() for row in figure_4(bench, home, own, quick)],
            "figure_5": figure_5(bench, chooser, home, quick),
            "figure_6": figure_6(bench, chooser, home, pair, quick),
            "figure_8": figure_8(bench, home, sets),
        }
        for home in bench.homes
    }


def fair_share(bench: Bench, home: LinkHome, slices: Sequence[Slice]) -> list[dict[str, Any]]:
    """Each of seven slices streams few rows' weights: what the link gives to each."""
    found: list[dict[str, Any]] = []
    flows: list[tuple[int, Flow, bool]] = [
        (16, ("direct", Tiles(bx=16)), False),
        (16, ("direct", Tiles(bx=16)), True),
        (64, ("direct", Tiles(bx=64)), True),
        (16, ("prefetch", Tiles(panel_rows=4096, panel_growth=1)), False),
    ]
    for rows, flow, held in flows:
        limit = bench.link_bytes_per_s[home] / len(slices) if held else 0.0
        for own in slices:
            with own.use():
                own.context.limit_link(limit)
        runs = [
            CaseRun(bench, Case(PAPER, rows, home, own.context.sms), own.context, own=True)
            for own in slices
        ]
        graphs = [
            graph_of(own, run.steps(*flow, 4, first=4 * i))
            for i, (own, run) in enumerate(zip(slices, runs, strict=True))
        ]
        taken_s = together_s(slices, graphs, at_least_s=0.3)
        speeds = [4 * PAPER.bytes / seconds for seconds in taken_s]
        share = shares(speeds, bench.link_bytes_per_s[home])
        name = label(*flow, PAPER.n) + (", held to its share" if held else "")
        found.append({"dataflow": name, "m": rows, **share})
        print(f"fair share, {home}, M={rows}, {name}: {_shown(share)}", flush=True)
    for own in slices:
        with own.use():
            own.context.limit_link(0.0)
    return found


def _shown(share: dict[str, Any]) -> str:
    each = " ".join(f"{one / 1e9:.1f}" for one in share["bytes_per_s"])
    return f"{each} GB/s of {share['fair_bytes_per_s'] / 1e9:.1f}, {share['worst_off']:+.1%}"


def figure_4(
    bench: Bench, home: LinkHome, slices: Sequence[Slice], quick: bool
) -> list[dict[str, Any]]:
    """The paper's GEMM on every slice at once, by dataflow: seconds, and bytes by count."""
    flows: list[Flow] = [("resident", Tiles()), SYM]
    for alpha in reversed(list(alphas(quick))):
        flows.append(("hybrid", Tiles(bx=256, alpha=alpha)))
    flows += [ASYM, ("direct", Tiles(bx=256, cluster=2)), ("direct", Tiles(bx=256, cluster=8))]
    flows.append(("prefetch", Tiles(panel_rows=1024)))
    rows: list[dict[str, Any]] = []
    for flow in flows:
        # The paper's do not overlap with the next GEMM, and one may take a second.
        count = 1 if flow[0] in ("sym", "asym", "hybrid") else 4
        row = _at_once(bench, home, slices, flow, count)
        rows.append(row)
        taken = row["refused"] or f"{max(row['seconds']) * 1e3:.2f} ms"
        print(
            f"figure 4, {home}, {len(slices)} slices, {label(*flow, PAPER.n)}: {taken}", flush=True
        )
    return rows


def _at_once(
    bench: Bench, home: LinkHome, slices: Sequence[Slice], flow: Flow, count: int
) -> dict[str, Any]:
    case = Case(PAPER, PAPER_ROWS, home, slices[0].context.sms)
    runs = [CaseRun(bench, case, own.context, own=True) for own in slices]
    counted = runs[0].traffic(*flow)
    row: dict[str, Any] = {
        "slices": len(slices), "sms": case.sms, "dataflow": flow[0], "alpha": flow[1].alpha,
        "cluster": flow[1].cluster, "tiles": label(*flow, PAPER.n),
        "seconds": None, "refused": None,
        "link_bytes": counted.link_bytes, "hbm_read_bytes": counted.hbm_read_bytes,
        "hbm_write_bytes": counted.hbm_write_bytes,
    }  # fmt: skip
    try:
        graphs = [
            graph_of(own, run.steps(*flow, count, first=i))
            for i, (own, run) in enumerate(zip(slices, runs, strict=True))
        ]
    except (OperandError, CudaError, LookupError) as error:
        row["refused"] = str(error)
        return row
    row["seconds"] = [seconds / count for seconds in together_s(slices, graphs)]
    return row


def figure_5(
    bench: Bench, chooser: Chooser, home: LinkHome, quick: bool
) -> dict[str, list[dict[str, Any]]]:
    """asym by N and by M on the whole GPU, and what is picked beside it."""
    step = 2 if quick else 1
    by_n = [(2048, 1 << power) for power in range(10, 17, step)]
    by_m = [(1 << power, 16384) for power in range(7, 15, step)]
    return {
        name: [_figure_5_row(bench, chooser, home, m, n) for m, n in sizes]
        for name, sizes in (("by_n", by_n), ("by_m", by_m))
    }


def _figure_5_row(bench: Bench, chooser: Chooser, home: LinkHome, m: int, n: int) -> dict[str, Any]:
    run = CaseRun(bench, Case(Linear("C2CServe", "figure 5", n, 4096), m, home, bench.sms))
    choice = chooser.pick(run.case.question)
    flops = 2.0 * m * n * 4096
    row: dict[str, Any] = {"m": m, "n": n, "k": 4096}
    asym: Flow = ("asym", Tiles(bx=min(256, m), alpha=0.0))
    pick: Flow = (choice.dataflow, choice.tiles)
    for name, flow in (("asym", asym), ("pick", pick)):
        seconds = run.seconds(*flow, 4)
        row[name] = {
            "tiles": label(*flow, n),
            "seconds": seconds,
            "flops_per_s": flops / seconds,
            "link_use": run.traffic(*flow).link_bytes / seconds / run.link_bytes_per_s,
        }
    print(
        f"figure 5, {home}, M={m} N={n}: asym {row['asym']['flops_per_s'] / 1e12:.0f} TFLOP/s,"
        f" link {row['asym']['link_use']:.0%}; pick {row['pick']['flops_per_s'] / 1e12:.0f},"
        f" {row['pick']['link_use']:.0%}",
        flush=True,
    )
    return row


def figure_6(
    bench: Bench, chooser: Chooser, home: LinkHome, slices: Sequence[Slice], quick: bool
) -> dict[str, list[dict[str, Any]]]:
    """Two slices: tokens per second of each alone, and of both at once; the linears of layers."""
    chunks = CHUNKS[::2] if quick else CHUNKS
    pairs = PAIRS[::2] if quick else PAIRS
    sweeps = {
        "by_footprint": [(pair, PAIR_ROWS) for pair in pairs],
        "by_chunk": [((LLAMA_8B, LLAMA_8B), chunk) for chunk in chunks],
    }
    return {
        name: [
            _figure_6_row(bench, chooser, home, slices, pair, rows, kind)
            for pair, rows in sweep
            for kind in ("asym", "pick")
        ]
        for name, sweep in sweeps.items()
    }


def _figure_6_row(
    bench: Bench, chooser: Chooser, home: LinkHome, slices: Sequence[Slice],
    pair: tuple[Model, Model], rows: int, kind: str,
) -> dict[str, Any]:  # fmt: skip
    # Graphs know addresses: what lies there must live as long as they are replayed.
    layers = [
        _layer(bench, chooser, home, own, model, rows, kind, first=i)
        for i, (own, model) in enumerate(zip(slices, pair, strict=True))
    ]
    graphs = [graph_of(own, steps) for own, steps in zip(slices, layers, strict=True)]
    alone_s = [together_s([own], [graph])[0] for own, graph in zip(slices, graphs, strict=True)]
    both_s = together_s(slices, graphs)

    def tokens_per_s(seconds: Sequence[float]) -> list[float]:
        return [rows * 2 / (s * model.layers) for s, model in zip(seconds, pair, strict=True)]

    solo, together = tokens_per_s(alone_s), tokens_per_s(both_s)
    lost = interference(solo, together)
    names = " + ".join(model.name for model in pair)
    print(f"figure 6, {home}, {names}, {rows} rows, {kind}: {lost:.0%} lost", flush=True)
    return {
        "models": [model.name for model in pair], "bytes": sum(model.bytes for model in pair),
        "rows": rows, "kind": kind, "solo_tokens_per_s": solo, "together_tokens_per_s": together,
        "interference": lost,
    }  # fmt: skip


def _layer(
    bench: Bench, chooser: Chooser, home: LinkHome, own: Slice, model: Model, rows: int,
    kind: str, first: int,
) -> list[Step]:  # fmt: skip
    """The linears of two layers, one after another."""
    found: list[list[Step]] = []
    for linear in model.linears:
        case = Case(linear, rows, home, own.context.sms)
        flow = ASYM
        if kind == "pick":
            q = case.question
            beside = Question(q.m, q.n, q.k, q.dtype, q.home, q.sms, neighbours=1)
            choice = chooser.pick(beside)
            flow = (choice.dataflow, choice.tiles)
        found.append(CaseRun(bench, case, own.context, own=True).steps(*flow, 2, first=2 * first))
    return [steps[layer] for layer in range(2) for steps in found]


def figure_8(bench: Bench, home: LinkHome, sets: dict[int, list[Slice]]) -> list[dict[str, Any]]:
    """asym by the rows of its tiles, on the whole GPU and on a slice of 16 SMs alone."""
    rows: list[dict[str, Any]] = []
    for own in (sets[1][0], sets[7][0]):
        for bx in (64, 128, 256):
            flow: Flow = ("asym", Tiles(bx=bx, alpha=0.0))
            row = _at_once(bench, home, [own], flow, 1)
            rows.append({"bx": bx, **row})
            taken = row["refused"] or f"{row['seconds'][0] * 1e3:.2f} ms"
            print(f"figure 8, {home}, {row['sms']} SMs, {bx} rows: {taken}", flush=True)
    return rows
