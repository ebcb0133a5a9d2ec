"""Every simulated result again, on the present policies: studies, ratios, places, rotation.

python benchmarks/studies.py [--list] [--only TEXT] [--again] [--traces DIR]

A result is current if no source that it depends on has changed since its commit, and it comes from
the command that is said here. Others are simulated, one after another, and written to
`benchmarks/results` as soon as each is done. So a run that was stopped goes on where it was. The
rows of `docs/benchmarks.md` get the new dates and commits, and pictures in `docs/images` are drawn
anew. Figures on other pages are not changed: `tests/cpu/test_documents.py` names those that differ.

Sources must be committed, because a result names its commit. Results that need a trace which is
not packaged are left out without `--traces`. Compiled policies are used if they were built
(`python -m c2cserve.sim.compiled`), which takes a fifth of the time. `--list` simulates nothing,
and `--again` simulates what is current too.
"""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import copyfile
from tempfile import TemporaryDirectory
from time import perf_counter

ROOT = Path(__file__).parent.parent
RESULTS, IMAGES = ROOT / "benchmarks" / "results", ROOT / "docs" / "images"
PAGE = ROOT / "docs" / "benchmarks.md"
_SIMULATE = ("-m", "c2cserve", "simulate")
_SOURCES = (
    "core", "policy", "runtime/driver.py", "sim/data", "sim/policies", "sim/report.py",
    "sim/run.py", "sim/workload", "sim/world",
)  # fmt: skip
_NOT_SIMULATED = "policy/fleet"
_STUDIES = "src/c2cserve/sim/studies"


@dataclass(frozen=True, slots=True)
class Result:
    """A result's file, and the command that makes it."""

    name: str
    arguments: tuple[str, ...]
    sources: tuple[str, ...] = ()
    """Those beside the simulator's."""
    traces: str = ""
    """OPTION/ gets the folder of traces, OPTION/FILE a file in it."""
    plots: bool = False

    @property
    def path(self) -> Path:
        return RESULTS / f"{self.name}.json"

    def command(self, out: Path, plots: Path, traces: Path | None) -> list[str]:
        command = [sys.executable, *self.arguments]
        command += ["--json" if self.arguments[:3] == _SIMULATE else "--out", str(out)]
        if self.plots:
            command += ["--plots", str(plots)]
        if self.traces and traces is not None:
            option, _, file = self.traces.partition("/")
            command += [option, str(traces / file)]
        return command


def _study(name: str, traces: str = "", beside: tuple[str, ...] = ()) -> Result:
    sources = tuple(f"{_STUDIES}/{one}.py" for one in (name, *beside))
    command = (*_SIMULATE, "--study", name)
    return Result(f"study_{name}", command, sources, traces, plots=not traces)


def _benchmark(name: str, script: str, *options: str, beside: tuple[str, ...] = ()) -> Result:
    sources = (*(f"benchmarks/{one}.py" for one in (script, *beside)), f"{_STUDIES}/slinfer.py")
    return Result(name, (f"benchmarks/{script}.py", *options), sources)


_ROTATION = ("rotation_live", "mix_simulated", "mix_machine", "mix_times")
_TWO = ("--beside", "llama-3b", "--beside-rate", "1", "--rates", "6,8,10,12,16")
RATIOS = _benchmark("policy_ratios", "policy_ratios", beside=("ratio_loads",))
ALL = (
    _study("c2cserve", beside=("interference", "hybrid")),
    _study("superinfer"),
    _study("policies"),
    _study("slinfer"),
    _study("gentd26", "--trace/gentd26_requests.csv.gz"),
    Result(RATIOS.name, RATIOS.arguments, RATIOS.sources, "--traces/"),
    _benchmark("places", "places", beside=("ratio_loads",)),
    _benchmark("rotation_simulated", "rotation_simulated", beside=_ROTATION),
    _benchmark(
        "rotation_simulated_two", "rotation_simulated", *_TWO, "--orders", "rotation,none",
        beside=_ROTATION,
    ),
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="say which results are current")
    parser.add_argument("--only", default="", help="results whose name contains this")
    parser.add_argument("--again", action="store_true", help="current ones, too")
    parser.add_argument("--traces", type=Path, help="folder with traces that are not packaged")
    given = parser.parse_args(arguments)
    if not given.list and (
        changed := _git("status", "--porcelain", "--", "src", "benchmarks/*.py")
    ):
        sys.exit(f"commit these first, as results name their commit:\n{changed}")
    for one in ALL:
        if given.only not in one.name:
            continue
        why = "--again" if given.again else outdated(one)
        if given.list or not why:
            print(f"{one.name}: {why or 'current'}", flush=True)
        elif one.traces and given.traces is None:
            print(f"{one.name}: {why}, and needs --traces", flush=True)
        else:
            print(f"{one.name}: {why}", flush=True)
            took_s = _make(one, given.traces)
            print(f"{one.name}: {took_s:.0f} s", flush=True)


def outdated(one: Result) -> str:
    """Return why a result must be simulated again; "" if it is current."""
    if not one.path.exists():
        return "missing"
    result = json.loads(one.path.read_text())
    if "parameters" not in result:
        return "without its parameters"
    commit = str(result["commit"])
    if result["parameters"].get("quick"):
        return "of a small part"
    package = ROOT / "src" / "c2cserve"
    paths = [
        *(str(package / name) for name in _SOURCES),
        *(str(ROOT / name) for name in one.sources),
    ]
    paths.append(f":(exclude){package / _NOT_SIMULATED}")
    changed = _git("diff", "--name-only", commit, "--", *paths).split()
    if not changed:
        return ""
    return f"{len(changed)} sources changed since {commit}, {changed[0]} first"


def _make(one: Result, traces: Path | None) -> float:
    began_s = perf_counter()
    with TemporaryDirectory() as made:
        out, plots = Path(made) / "result.json", Path(made) / "plots"
        subprocess.run(one.command(out, plots, traces), cwd=ROOT, check=True)
        copyfile(out, one.path)
        for drawn in plots.glob("*.png"):
            if (shown := IMAGES / drawn.name).exists():
                copyfile(drawn, shown)
    result = json.loads(one.path.read_text())
    page = PAGE.read_text().splitlines(keepends=True)
    PAGE.write_text("".join(dated(page, one.path.name, result["date"][:10], result["commit"])))
    return perf_counter() - began_s


def dated(lines: Sequence[str], name: str, date: str, commit: str) -> Iterator[str]:
    """Yield the page's lines with the date and the commit of one result's row."""
    for line in lines:
        if line.startswith(f"| [`{name}`]"):
            line = re.sub(r"\| \d{4}-\d\d-\d\d \| [^|]*\|", f"| {date} | {commit} |", line)
        yield line


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
