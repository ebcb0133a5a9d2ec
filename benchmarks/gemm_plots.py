"""Plots of `gemm.py`'s results: PNG, no GPU needed."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
from gemm_cases import ROWS
from gemm_plot_style import COLOURS, PUBLISHED_MS, panels
from gemm_plots_paper import figure_plots
from gemm_summary import RATIO_MAX_BAR, RATIO_MEAN_BAR, geometric_mean
from matplotlib.axes import Axes
from matplotlib.figure import Figure

MODEL_MARKS = {"Llama-3-8B": "o", "Llama-3-70B": "s", "Qwen3-30B-A3B": "^"}

Results = Mapping[str, Any]


def plot_all(results: Results, folder: Path) -> list[Path]:
    """Draw whatever the results have; the files written."""
    folder.mkdir(parents=True, exist_ok=True)
    mpl.use("Agg")
    made = [*_table_plots(results), *figure_plots(results)]
    return [_saved(figure, folder / f"{name}.png", results) for name, figure in made]


def _saved(figure: Figure, path: Path, results: Results) -> Path:
    speeds = ", ".join(
        f"{home} {speed / 1e9:.0f} GB/s" for home, speed in results["link_bytes_per_s"].items()
    )
    figure.supxlabel(
        f"{results['gpu']}, bf16, copy engine from {speeds}",
        x=0.99, ha="right", fontsize=7, color="#666666",
    )  # fmt: skip
    figure.savefig(path, dpi=130, metadata={"Software": None})
    plt.close(figure)
    return path


def ratio_axis(axes: Axes) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(ROWS, [str(m) for m in ROWS], rotation=45, fontsize=8)
    axes.minorticks_off()
    axes.set_xlabel("M, rows of X")
    axes.axhline(1.0, color="#333333", linewidth=1)
    axes.grid(visible=True, axis="y", alpha=0.3)


def _table_plots(results: Results) -> Iterator[tuple[str, Figure]]:
    if "table" in results:
        rows = results["table"]["rows"]
        yield "gemm_pick", _by_home(rows, _pick_panel, "pick over floor")
        yield "gemm_dataflows", _by_home(rows, _dataflow_panel, "over floor (geometric mean)")
    if "slice" in results:
        rows = results["slice"]["rows"]
        yield "gemm_slice", _by_home(rows, _pick_panel, f"{rows[0]['sms']} SMs: pick over floor")
    if "paper" in results:
        figure, axes = panels(len(results["paper"]), width=5.5, height=6.0)
        for own, one in zip(axes, results["paper"], strict=True):
            _paper_panel(own, one)
        yield "gemm_paper_shape", figure


def _by_home(
    rows: Sequence[Results], draw: Callable[[Axes, Sequence[Results]], None], what: str
) -> Figure:
    homes = sorted({row["home"] for row in rows})
    figure, axes = panels(len(homes))
    for own, home in zip(axes, homes, strict=True):
        ratio_axis(own)
        own.set_title(f"W at {home}")
        own.set_ylabel(what)
        draw(own, [row for row in rows if row["home"] == home])
    shown = {
        label: handle
        for own in axes
        for handle, label in zip(*own.get_legend_handles_labels(), strict=True)
    }
    # One legend for all panels, beside them: it covers no point and no other legend.
    figure.legend(shown.values(), shown.keys(), loc="outside right upper", fontsize=8)
    return figure


def _pick_panel(axes: Axes, rows: Sequence[Results]) -> None:
    """Every case's ratio, and their mean by rows."""
    by_m: dict[int, list[float]] = defaultdict(list)
    for row in rows:
        if row["pick_s"] is not None:
            ratio = row["pick_s"] / row["floor_s"]
            by_m[row["m"]].append(ratio)
            flow = row["pick"].partition(" ")[0]
            mark = MODEL_MARKS.get(row["model"], "o")
            axes.plot(row["m"], ratio, mark, color=COLOURS[flow], markersize=4, alpha=0.7)
    for flow in sorted({row["pick"].partition(" ")[0] for row in rows}):
        axes.plot([], [], "o", color=COLOURS[flow], label=flow)
    for model in sorted({row["model"] for row in rows}):
        axes.plot([], [], MODEL_MARKS.get(model, "o"), color="#999999", label=model)
    rising = sorted(by_m)
    means = [geometric_mean(by_m[m]) for m in rising]
    axes.plot(rising, means, color=COLOURS["pick"], label="geometric mean")
    axes.axhline(RATIO_MEAN_BAR, linestyle="--", color="#999999", linewidth=1)
    axes.axhline(RATIO_MAX_BAR, linestyle=":", color="#999999", linewidth=1)


def _dataflow_panel(axes: Axes, rows: Sequence[Results]) -> None:
    """Each dataflow at its best tiles, over the cases it was timed on."""
    found: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        best: dict[str, float] = {}
        for one in row["candidates"]:
            if one["seconds"] is not None:
                known = best.get(one["dataflow"], one["seconds"])
                best[one["dataflow"]] = min(known, one["seconds"])
        for dataflow, seconds in best.items():
            found[dataflow][row["m"]].append(seconds / row["floor_s"])
    for dataflow, by_m in sorted(found.items()):
        rising = sorted(by_m)
        means = [geometric_mean(by_m[m]) for m in rising]
        axes.plot(rising, means, "o-", color=COLOURS[dataflow], label=dataflow, markersize=3)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")


def _paper_panel(axes: Axes, one: Results) -> None:
    """Every candidate of the paper's shape, over the floor."""
    ran = sorted(
        (c for c in one["candidates"] if c["seconds"] is not None), key=lambda c: -c["seconds"]
    )
    ratios = [c["seconds"] / one["floor_s"] for c in ran]
    axes.barh(range(len(ran)), ratios, color=[COLOURS[c["dataflow"]] for c in ran])
    for place, (ratio, candidate) in enumerate(zip(ratios, ran, strict=True)):
        text = f" {ratio:.2f}x, {candidate['seconds'] * 1e3:.2f} ms"
        axes.text(ratio, place, text, va="center", fontsize=7)
    axes.set_yticks(range(len(ran)), [c["tiles"] for c in ran], fontsize=7)
    axes.set_xscale("log")
    axes.set_xlim(0.9, max(ratios) * 14)
    axes.axvline(1.0, color="#333333", linewidth=1)
    axes.axvline(one["bar"], linestyle="--", color="#999999", linewidth=1)
    axes.set_xlabel(f"over the floor ({one['floor_s'] * 1e3:.2f} ms)")
    axes.set_title(f"M={one['m']:,} N={one['n']:,} K={one['k']:,}, W at {one['home']}", fontsize=9)
    if one["home"] == "peer":
        said = ", ".join(f"{flow} {ms} ms" for flow, ms in PUBLISHED_MS.items())
        axes.annotate(
            f"published, GH200: {said}", (0.98, 0.02), xycoords="axes fraction",
            ha="right", fontsize=7, style="italic",
        )  # fmt: skip
