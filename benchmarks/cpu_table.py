"""The results of cpu_kernels.py as tables: python benchmarks/cpu_table.py FILE..."""

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
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


def main() -> None:
    for name in sys.argv[1:]:
        whole = json.loads(Path(name).read_text())
        machine = whole["machine"]
        print(
            f"\n{name}: {machine['cpu']}, {whole['parameters']}, load {machine['load_before']:.1f}"
        )
        for section, columns in COLUMNS.items():
            if records := whole["results"].get(section):
                print(f"\n{section}\n{table(records, columns)}")
        for line in verdict(whole["results"].get("few_rows", [])):
            print(line)


if __name__ == "__main__":
    main()
