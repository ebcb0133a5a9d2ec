"""The results of cpu_kernels.py as tables: python benchmarks/cpu_table.py FILE..."""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

GEMM = ("level", "model", "matrix", "m", "gflop_per_s", "times_torch", "times_prepacked")
DECODE = ("level", "model", "m", "weights_gb_per_s", "share_of_read", "times_torch")
ATTENTION = ("level", "heads", "head_dim", "context", "seqs", "us", "gflop_per_s", "share_of_read")
COLUMNS = {
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


def main() -> None:
    for name in sys.argv[1:]:
        whole = json.loads(Path(name).read_text())
        machine = whole["machine"]
        print(
            f"\n{name}: {machine['cpu']}, {whole['parameters']}, load {machine['load_before']:.1f}"
        )
        for section, columns in COLUMNS.items():
            print(f"\n{section}\n{table(whole['results'][section], columns)}")


if __name__ == "__main__":
    main()
