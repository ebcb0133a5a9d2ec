"""Figures of studies as PNG files. matplotlib is needed for this and nothing else."""

from collections.abc import Iterable
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from c2cserve.sim.studies.figure import Figure

_COLOURS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#17becf", "#7f7f7f")


def save(figures: Iterable[Figure], folder: Path) -> list[Path]:
    """One PNG each; the files written. Raises OSError."""
    mpl.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []
    for figure in figures:
        drawn, axes = plt.subplots(
            figsize=(4.4, 2.8) if figure.small else (6.4, 4.0), layout="constrained"
        )
        (_bars if figure.kind == "bars" else _lines)(axes, figure)
        axes.set(title=figure.title, xlabel=figure.x, ylabel=figure.y)
        if figure.log == "y":
            axes.set_yscale("log")
        if figure.log == "x":
            axes.set_xscale("log", base=2)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
        paths.append(folder / f"{figure.name}.png")
        drawn.savefig(paths[-1], dpi=130, metadata={"Software": None})
        plt.close(drawn)
    return paths


def _lines(axes: Axes, figure: Figure) -> None:
    for (name, points), colour in zip(figure.series.items(), _COLOURS, strict=False):
        xs, ys = [x for x, _ in points], [y for _, y in points]
        axes.plot(xs, ys, "o-", color=colour, label=name, markersize=4)  # pyright: ignore[reportArgumentType]
        if name in figure.published:
            told = figure.published[name]
            xs, ys = [x for x, _ in told], [y for _, y in told]
            label = f"{name}, published"
            axes.plot(xs, ys, "*", color=colour, label=label, markersize=11)  # pyright: ignore[reportArgumentType]


def _bars(axes: Axes, figure: Figure) -> None:
    bars = [(name, dict(points), 1.0) for name, points in figure.series.items()]
    bars += [(f"{name}, published", dict(p), 0.45) for name, p in figure.published.items()]
    bars.sort(key=lambda bar: bar[0].removesuffix(", published"))
    places = list(dict.fromkeys(str(x) for points in figure.series.values() for x, _ in points))
    colours = dict(zip(figure.series, _COLOURS, strict=False))
    width = 0.8 / len(bars)
    for index, (name, points, shade) in enumerate(bars):
        values = {str(x): y for x, y in points.items()}
        at = [place + (index - (len(bars) - 1) / 2) * width for place in range(len(places))]
        colour = colours.get(name.removesuffix(", published"), "#7f7f7f")
        heights = [values.get(place, 0.0) for place in places]
        axes.bar(at, heights, width, label=name, color=colour, alpha=shade)
    axes.set_xticks(range(len(places)), places)
