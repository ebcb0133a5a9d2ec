"""Parts of a GPU check: recorded one by one, put together afterwards."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import gpu_parts
import pytest
from gpu_parts import Counts, Run, counts_of, merge_runs, required_parts, table

ROOT = Path(__file__).parents[3]
SCRIPTS = ROOT / "scripts"
H100, H200 = "NVIDIA H100 80GB HBM3", "2 x NVIDIA H200"
REQUIRED = ("build", "tests_gemm")


def run_of(part: str, exit_: int = 0, hour: int = 1, **fields: Any) -> Run:
    known: dict[str, Any] = {
        "seconds": 12.0, "gpu": H100, "date": f"2026-11-22T{hour:02}:00:00+00:00",
        "commit": "abc", "selection": "", "tests": None,
    }  # fmt: skip
    return Run(part, exit_, **{**known, **fields})


def write(folder: Path, runs: Sequence[Run]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number, run in enumerate(runs):
        (folder / f"verdict_{run.part}_{number}.json").write_text(json.dumps(asdict(run)))
    return folder


def verdict(*arguments: object) -> "subprocess.CompletedProcess[str]":
    command = [SCRIPTS / "gpu_verdict", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def states(merged: dict[str, Any], kind: str = H100) -> dict[str, str]:
    return {name: part["state"] for name, part in merged["gpus"][kind]["parts"].items()}


def test_folders_are_put_together_by_kind_of_gpu(tmp_path: Path) -> None:
    first = write(tmp_path / "a" / "b", [run_of("build"), run_of("build", gpu=H200)])
    second = write(tmp_path / "c", [run_of("tests_gemm", tests=Counts(5, 0, 1)), run_of("build")])
    out = tmp_path / "out" / "gpu_verdict.json"
    done = verdict(first.parent, second, "--only", "build,tests_gemm", "--out", out)
    assert done.returncode == 1, "the other kind lacks a part"
    merged = json.loads(out.read_text())
    assert merged["date"]
    assert merged["machine"]["gpus"]
    assert "commit" in merged
    assert states(merged) == {"build": "passed", "tests_gemm": "passed"}
    assert states(merged, H200) == {"build": "passed", "tests_gemm": "missing"}
    assert [merged["gpus"][kind]["passed"] for kind in (H100, H200)] == [True, False]
    assert not merged["passed"]
    assert merged["gpus"][H100]["parts"]["build"]["runs"] == 1, "the same file in two folders"
    assert "5 passed, 0 failed, 1 skipped" in done.stdout
    assert "never run" in done.stdout
    done = verdict(first.parent, second, "--only", "build,tests_gemm", "--gpu", "H100")
    assert done.returncode == 0
    assert "H200" not in done.stdout


@pytest.mark.parametrize(
    ("runs", "state"),
    [
        ([run_of("build", 1, 1), run_of("build", 0, 2)], "passed"),
        ([run_of("build", 0, 1), run_of("build", 1, 2)], "failed"),
        ([run_of("build", 0, 1, selection="-k x")], "partial"),
        ([run_of("build", 0, 1), run_of("build", 0, 2, selection="-k x")], "passed"),
        ([run_of("build", 0, 1), run_of("build", 1, 2, selection="-k x")], "failed"),
        ([run_of("build", 1, 1, selection="-k x"), run_of("build", 0, 2)], "passed"),
        ([run_of("build", 0, 1, tests=Counts(0, 0, 7))], "empty"),
        ([run_of("build", 124, 1, tests=Counts(3, 0, 0))], "failed"),
    ],
)
def test_the_latest_run_of_the_whole_part_counts(runs: list[Run], state: str) -> None:
    merged = merge_runs(runs, ["build"])
    assert states(merged) == {"build": state}
    assert merged["passed"] == (state == "passed")


def test_what_nothing_asks_for_must_not_fail_either() -> None:
    runs = [run_of("build"), run_of("counters")]
    assert merge_runs(runs, ["build"])["passed"]
    assert not merge_runs([*runs, run_of("counters", 1, 2)], ["build"])["passed"]


def test_the_table_says_why() -> None:
    runs = [run_of("build", 1, 1), run_of("build", 0, 2), run_of("stress", 124)]
    text = table(merge_runs(runs, ["build"]))
    assert "1 of 2 runs failed before" in text
    assert "out of time" in text


def test_no_verdicts_and_broken_ones_are_errors(tmp_path: Path) -> None:
    assert "no verdicts there" in verdict(tmp_path).stderr
    assert "no such folder" in verdict(tmp_path / "none").stderr
    (tmp_path / "verdict_x_1.json").write_text('{"part": "x"}')
    done = verdict(tmp_path)
    assert done.returncode == 1
    assert "verdict_x_1.json is no verdict" in done.stderr


def test_every_gpu_test_is_in_one_part() -> None:
    text = (SCRIPTS / "gpu_parts.sh").read_text()
    body = text[text.index("tests_gemm() {") : text.index("tests_selected() {")]
    done = subprocess.run(
        ["bash", "-c", f"gpu_pytest() {{ printf '%s\\n' \"$@\"; }}\n{body}\n"
         "tests_gemm; tests_engine; tests_server"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    listed = done.stdout.split()
    assert sorted(listed) == sorted(
        str(path.relative_to(ROOT)) for path in (ROOT / "tests" / "gpu").glob("test_*.py")
    )


def test_a_whole_check_has_parts_that_fit_into_a_call() -> None:
    parts = required_parts()
    tools = [f"{tool}check_{what}" for tool in ("mem", "sync", "race")
             for what in ("gemm", "gated", "triton")]  # fmt: skip
    assert {"build", "stress", "profile", "engine", "catalogue", *tools} <= set(parts)
    assert "counters" not in parts
    shown = subprocess.run(
        [SCRIPTS / "gpu_check", "--help"], capture_output=True, text=True, check=True
    )
    limits = {
        words[0]: int(words[1])
        for line in shown.stdout.splitlines()
        if len(words := line.split()) == 2 and words[1].isdigit()
    }
    assert set(parts) - set(limits) == {"engine", "catalogue"}
    assert max(limits.values()) <= 575, "and 25 s to end in"


def test_a_run_records_what_pytest_counted(tmp_path: Path) -> None:
    """A real part of a real script, on tests that run interpreted where there is no GPU."""
    command = [
        SCRIPTS / "gpu_check", "--only", "tests", "--tests",
        "tests/gpu/test_every_triton_kernel.py", "-k", "chained or missing", "--out", tmp_path,
    ]  # fmt: skip
    environment = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=100, check=False, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [path] = tmp_path.glob("verdict_tests_selected_*.json")
    found = json.loads(path.read_text())
    assert found["tests"] == {"passed": 2, "failed": 0, "skipped": 0}
    assert found["selection"] == "tests/gpu/test_every_triton_kernel.py -k chained or missing"
    assert (found["exit"], found["part"]) == (0, "tests_selected")
    assert found["commit"] == gpu_parts.commit()
    assert Run(**{**found, "tests": Counts(**found["tests"])}).state == "partial"


def test_failures_and_errors_are_counted_and_no_report_is_none(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    assert counts_of(report) is None
    report.write_text(
        '<testsuites><testsuite tests="9" failures="2" errors="1" skipped="3"/></testsuites>'
    )
    assert counts_of(report) == Counts(3, 3, 3)
    report.write_text("<testsuites")
    assert counts_of(report) is None


@pytest.mark.parametrize("arguments", [["--only", "tets"], ["-k", "x"], ["--quck"]])
def test_wrong_usage_is_status_2(arguments: list[str]) -> None:
    for script in gpu_parts.CHECKS:
        command = [SCRIPTS / script, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 2
        assert script in done.stderr
