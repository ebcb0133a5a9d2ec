"""Verdicts of parts of a GPU check: one small file a run, and all of them put together.

`record` writes one, for gpu_check and test-gpu. `merge` is scripts/gpu_verdict.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal
from xml.etree import ElementTree

SCRIPTS = Path(__file__).parent
CHECKS = ("gpu_check", "test-gpu")
PATTERN = "verdict_*.json"
OUT_OF_TIME = (124, 137)
"""Exit statuses of `timeout`."""

State = Literal["passed", "failed", "empty", "partial", "missing"]
MEANING: Mapping[State, str] = {
    "passed": "",
    "failed": "",
    "empty": "no test ran",
    "partial": "only a narrowed run",
    "missing": "never run",
}


@dataclass(frozen=True)
class Counts:
    passed: int
    failed: int
    skipped: int


@dataclass(frozen=True)
class Run:
    """One run of one part."""

    part: str
    exit: int
    seconds: float
    gpu: str
    """As the driver names it, with their number if there are several; "none" without one."""
    date: str
    """UTC, ISO 8601."""
    commit: str
    selection: str
    """What the part was narrowed to; empty for the whole part."""
    tests: Counts | None
    """None for a part that is not pytest's, or that wrote no report."""

    @property
    def state(self) -> State:
        if self.exit:
            return "failed"
        if self.selection:
            return "partial"
        if self.tests is not None and not self.tests.passed:
            return "empty"
        return "passed"


# ---- one run ------------------------------------------------------------------------------------


def counts_of(junit: Path) -> Counts | None:
    """Return the counts of pytest's own report, None if there is none."""
    try:
        root = ElementTree.parse(junit).getroot()
    except (OSError, ElementTree.ParseError):
        return None
    counts: Counter[str] = Counter()
    for suite in root.iter("testsuite"):
        for name in ("tests", "failures", "errors", "skipped"):
            counts[name] += int(suite.get(name, "0"))
    failed = counts["failures"] + counts["errors"]
    return Counts(counts["tests"] - failed - counts["skipped"], failed, counts["skipped"])


def gpu_kind() -> str:
    """Return the GPUs of this machine, such as "NVIDIA H200" or "2 x NVIDIA H200"."""
    names = _by_smi() or _by_proc()
    if not names:
        return "none"
    return " + ".join(
        name if count == 1 else f"{count} x {name}" for name, count in Counter(names).items()
    )


def _by_smi() -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return [
        line.strip() for line in done.stdout.splitlines() if line.strip() and not done.returncode
    ]


def _by_proc() -> list[str]:
    names: list[str] = []
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        for line in path.read_text().splitlines():
            key, _, value = line.partition(":")
            if key == "Model":
                names.append(value.strip())
    return names


def commit() -> str:
    """Return this checkout's commit; for a copy without history, $C2CSERVE_COMMIT, or nothing."""
    given = os.environ.get("C2CSERVE_COMMIT", "")
    if shutil.which("git") is None:
        return given
    command = ["git", "-C", str(SCRIPTS), "rev-parse", "--short", "HEAD"]
    return (
        subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or given
    )


def record(given: argparse.Namespace) -> int:
    now = datetime.now(UTC)
    run = Run(
        part=given.part, exit=given.exit, seconds=given.seconds, gpu=gpu_kind(),
        date=now.isoformat(timespec="seconds"), commit=commit(), selection=given.selection,
        tests=counts_of(given.junit),
    )  # fmt: skip
    given.out.mkdir(parents=True, exist_ok=True)
    path = given.out / f"verdict_{run.part}_{now:%Y%m%dT%H%M%S}.json"
    path.write_text(json.dumps(asdict(run), indent=1) + "\n")
    return 0


# ---- all of them --------------------------------------------------------------------------------


def read_runs(folders: Iterable[Path]) -> list[Run]:
    """Return all runs, the oldest first. A file that was copied counts once. Raises ValueError for
    a file that is no verdict."""
    found: set[Run] = set()
    for folder in folders:
        for path in folder.rglob(PATTERN):
            try:
                fields: dict[str, Any] = json.loads(path.read_text())
                tests = fields.pop("tests")
                found.add(Run(**fields, tests=None if tests is None else Counts(**tests)))
            except (ValueError, TypeError, KeyError) as error:
                raise ValueError(f"{path} is no verdict: {error}") from error
    return sorted(found, key=lambda run: (run.date, run.part))


def required_parts() -> list[str]:
    """Return the parts of a whole check, as the scripts list them."""
    lists = [
        subprocess.run([SCRIPTS / name, "--list"], capture_output=True, text=True, check=True)
        for name in CHECKS
    ]
    return list(dict.fromkeys(line for one in lists for line in one.stdout.split()))


def decisive(runs: Sequence[Run]) -> Run | None:
    """Return the latest run of the whole part, or a narrowed one after it that failed; the latest
    of all if there is only a narrowed one."""
    whole = [run for run in runs if run.exit or not run.selection]
    return (whole or list(runs) or [None])[-1]


def part_verdict(runs: Sequence[Run]) -> dict[str, Any]:
    run = decisive(runs)
    if run is None:
        return {"state": "missing"}
    fields = {name: value for name, value in asdict(run).items() if name not in ("part", "gpu")}
    failures = sum(bool(one.exit) for one in runs)
    return {"state": run.state, **fields, "runs": len(runs), "failed_runs": failures}


def merge_runs(runs: Sequence[Run], required: Sequence[str]) -> dict[str, Any]:
    """Return the verdict. A kind of GPU passed if all required parts did, and nothing failed."""
    kinds: dict[str, dict[str, list[Run]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        kinds[run.gpu][run.part].append(run)
    verdict: dict[str, Any] = {}
    for kind, by_part in sorted(kinds.items()):
        names = [*required, *sorted(by_part.keys() - set(required))]
        parts = {name: part_verdict(by_part.get(name, [])) for name in names}
        passed = all(parts[name]["state"] == "passed" for name in required) and not any(
            part["state"] == "failed" for part in parts.values()
        )
        verdict[kind] = {"passed": passed, "parts": parts}
    return {"passed": bool(verdict) and all(k["passed"] for k in verdict.values()), "gpus": verdict}


def table(verdict: Mapping[str, Any]) -> str:
    rows = [("GPU", "part", "state", "seconds", "tests", "commit", "date", "")]
    for kind, found in verdict["gpus"].items():
        rows += [_row(kind, name, part) for name, part in found["parts"].items()]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)


def _row(kind: str, name: str, part: Mapping[str, Any]) -> tuple[str, ...]:
    state: State = part["state"]
    if state == "missing":
        return kind, name, state, "", "", "", "", MEANING[state]
    notes = [MEANING[state]] if MEANING[state] else []
    if part["exit"]:
        notes.append("out of time" if part["exit"] in OUT_OF_TIME else f"exit {part['exit']}")
    if part["selection"]:
        notes.append(part["selection"])
    if part["failed_runs"] and state != "failed":
        notes.append(f"{part['failed_runs']} of {part['runs']} runs failed before")
    tests = part["tests"]
    counts = "" if tests is None else "{passed} passed, {failed} failed, {skipped} skipped"
    return (
        kind, name, state, f"{part['seconds']:.0f}", counts.format(**(tests or {})),
        part["commit"], part["date"], "; ".join(notes),
    )  # fmt: skip


def merge(given: argparse.Namespace) -> int:
    missing = [str(folder) for folder in given.folders if not folder.is_dir()]
    if missing:
        sys.exit(f"gpu_verdict: no such folder: {', '.join(missing)}")
    try:
        runs = [run for run in read_runs(given.folders) if given.gpu in run.gpu]
    except ValueError as error:
        sys.exit(f"gpu_verdict: {error}")
    if not runs:
        sys.exit("gpu_verdict: no verdicts there")
    required = given.only.split(",") if given.only else required_parts()
    verdict = merge_runs(runs, required)
    print(table(verdict))
    if given.out is not None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        latest = max(runs, key=lambda run: run.date)
        head = {
            "date": latest.date,
            "commit": latest.commit,
            "machine": {"gpus": sorted({run.gpu for run in runs})},
        }
        given.out.write_text(json.dumps(head | verdict, indent=1) + "\n")
    return 0 if verdict["passed"] else 1


def main() -> int:
    parser = argparse.ArgumentParser(prog="gpu_parts", description=__doc__)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("record", help="write the verdict of one run of a part")
    one.add_argument("--part", required=True)
    one.add_argument("--exit", type=int, required=True)
    one.add_argument("--seconds", type=float, required=True)
    one.add_argument("--junit", type=Path, required=True, help="pytest's report, if it wrote one")
    one.add_argument("--selection", default="")
    one.add_argument("--out", type=Path, required=True)
    one.set_defaults(run=record)
    many = commands.add_parser("merge", help="put runs together")
    many.add_argument("folders", type=Path, nargs="+", metavar="DIR")
    many.add_argument("--gpu", default="", help="only of kinds that contain this")
    many.add_argument("--only", default="", help="the parts that are asked for, with commas")
    many.add_argument("--out", type=Path, help="the verdict as JSON")
    many.set_defaults(run=merge)
    given = parser.parse_args()
    return given.run(given)


if __name__ == "__main__":
    sys.exit(main())
