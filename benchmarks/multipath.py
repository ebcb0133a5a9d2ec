"""What `c2cserve multipath` does for programs that know nothing of it: with it and without it.

python benchmarks/multipath.py [--gigabytes 16] [--parts small,sizes,allocations,model] [--out FILE]

It needs two GPUs. Each part is a process (multipath_program.py), once plain and once with several
links. The result's `bars` are what the library is held to.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from report import report

from c2cserve.transfer.multipath import multipath_environment

PROGRAM = Path(__file__).with_name("multipath_program.py")
LEAST = "C2CSERVE_MULTIPATH_LEAST_BYTES"
_TIMEOUT_S = 240


def run(
    *words: str, preloaded: bool, timeout_s: float = _TIMEOUT_S, **variables: str
) -> dict[str, Any]:
    """Run a part of the program, and return what it printed. What it says goes to standard error.

    Raises `subprocess.SubprocessError` if it fails, or takes too long.
    """
    environment = dict(os.environ) | variables
    if preloaded:
        environment = multipath_environment(environment, report=True)
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *words], env=environment, check=True, text=True,
        stdout=subprocess.PIPE, timeout=timeout_s,
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


def both(*words: str, **variables: str) -> dict[str, dict[str, Any]]:
    """A part, without the library and with it."""
    return {
        name: run(*words, preloaded=name == "spread", **variables) for name in ("plain", "spread")
    }


def by_size(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Rows with both times, and from which size on the library's is shorter."""
    rows = [
        {**plain, "us_spread": spread["us"], "faster": plain["us"] / spread["us"]}
        for plain, spread in zip(found["plain"]["rows"], found["spread"]["rows"], strict=True)
    ]
    even: dict[str, int | None] = {}
    for what in ("in", "out"):
        slower = [row["mib"] for row in rows if row["what"] == what and row["faster"] < 1]
        larger = [
            row["mib"]
            for row in rows
            if row["what"] == what and row["mib"] > max(slower, default=0)
        ]
        even[what] = min(larger, default=None)
    return {"rows": rows, "faster_from_mib": even}


def bars_of(found: dict[str, Any]) -> list[dict[str, Any]]:
    bars: list[dict[str, Any]] = []

    def bar(name: str, value: float, bound: float, *, least: bool) -> None:
        holds = value >= bound if least else value <= bound
        bars.append({"bar": name, "value": value, "bound": bound, "holds": holds})

    if "small" in found:
        times = found["small"]
        bar(
            "small copies: more microseconds", times["spread"]["us"] - times["plain"]["us"], 2.0,
            least=False,
        )  # fmt: skip
    if "model" in found:
        rates = [found["model"][one]["gb_per_s"] for one in ("spread", "plain")]
        for number, name in enumerate(("with allocations", "without")):
            bar(f"Module.to, {name}", rates[0][number] / rates[1][number], 1.7, least=True)
        right = all(one["right"] for one in found["model"].values())
        bar("Module.to: bytes are right", float(right), 1.0, least=True)
    return bars


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=int, default=16)
    parser.add_argument("--parts", default="small,sizes,allocations,model")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    began = time.monotonic()
    found: dict[str, Any] = {}
    for part in options.parts.split(","):
        words = (str(options.gigabytes),) if part == "model" else ()
        variables = {LEAST: str(1 << 20)} if part == "sizes" else {}
        found[part] = both(part, *words, **variables)
    if "sizes" in found:
        found["sizes"] = by_size(found["sizes"])
    found["bars"] = bars_of(found)
    found["took_s"] = time.monotonic() - began
    report(found, options.out, gigabytes=options.gigabytes)


if __name__ == "__main__":
    main()
