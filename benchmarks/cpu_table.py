"""The results of cpu_kernels.py as tables, and how several of them scale with threads:

python benchmarks/cpu_table.py FILE..."""

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

GEMM = ("level", "model", "matrix", "m", "gflop_per_s", "times_torch", "times_prepacked")
DECODE = ("level", "model", "m", "weights_gb_per_s", "share_of_read", "times_torch")
FEW_ROWS = ("way", "model", "m", "weights_gb_per_s", "share_of_read", "same_bits")
ATTENTION = ("level", "heads", "head_dim", "context", "seqs", "us", "gflop_per_s", "share_of_read")
COLUMNS = {
    "gemm": GEMM,
    "decode": DECODE,
    "few_rows": FEW_ROWS,
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


def verdict(few_rows: list[dict[str, Any]]) -> Iterator[str]:
    """The least share of the reading speed that each way of few rows reaches, the best way first.
    The default (`kFewRows` of few_rows.h) should be the first one."""
    ways = {record["way"] for record in few_rows}
    least = {w: min(r["share_of_read"] for r in few_rows if r["way"] == w) for w in ways}
    same = {w: all(r["same_bits"] for r in few_rows if r["way"] == w) for w in ways}
    for way in sorted(ways, key=lambda w: -least[w]):
        bits = "same bits" if same[way] else "OTHER BITS"
        yield f"{way}: at least {least[way]:.2f} of the reading speed, {bits}"


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
        for line in verdict(whole["results"].get("few_rows", [])):
            print(line)
    print(*scaling(list(wholes.values())), sep="\n")


if __name__ == "__main__":
    main()
