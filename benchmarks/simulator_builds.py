"""How fast two compiled builds of the simulator are beside each other, in turns: JSON.

python benchmarks/simulator_builds.py NAME=SOURCES,BUILD[,PYTHON] NAME=... [--loads served,streams]
    [--rounds N] [--requests N] [--out FILE]

Each build has its sources (a checkout's `src`), its folder (`python -m c2cserve.sim.compiled` makes
it) and its Python. Each is a process that runs a load when asked. Ratios are those of CPU seconds
of neighbouring runs, to the first build's. The median counts.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).parent


def serve(requests: int) -> None:
    """Run the loads that are asked for, and print what each took."""
    from c2cserve.sim import compiled

    assert compiled.use(), compiled.status()
    from simulator_loads import cases  # what it imports is compiled from here on

    for line in sys.stdin:
        for name, result in cases(requests, 0, only=line.strip()):
            print(json.dumps({"load": name, **result}), flush=True)


def started(text: str, requests: int) -> "subprocess.Popen[str]":
    sources, build, *python = text.split(",")
    environment = {**os.environ, "PYTHONPATH": sources, "C2CSERVE_COMPILED": build}
    command = [*(python or [sys.executable]), __file__, "--serve", "--requests", str(requests)]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )


def ask(build: "subprocess.Popen[str]", load: str) -> dict[str, Any]:
    assert build.stdin is not None
    assert build.stdout is not None
    build.stdin.write(load + "\n")
    build.stdin.flush()
    return json.loads(build.stdout.readline())


def compare(builds: dict[str, "subprocess.Popen[str]"], load: str, rounds: int) -> dict[str, Any]:
    took: dict[str, list[float]] = {name: [] for name in builds}
    first, *others = names = list(builds)
    for number in range(rounds + 1):  # the first round warms up
        results = {name: ask(builds[name], load) for name in (names if number % 2 else names[::-1])}
        assert len({(one["tokens"], one["met"]) for one in results.values()}) == 1, "not the same"
        for name in names if number else ():
            took[name].append(results[name]["us_per_request"])
    pairs = {name: zip(took[name], took[first], strict=True) for name in others}
    return {
        "us_per_request": {name: round(median(took[name]), 1) for name in names},
        "ratio": {name: round(median(a / b for a, b in both), 3) for name, both in pairs.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("builds", nargs="*")
    parser.add_argument("--loads", default="served,busy,streams")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.requests)
        return
    from report import report

    named = dict(one.split("=", 1) for one in options.builds)
    builds = {name: started(text, options.requests) for name, text in named.items()}
    loads = options.loads.split(",")
    results = {load: compare(builds, load, options.rounds) for load in loads}
    report(results, options.out, requests=options.requests, rounds=options.rounds)
    for build in builds.values():
        build.communicate("")


if __name__ == "__main__":
    main()
