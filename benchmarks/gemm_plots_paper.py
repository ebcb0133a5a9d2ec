"""Figures 4, 5, 6 and 8 of C2CServe as this machine has them, and the shares of a link."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
from gemm_plot_style import COLOURS, PUBLISHED_MS, panels
from gemm_summary import FAIR_SHARE_BAR
from matplotlib.axes import Axes
from matplotlib.figure import Figure

PUBLISHED_GB = {"sym": (5.37, 1.23), "asym": (0.13, 5.18)}
"""CPU-GPU and HBM traffic of the GEMM of figure 4 (C2CServe, section 3.2)."""
PUBLISHED_LOST = {"by_footprint": (0.28, 0.42), "by_chunk": (0.02, 0.42)}
"""Interference at the smallest and at the largest of figure 6 (C2CServe, section 3.3)."""

Row = Mapping[str, Any]


def figure_plots(results: Mapping[str, Any]) -> Iterator[tuple[str, Figure]]:
    for home, found in results.get("figures", {}).items():
        yield f"figure_4_{home}", _figure_4(found["figure_4"], home)
        yield f"figure_5_{home}", _figure_5(found["figure_5"], home)
        yield f"figure_6_{home}", _figure_6(found["figure_6"], home)
        yield f"figure_8_{home}", _figure_8(found["figure_8"], home)
        yield f"fair_share_{home}", _fair_share(found["fair_share"], home)


def _name(row: Row) -> str:
    match row["dataflow"]:
        case "hybrid":
            return f"hybrid {row['alpha']:g}"
        case "direct":
            return f"direct x{row['cluster']}"
        case other:
            return other


def _figure_4(rows: Sequence[Row], home: str) -> Figure:
    """(a) time by slices, (b) bytes."""
    figure, (times, moved) = panels(2, width=6.5)
    names = list(dict.fromkeys(_name(row) for row in rows))
    counts = sorted({row["slices"] for row in rows})
    width = 0.8 / len(counts)
    for place, count in enumerate(counts):
        own = {_name(row): row for row in rows if row["slices"] == count}
        ms = [_slowest_ms(own[name]) for name in names]
        at = [x + (place - (len(counts) - 1) / 2) * width for x in range(len(names))]
        sms = next(iter(own.values()))["sms"]
        shade = 0.35 + 0.6 * (place + 1) / len(counts)
        label = f"{count} x {sms} SMs" if count > 1 else f"{sms} SMs"
        colours = [COLOURS[name.partition(" ")[0]] for name in names]
        times.bar(at, ms, width, color=colours, alpha=shade, label=label, edgecolor="white")
    for flow, published in PUBLISHED_MS.items():
        at = names.index(flow) - width * (len(counts) - 1) / 2
        times.plot(at, published, "k_", markersize=12)
        times.annotate(f"GH200: {published}", (at, published), fontsize=7, ha="center", va="bottom")
    times.set_yscale("log")
    times.set_ylabel("ms, all slices at once")
    times.set_title(f"(a) M=10,240 N=16,384 K=4,096, W at {home}")
    times.set_xticks(range(len(names)), names, rotation=45, ha="right", fontsize=8)
    times.legend(fontsize=7)
    _bytes_panel(moved, {_name(row): row for row in rows if row["slices"] == counts[0]}, names)
    return figure


def _slowest_ms(row: Row) -> float:
    return max(row["seconds"]) * 1e3 if row["seconds"] else float("nan")


def _bytes_panel(axes: Axes, rows: Mapping[str, Row], names: Sequence[str]) -> None:
    link = [rows[name]["link_bytes"] / 1e9 for name in names]
    hbm = [(rows[name]["hbm_read_bytes"] + rows[name]["hbm_write_bytes"]) / 1e9 for name in names]
    places = range(len(names))
    axes.bar([x - 0.2 for x in places], link, 0.4, label="link", color="#4c72b0")
    axes.bar([x + 0.2 for x in places], hbm, 0.4, label="HBM, as kernels ask", color="#dd8452")
    for flow, (link_gb, hbm_gb) in PUBLISHED_GB.items():
        at = names.index(flow)
        label = "published, GH200" if flow == "sym" else None
        axes.plot([at - 0.2, at + 0.2], [link_gb, hbm_gb], "k_", markersize=10, label=label)
    axes.set_xticks(places, names, rotation=45, ha="right", fontsize=8)
    axes.set_ylabel("GB of one GEMM, counted")
    axes.set_title("(b) bytes moved")
    axes.legend(fontsize=7)


def _figure_5(found: Mapping[str, Sequence[Row]], home: str) -> Figure:
    figure, grid = plt.subplots(2, 2, figsize=(9, 6), layout="constrained", sharex="col")
    for column, (name, x) in enumerate((("by_n", "n"), ("by_m", "m"))):
        rows = found[name]
        fixed = f"M={rows[0]['m']:,}" if x == "n" else f"N={rows[0]['n']:,}"
        xs = [row[x] for row in rows]
        for flow in ("asym", "pick"):
            tflops = [row[flow]["flops_per_s"] / 1e12 for row in rows]
            use = [100 * row[flow]["link_use"] for row in rows]
            grid[0][column].plot(xs, tflops, "o-", color=COLOURS[flow], label=flow)
            grid[1][column].plot(xs, use, "o-", color=COLOURS[flow], label=flow)
        grid[0][column].set_title(f"by {x.upper()} ({fixed}, K={rows[0]['k']:,}, W at {home})")
        grid[0][column].set_ylabel("TFLOP/s")
        grid[1][column].set_ylabel("link, % of the copy engine")
        grid[1][column].set_xlabel(x.upper())
        grid[1][column].set_xscale("log", base=2)
        for row in range(2):
            grid[row][column].grid(visible=True, alpha=0.3)
            grid[row][column].legend(fontsize=7)
    return figure


def _figure_6(found: Mapping[str, Sequence[Row]], home: str) -> Figure:
    figure, grid = plt.subplots(2, 2, figsize=(11, 7), layout="constrained")
    for line, kind in enumerate(("asym", "pick")):
        for column, name in enumerate(("by_footprint", "by_chunk")):
            rows = [row for row in found[name] if row["kind"] == kind]
            _interference_panel(grid[line][column], rows, name)
            grid[line][column].set_title(f"{kind}, two slices of 64 SMs, W at {home}", fontsize=9)
    return figure


def _interference_panel(axes: Axes, rows: Sequence[Row], name: str) -> None:
    places = range(len(rows))
    solo = [sum(row["solo_tokens_per_s"]) / 1e3 for row in rows]
    together = [sum(row["together_tokens_per_s"]) / 1e3 for row in rows]
    axes.bar([x - 0.2 for x in places], solo, 0.4, label="each alone, summed", color="#8da0cb")
    axes.bar([x + 0.2 for x in places], together, 0.4, label="at once", color="#fc8d62")
    for place, row in enumerate(rows):
        axes.text(place, solo[place], f"-{row['interference']:.0%}", ha="center", va="bottom")
    if name == "by_footprint":
        ticks = [f"{row['bytes'] / 1e9:.0f} GB" for row in rows]
        axes.set_xlabel(f"both models' linears (chunks of {rows[0]['rows']:,})")
    else:
        ticks = [f"{row['rows']:,}" for row in rows]
        axes.set_xlabel(f"rows in a chunk ({' + '.join(rows[0]['models'])})")
    axes.set_xticks(places, ticks)
    axes.set_ylabel("thousand tokens/s (linears only)")
    first, last = PUBLISHED_LOST[name]
    axes.plot([], [], " ", label=f"published: -{first:.0%} to -{last:.0%}")
    axes.set_ylim(0, 1.35 * max(solo))
    axes.legend(fontsize=7)


def _figure_8(rows: Sequence[Row], home: str) -> Figure:
    sizes = sorted({row["sms"] for row in rows}, reverse=True)
    figure, axes = panels(len(sizes) + 1, width=3.6, height=3.6)
    for own, sms in zip(axes, sizes, strict=False):
        mine = [row for row in rows if row["sms"] == sms]
        own.bar(range(len(mine)), [_slowest_ms(row) for row in mine], color=COLOURS["asym"])
        own.set_ylabel("ms")
        own.set_title(f"asym on {sms} SMs, W at {home}", fontsize=9)
    mine = [row for row in rows if row["sms"] == sizes[0]]
    for shift, part in ((-0.2, "read"), (0.2, "write")):
        gigabytes = [row[f"hbm_{part}_bytes"] / 1e9 for row in mine]
        axes[-1].bar([x + shift for x in range(len(mine))], gigabytes, 0.4, label=part)
    axes[-1].set_title("HBM, as kernels ask", fontsize=9)
    axes[-1].set_ylabel("GB, counted")
    axes[-1].set_ylim(0, 1.3 * max(row["hbm_read_bytes"] / 1e9 for row in mine))
    axes[-1].legend(fontsize=7)
    for own in axes:
        own.set_xticks(range(len(mine)), [str(row["bx"]) for row in mine])
        own.set_xlabel("rows of X in a tile")
    return figure


def _fair_share(rows: Sequence[Row], home: str) -> Figure:
    figure, axes = panels(len(rows), width=4.5, height=2.8, columns=2)
    for own, row in zip(axes, rows, strict=True):
        speeds = [one / 1e9 for one in row["bytes_per_s"]]
        fair = row["fair_bytes_per_s"] / 1e9
        own.bar(range(1, len(speeds) + 1), speeds, color=COLOURS[row["dataflow"].partition(" ")[0]])
        own.axhline(fair, color="#333333", linewidth=1)
        own.axhspan(fair * (1 - FAIR_SHARE_BAR), fair * (1 + FAIR_SHARE_BAR), alpha=0.2)
        own.set_title(f"{row['dataflow']}, M={row['m']}\nworst {row['worst_off']:+.1%}", fontsize=8)
        own.set_xlabel(f"slice of 16 SMs, W at {home}")
        own.set_ylabel("GB/s; line: link / 7")
    return figure
