"""The picture of `weights_mix.py`'s results: every cell, live beside simulated. No GPU needed."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
from gemm_plot_style import panels
from matplotlib.axes import Axes
from matplotlib.patches import Patch

_WORLDS = {"live": "#1f77b4", "simulated": "#ff7f0e"}
_BAR = 0.38
_PANELS = (
    ("in_time", 100.0, "in time, % of requests", False),
    ("ttft_p50_s", 1e3, "first token, median, ms", True),
    ("tpot_p50_s", 1e3, "time per token, median, ms", True),
)
"""Figure, factor, title, whether its axis is logarithmic."""
_TARGETS = {"ttft_p50_s": "ttft_s", "tpot_p50_s": "tpot_s"}

Rows = Sequence[Mapping[str, Any]]


def plot_mix(found: Sequence[Mapping[str, Any]], folder: Path) -> Path:
    """Draw the rows of one or more results, and return the file's path.

    Of a cell that several results have, the last one counts. The largest arena is the first, lent
    memory the last. Raises ValueError without rows."""
    by_cell = {row["cell"]: row for one in found for row in one["results"]["rows"]}
    if not by_cell:
        raise ValueError("the results have no rows")
    rows = sorted(
        by_cell.values(), key=lambda row: (row["lent_bytes"], -row["arena_bytes"], row["rate"])
    )
    mpl.use("Agg")
    figure, axes = panels(len(_PANELS), width=4.4, height=0.45 * len(rows) + 1.6)
    for own, (name, factor, title, logarithmic) in zip(axes, _PANELS, strict=True):
        _panel(own, rows, name, factor)
        own.set_title(title, fontsize=10)
        if logarithmic:
            own.set_xscale("log")
            target = found[-1]["results"]["slo"][_TARGETS[name]]
            own.axvline(factor * target, linestyle="--", color="#999999", linewidth=1)
        else:
            own.set_xlim(0, 112)  # figures stand right of their bars
    axes[0].set_yticks(range(len(rows)), [_label(row) for row in rows], fontsize=8)
    worlds = [Patch(color=colour, label=world) for world, colour in _WORLDS.items()]
    figure.legend(handles=worlds, loc="outside lower left", ncols=len(worlds), fontsize=8)
    figure.supxlabel(_said(found[-1]), x=0.99, ha="right", fontsize=7, color="#666666")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "weights_mix.png"
    figure.savefig(path, dpi=130, metadata={"Software": None})
    plt.close(figure)
    return path


def _panel(axes: Axes, rows: Rows, name: str, factor: float) -> None:
    """Two bars for each cell, from top to bottom. A world that was not run has none."""
    for place, row in enumerate(rows):
        for offset, (world, colour) in zip((-_BAR / 2, _BAR / 2), _WORLDS.items(), strict=True):
            value = row.get(world, {}).get(name)
            if value is not None:
                axes.barh(place + offset, factor * value, _BAR, color=colour)
                text = f" {factor * value:.3g}"
                axes.annotate(text, (factor * value, place + offset), va="center", fontsize=6)
    axes.set_yticks(range(len(rows)), [""] * len(rows))
    axes.invert_yaxis()
    axes.grid(visible=True, axis="x", alpha=0.3)


def _label(row: Mapping[str, Any]) -> str:
    lent = f" + {row['lent_bytes'] / 1e9:.3g} lent" if row["lent_bytes"] else ""
    return f"{row['arena_bytes'] / 1e9:.3g} GB{lent}, {row['rate']:g}/s"


def _said(one: Mapping[str, Any]) -> str:
    host = one["results"]["host"]
    gpus = ", ".join(host["gpus"]) or one["machine"]["cpu"]
    catalogue = one["results"]["catalogue"]
    models, size = len(catalogue["models"]), catalogue["bytes"] / 1e9
    return f"{gpus}; {models} models, {size:.3g} GB; {one['date'][:10]}, {one['commit']}"
