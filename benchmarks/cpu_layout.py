"""Which number of CPU slices and threads is best on this machine, for one user and for many.

    python benchmarks/cpu_layout.py [--shape qwen2.5-0.5b] [--layouts 1x16,2x8,4x4]
        [--loads 1:1,4:1,4:4] [--prompt 128] [--output 128] [--rounds 5] [--out FILE]

A layout is SLICESxTHREADS, as `c2cserve serve --slices S --threads T`; `default` is what the server
chooses. A load is USERS:MODELS. Each round starts a server for each layout, in turns, and measures
closed loops of the users, whose requests ask for the models in turn (closed_loop.py). Results are
medians over rounds, with the least and the most: rates that differ from start to start are a fault
of their own. So what the system did with the workers' threads is recorded beside them:

    waited       time in which a thread could run and had no processor, of the time it could run
    moves        times that a worker's threads were switched out against their will, per second

Where rates differ and neither does, the memory or the clock rate differs.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from catalogue_files import Pick, pick, write_catalogue
from catalogue_server import Server
from closed_loop import measure
from gpu_models import SHAPES, config_of
from report import report

from c2cserve.devices.discover import discover
from c2cserve.devices.slices import plan_slices

_READY_S = 180.0


@dataclass(frozen=True, slots=True)
class Ran:
    """What the threads of some processes did so far."""

    ran_s: float
    waited_s: float
    switches: int
    at_s: float

    def until(self, later: "Ran") -> dict[str, float]:
        ran_s, waited_s = later.ran_s - self.ran_s, later.waited_s - self.waited_s
        return {
            "waited": waited_s / max(ran_s + waited_s, 1e-9),
            "moves": (later.switches - self.switches) / max(later.at_s - self.at_s, 1e-9),
        }


def ran(pids: Sequence[int]) -> Ran:
    ran_ns = waited_ns = switches = 0
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").iterdir():
            run, wait, _ = map(int, (task / "schedstat").read_text().split())
            ran_ns, waited_ns = ran_ns + run, waited_ns + wait
            for line in (task / "status").read_text().splitlines():
                if line.startswith("nonvoluntary_ctxt_switches"):
                    switches += int(line.split()[1])
    return Ran(ran_ns / 1e9, waited_ns / 1e9, switches, time.monotonic())


def layouts_of(text: str) -> list[str]:
    """Return the layouts to measure: by default what divides this machine's cores evenly."""
    if text:
        return text.split(",")
    cores = len(discover().cores)
    counts = [count for count in (1, 2, 4, 8) if count <= cores]
    return ["default", *(f"{count}x{cores // count}" for count in counts)]


def loads_of(text: str) -> list[tuple[int, int]]:
    pairs = (one.partition(":") for one in text.split(","))
    return [(int(users), int(models or 1)) for users, _, models in pairs]


def arguments_of(layout: str) -> list[str]:
    if layout == "default":
        return []
    slices, threads = layout.split("x")
    return ["--slices", slices, "--threads", threads]


def round_of(
    layout: str, catalog: Path, made: Pick, work: Path, given: argparse.Namespace
) -> list[dict[str, float | int | str]]:
    """Start a server of a layout; return a row for each load."""
    arguments = [
        "--gpu-slices", "none", "--pool-dir", str(work), "--pool-bytes", str(2 * made.bytes),
        *arguments_of(layout),
    ]  # fmt: skip
    with Server(catalog, work / "log", arguments) as server:
        server.wait_ready(_READY_S)
        pids = [int(one["pid"]) for one in server.state()["slices"]]
        rows: list[dict[str, float | int | str]] = []
        for users, models in given.loads:
            one = argparse.Namespace(users=[users], prompt=given.prompt, output=given.output)
            asked = [entry.id for entry in made.entries[:models]]
            before = ran(pids)
            [row] = measure(server.url, asked, config_of(given.shape).vocab, one)
            rows.append({"layout": layout, "models": models, **row, **before.until(ran(pids))})
        return rows


def summary(rows: Sequence[dict[str, float | int | str]]) -> list[dict[str, Any]]:
    """Return medians and spreads by layout and load, the best layout of each load first."""
    cells: dict[tuple[object, object, object], list[dict[str, float | int | str]]] = {}
    for row in rows:
        cells.setdefault((row["users"], row["models"], row["layout"]), []).append(row)
    found: list[dict[str, Any]] = []
    for (users, models, layout), ones in cells.items():
        rates = [float(one.get("output_tokens_per_s", 0.0)) for one in ones]
        found.append({
            "users": users, "models": models, "layout": layout,
            "tokens_per_s": statistics.median(rates), "least": min(rates), "most": max(rates),
            **{name: statistics.median(float(one[name]) for one in ones if name in one)
               for name in ("tpot_p50_ms", "ttft_p50_ms", "waited", "moves") if name in ones[0]},
        })  # fmt: skip
    return sorted(found, key=lambda cell: (cell["users"], cell["models"], -cell["tokens_per_s"]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="qwen2.5-0.5b", choices=SHAPES)
    parser.add_argument("--layouts", type=layouts_of, default="")
    parser.add_argument("--loads", type=loads_of, default="1:1,4:1,4:4", help="USERS:MODELS,...")
    parser.add_argument("--prompt", type=int, default=128, help="tokens")
    parser.add_argument("--output", type=int, default=128, help="tokens")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="JSON")
    given = parser.parse_args()
    planned = plan_slices(discover())
    default = {"slices": len(planned), "threads": [len(one.cpus) for one in planned]}
    rows: list[dict[str, float | int | str]] = []
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        models = max(models for _, models in given.loads)
        made = pick(models, 1 << 60, 1, ((given.shape, 1),))
        catalog = write_catalogue(Path(folder) / "catalogue", made)
        for number in range(given.rounds):
            order = given.layouts if number % 2 == 0 else given.layouts[::-1]
            for layout in order:
                rows += round_of(layout, catalog, made, Path(folder), given)
            # After each round: what a run that is ended has measured is not lost.
            report({"default": default, "best": summary(rows), "rounds": rows}, given.out,
                   show=False, shape=given.shape, prompt=given.prompt, output=given.output,
                   rounds=number + 1)  # fmt: skip
    for cell in summary(rows):
        print(json.dumps(cell))


if __name__ == "__main__":
    main()
