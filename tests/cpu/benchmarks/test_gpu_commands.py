"""Every command of every part of the GPU checks, recorded without running it, can be run.

The scripts run with programs in place of Python, compute-sanitizer and ncu that write down what
they are asked. Then files, modules, tests and options of each command are looked for.
"""

import argparse
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from documents.commands import check
from program_imports import ROOT, missing_modules

RECORDER = """#!/usr/bin/env bash
printf '%q ' "$@" >> "$RECORDED"; echo >> "$RECORDED"
"""
RUNS_PYTHON = """#!/usr/bin/env bash
while [[ $# -gt 0 && $1 != "$PYTHON" ]]; do shift; done
"$@"
"""
CALLS = {
    "gpu_check": [
        ["--only", "tests,sanitizer,build,profile,gemm,figures,stress,counters"],
        ["--only", "gemm,stress", "--quick", "--minutes", "1", "--seed", "3"],
        ["--only", "tests", "--tests", "tests/gpu/test_gemm.py", "-k", "not split"],
        ["--only", "racecheck_gated", "-k", "bfloat16"],
    ],
    "test-gpu": [
        [],
        ["--only", "engine,catalogue", "--quick", "--memory-gib", "90", "--mount",
         "--engine", "--shapes llama-3b", "--catalogue", "--models 8 --serve '--host-kv-bytes 1'"],
    ],
}  # fmt: skip
WITH_VALUE = {"-p", "-m", "-k", "--junitxml", "--timeout"}
"""Options of pytest that the scripts give a value to."""


class Parsed(Exception):
    """A program has read its arguments."""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """The arguments of Python in every call of `CALLS`."""
    folder = tmp_path_factory.mktemp("programs")
    log = folder / "recorded"
    for name in ("python", "python3"):
        _program(folder / name, RECORDER)
    for name in ("compute-sanitizer", "ncu"):
        _program(folder / name, RUNS_PYTHON)
    environment = {
        **os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "PYTHON": str(folder / "python"),
        "RECORDED": str(log),
    }  # fmt: skip
    for script, calls in CALLS.items():
        for arguments in calls:
            command = [ROOT / "scripts" / script, *arguments, "--out", folder / "out"]
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=100, check=False, env=environment
            )
            # Of `profile`, what it copies afterwards is not there.
            assert done.returncode in (0, 1), done.stderr
    return [shlex.split(line) for line in log.read_text().splitlines()]


def _program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def test_every_part_is_recorded(recorded: list[list[str]]) -> None:
    parts = [words[words.index("--part") + 1] for words in recorded if "--part" in words]
    for script in CALLS:
        done = subprocess.run(
            [ROOT / "scripts" / script, "--list"], capture_output=True, text=True, check=True
        )
        assert set(done.stdout.split()) <= set(parts)
    assert {"counters", "tests_selected"} <= set(parts)
    programs = {words[0] if words[0] != "-m" else words[1] for words in recorded}
    assert programs >= {
        "pytest", "c2cserve.kernels.build", "c2cserve.cli.main", "benchmarks/gemm.py",
        "benchmarks/gpu_engine.py", "benchmarks/gpu_catalogue.py", "benchmarks/gemm_counters.py",
        "tests/gpu/stress_gemm.py", "scripts/gpu_parts.py", "-c",
    }  # fmt: skip


def test_modules_and_code_are_there(recorded: list[list[str]]) -> None:
    for words in recorded:
        match words:
            case ["-m", "pytest", *_]:
                pass
            case ["-m", "c2cserve.cli.main", *rest]:
                check(["c2cserve", *rest])
            case ["-m", module, *_]:
                check(["python", *words])
                spec = importlib.util.find_spec(module)
                assert spec is not None
                assert '__name__ == "__main__"' in Path(spec.origin or "").read_text()
            case ["-c", code, *_]:
                compile(code, "-c", "exec")
                assert not list(missing_modules(code, "-c"))
            case _:
                pass


def test_tests_are_there(recorded: list[list[str]]) -> None:
    calls = [words[2:] for words in recorded if words[:2] == ["-m", "pytest"]]
    assert calls
    for words in calls:
        assert words[words.index("-m") + 1] == "gpu"
        named = _positional(words)
        assert named, f"all tests: {shlex.join(words)}"
        for one in named:
            name, *nodes = one.split("::")
            path = ROOT / name
            assert path.exists(), one
            for node in nodes:
                assert re.search(rf"^def {node}\(", path.read_text(), re.MULTILINE), one


def _positional(words: Sequence[str]) -> list[str]:
    left, found = list(words), list[str]()
    while left:
        word = left.pop(0)
        if word in WITH_VALUE:
            left.pop(0)
        else:
            assert not word.startswith("-"), f"pytest's {word}: does it take a value?"
            found.append(word)
    return found


@pytest.mark.timeout(300)  # it imports many programs, and torch
def test_programs_take_their_arguments(
    recorded: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is imported, and its own parser reads the arguments, values included."""

    def parse(self: argparse.ArgumentParser, given: Sequence[str] | None = None) -> None:
        parsed(self, given)
        raise Parsed

    parsed = argparse.ArgumentParser.parse_args
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
    scripts = {tuple(words) for words in recorded if words[0].endswith(".py")}
    assert len(scripts) > 8
    for name, *arguments in sorted(scripts):
        path = ROOT / name
        monkeypatch.syspath_prepend(str(path.parent))
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        with pytest.raises(Parsed):
            importlib.import_module(path.stem).main()
