"""The results of cpu_kernels.py as tables, and how several of them scale with threads:

python benchmarks/cpu_table.py FILE..."""

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

GEMM = ("level", "model", "matrix", "m", "gflop_per_s", "times_torch", "times_prepacked")
DECODE = ("level", "model", "m", "weights_gb_per_s", "share_of_read", "times_torch")
ATTENTION = ("level", "heads", "head_dim", "context", "seqs", "us", "gflop_per_s", "share_of_read")
TILES = ("w_kib", "x_kib", "step_ns", "gflop_per_s")
COLUMNS = {
    "tiles": TILES,
    "gemm": GEMM,
    "decode": DECODE,
    "prompt_attention": ATTENTION,
    "decode_attention": ATTENTION,
}


def shown(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def table(records: Iterable[dict[str, Any]], columns: tuple[str, ...]) -> str:
    rows = [columns, *(tuple(shown(r.get(c, "")) for c in columns) for r in records)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )


# What is compared, by which speed, in which shapes, and over which level.
COMPARED = (
    ("decode", "weights_gb_per_s", ("model",), "avx512"),
    ("gemm", "gflop_per_s", ("model", "matrix"), "avx512"),
    ("gemm", "gflop_per_s", ("model", "matrix"), "amx/chunks"),
)


def verdict(wholes: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Every level, and every way of many rows, by its speed over that of another, for each number
    of rows: the geometric mean and the least of all shapes and numbers of threads, the best first.
    """
    wholes = list(wholes)
    for section, speed, shape, base in COMPARED:
        gains: dict[int, dict[str, list[float]]] = {}
        wrong: set[str] = set()
        for whole in wholes:
            records = whole["results"].get(section, [])
            speeds = {(*(r[k] for k in shape), r["m"], r["level"]): r[speed] for r in records}
            wrong |= {r["level"] for r in records if not r.get("same_bits", 1)}
            for (*where, m, level), rate in speeds.items():
                if usual := speeds.get((*where, m, base)):
                    gains.setdefault(m, {}).setdefault(level, []).append(rate / usual)
        for m, levels in gains.items():
            yield f"\n{section}, {m} row{'s' if m > 1 else ''}, speed over that of {base}:"
            for level in sorted(levels, key=lambda name: -geometric_mean(levels[name])):
                bits = ", OTHER BITS" if level in wrong else ""
                ratios = levels[level]
                yield f"  {geometric_mean(ratios):.2f} {level}, least {min(ratios):.2f}{bits}"


def scaling(wholes: list[dict[str, Any]]) -> Iterator[str]:
    """Speeds of runs with more threads over those with the fewest, as a share of linear: the least
    and the median of all products, and of decoding as a share of what reading gained."""
    runs = sorted(wholes, key=lambda whole: whole["parameters"]["threads"])
    few = runs[0]
    for many in runs[1:]:
        threads = [run["parameters"]["threads"] for run in (few, many)]
        times = threads[1] / threads[0]
        for section, speed, key in (
            ("gemm", "gflop_per_s", ("level", "model", "matrix", "m")),
            ("decode", "weights_gb_per_s", ("level", "model", "m")),
            ("decode", "read_gb_per_s", ("level", "model", "m")),
        ):
            before = {tuple(r[k] for k in key): r[speed] for r in few["results"].get(section, [])}
            gains: dict[str, list[float]] = {}
            for r in many["results"].get(section, []):
                if (name := tuple(r[k] for k in key)) in before:
                    gains.setdefault(r["level"], []).append(r[speed] / before[name] / times)
            for level, shares in gains.items():
                yield (
                    f"{level}, {threads[1]} threads for {threads[0]}, {section} {speed}: "
                    f"{min(shares):.2f} of linear at least, {median(shares):.2f} median"
                )


BAR = 0.85
"""Of oneDNN's speed: what products with prompts should reach."""


def missed(whole: dict[str, Any]) -> Iterator[str]:
    """For each level, and each way of many rows: how many products reach the bar beside torch, and
    beside torch with prepacked weights, and which do not."""
    records = whole["results"].get("gemm", [])
    for level in dict.fromkeys(r["level"] for r in records):
        for over in ("times_torch", "times_prepacked"):
            cells = [r for r in records if r["level"] == level and over in r]
            below = [
                f"{r['model']} {r['matrix']} {r['m']} rows {r[over]:.2f}"
                for r in cells
                if r[over] < BAR
            ]
            if cells:
                met = f"{len(cells) - len(below)} of {len(cells)}"
                yield f"{level}, {over} of {BAR} at least: {met}{'; not ' * bool(below)}" + (
                    ", ".join(below)
                )


def main() -> None:
    wholes = {name: json.loads(Path(name).read_text()) for name in sys.argv[1:]}
    for name, whole in wholes.items():
        machine = whole["machine"]
        print(
            f"\n{name}: {machine['cpu']}, {whole['parameters']}, load {machine['load_before']:.1f}"
        )
        for section, columns in COLUMNS.items():
            if records := whole["results"].get(section):
                print(f"\n{section}\n{table(records, columns)}")
        print("", *missed(whole), sep="\n")
    print(*verdict(wholes.values()), sep="\n")
    print(*scaling(list(wholes.values())), sep="\n")


if __name__ == "__main__":
    main()
