"""Figures of studies as PNG files. matplotlib is needed for this and nothing else."""

import textwrap
from collections.abc import Iterable
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from c2cserve.sim.studies.figure import Figure

_COLOURS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#17becf", "#7f7f7f")
_PERCENT_TOP = 103.0
"""Shares end a little above 100 %, so that points there are seen whole."""
_PERCENT_LOW = 90.0
"""Where all shares are above it, the axis begins at 0: there is no difference to enlarge."""


def save(figures: Iterable[Figure], folder: Path) -> list[Path]:
    """One PNG each; the files written. Raises OSError."""
    mpl.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []
    for figure in figures:
        canvas, axes = plt.subplots(
            figsize=(4.4, 2.8) if figure.small else (6.4, 4.0), layout="constrained"
        )
        (_bars if figure.kind == "bars" else _lines)(axes, figure)
        axes.set(xlabel=figure.x, ylabel=figure.y)
        axes.set_title(figure.title, fontsize=10 if figure.small else 12)
        if figure.log == "y":
            axes.set_yscale("log")
        if figure.log == "x":
            axes.set_xscale("log", base=2)
        if figure.y.startswith("%") and axes.get_ylim()[1] > _PERCENT_TOP:
            low = axes.get_ylim()[0]
            axes.set_ylim(low if low < _PERCENT_LOW else 0.0, _PERCENT_TOP)
        axes.grid(alpha=0.3)
        if figure.kind == "bars":  # they leave no corner free
            canvas.legend(loc="outside lower center", ncols=5, fontsize=8)
        else:
            axes.legend(fontsize=8)
        paths.append(folder / f"{figure.name}.png")
        canvas.savefig(paths[-1], dpi=130, metadata={"Software": None})
        plt.close(canvas)
    return paths


def _lines(axes: Axes, figure: Figure) -> None:
    for (name, points), colour in zip(figure.series.items(), _COLOURS, strict=False):
        xs, ys = [x for x, _ in points], [y for _, y in points]
        axes.plot(xs, ys, "o-", color=colour, label=name, markersize=4)  # pyright: ignore[reportArgumentType]
        if name in figure.published:
            published = figure.published[name]
            xs, ys = [x for x, _ in published], [y for _, y in published]
            label = _published(name, figure)
            axes.plot(xs, ys, "*", color=colour, label=label, markersize=11)  # pyright: ignore[reportArgumentType]


def _bars(axes: Axes, figure: Figure) -> None:
    bars: list[tuple[str, dict[float | str, float], str, float]] = []
    for (name, points), colour in zip(figure.series.items(), _COLOURS, strict=False):
        bars.append((name, dict(points), colour, 1.0))
        if name in figure.published:
            published = dict(figure.published[name])
            bars.append((_published(name, figure), published, colour, 0.45))
    places = list(dict.fromkeys(str(x) for points in figure.series.values() for x, _ in points))
    width = 0.8 / len(bars)
    for index, (name, points, colour, shade) in enumerate(bars):
        values = {str(x): y for x, y in points.items()}
        at = [place + (index - (len(bars) - 1) / 2) * width for place in range(len(places))]
        heights = [values.get(place, 0.0) for place in places]
        axes.bar(at, heights, width, label=name, color=colour, alpha=shade)
    wrap = textwrap.TextWrapper(12, break_long_words=False, break_on_hyphens=False)
    axes.set_xticks(range(len(places)), [wrap.fill(place) for place in places])


def _published(name: str, figure: Figure) -> str:
    """Label the published points of the series `name`."""
    return "published" if len(figure.series) == 1 else f"{name}, published"
