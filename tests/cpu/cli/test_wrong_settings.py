"""Settings that make no sense are refused in one line, before anything is started or measured."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from documents import ROOT

from c2cserve.bench.specialists import reason_of
from c2cserve.cli.commands import COMMANDS
from c2cserve.cli.main import app
from c2cserve.serving import startup
from c2cserve.terminal.output import CliError

SPECIALISTS = str(ROOT / "examples" / "specialists" / "catalog.toml")


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str]:
    """Return the exit status and the one line of stderr."""
    with pytest.raises(SystemExit) as done:
        app(args)
    (line,) = capsys.readouterr().err.splitlines()
    assert isinstance(done.value.code, int)
    return done.value.code, line


@pytest.mark.parametrize(
    ("option", "value"), [("--log-level", "loud"), ("--model-root", "/nowhere")]
)
def test_serve_names_the_option(
    option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, line = refused(capsys, "serve", "--catalog", SPECIALISTS, option, value)
    assert code == 2
    assert f"'{option}'" in line


def test_a_folder_is_no_catalogue(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "c2cserve.cli.main", "serve", "--catalog", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    said = (2, f"c2cserve: {tmp_path}: cannot be read: Is a directory\n")
    assert (done.returncode, done.stderr) == said


def test_a_server_without_its_kernels_says_how_to_build_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from c2cserve.kernels import native

    native.load_library.cache_clear()
    monkeypatch.setattr(native, "LIBRARY_FOLDER", tmp_path)
    with pytest.raises(CliError, match=re.escape("run: python -m c2cserve.kernels.build")):
        startup.check_cpu_kernels()


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--catalog", "llama-3.1-8b*0"), "COUNT is at least 1"),
        (("--catalog", "llama-3.1-8b*-2"), "COUNT is at least 1"),
        (("--fault", "slice:gpu9@1+2"), "no slice 'gpu9' to fail; there are: gpu0"),
        (("--fault", "link:moon@1+2*0.5"), "no link 'moon' to fail; there are: "),
        (("--fault", "slice:gpu0@-1+2"), "is not slice:ID@AT+FOR"),
        (("--fault", "link:gpu0.h2d@1+nan*0.5"), "is not slice:ID@AT+FOR"),
        (("--lengths", "nope"), "no lengths 'nope'"),
        (("--plots", "plots"), "--plots: no effect without --study"),
        (("--quick",), "--quick: no effect without --study"),
        (("--study", "list", "--hardware", "gb200"), "--hardware: no effect with --study"),
    ],
)
def test_simulate_says_what_it_does_not_know(
    args: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = () if "--study" in args else ("--trace", "synthetic:duration=5", "--limit", "2")
    code, line = refused(capsys, "simulate", *given, *args)
    assert code == 2
    assert says in line


@pytest.mark.parametrize(
    ("text", "says"), [("x = 1\n", "there is no key 'host'"), ("x = \n", "Invalid value")]
)
def test_a_machine_that_is_none_is_named(
    text: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    code, line = refused(capsys, "simulate", "--hardware", str(path))
    assert code == 2
    assert line.startswith(f"c2cserve: {path}: {says}")


@pytest.mark.parametrize(
    "command",
    [
        ("simulate", "--json"),
        ("plan", "--hardware", "h200-x1", "--json"),
        ("bench", "serve", "--url", "http://127.0.0.1:9", "--out"),
        ("bench", "switch", "--url", "http://127.0.0.1:9", "--out"),
        ("bench", "cold", "--url", "http://127.0.0.1:9", "--out"),
    ],
)
def test_where_results_go_is_checked_before_they_are_measured(
    command: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "none" / "out.json"
    assert refused(capsys, *command, str(path)) == (
        1, f"c2cserve: {path}: there is no folder {path.parent}",
    )  # fmt: skip
    assert refused(capsys, *command, str(tmp_path)) == (
        1, f"c2cserve: {tmp_path}: no file can be written there",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--mode", "trace"), "--trace"),
        (("--trace", "arrivals.csv"), "--mode trace"),
        (("--input-len", "x"), "not a length"),
        (("--output-len", "x"), "not a length"),
        (("--popularity", "x"), "not a popularity"),
        (("--dataset", "none.csv"), "none.csv: no such file"),
    ],
)
def test_a_load_is_checked_before_the_server_is_asked(
    args: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _, line = refused(capsys, "bench", "serve", "--url", "http://127.0.0.1:9", *args)
    assert says in line


@pytest.mark.parametrize("option", [("--requests", "0"), ("--concurrency", "0")])
def test_a_demo_asks_something(option: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    code, line = refused(capsys, "demo", *option)
    assert code == 2
    assert f"'{option[0]}'" in line


def test_a_worker_is_not_for_people() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "c2cserve.serving.worker.process"],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == "a worker is started by `c2cserve serve`, which talks to it\n"


# ---- Output that cannot be written --------------------------------------------------------------


def command_line(*args: str, stdin: int | None = None) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "c2cserve.cli.main", *args],
        stdin=stdin, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_a_full_disk_is_one_line() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "c2cserve.cli.main", "version"],
            stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False,
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == "c2cserve: the output cannot be written: No space left on device\n"


# ---- What commands say --------------------------------------------------------------------------


def texts_in(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def test_messages_recommend_what_works() -> None:
    """No package index has c2cserve, so `pip install c2cserve` helps no reader."""
    wrong = [
        f"{path}:{line}"
        for path in (ROOT / "src").rglob("*.py")
        for line, text in texts_in(path)
        if re.search(r"pip install '?c2cserve|\bcan\s+not\b", text)
    ]
    assert not wrong


def commands_below(command: ModuleType) -> Iterator[ModuleType]:
    yield command
    for one in getattr(command, "commands", {}).values():
        yield from commands_below(one)


def test_the_terminal_alone_breaks_the_lines_of_help() -> None:
    for name, lazy in COMMANDS.items():
        for command in commands_below(lazy.load(name)):
            paragraphs = str(command.help).split("\n\n")
            assert not [text for text in paragraphs if "\n" in text], command.name


# ---- The demo's server --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        ('{"level":"error","message":"slow disk"}\nc2cserve: no room\n', "no room"),
        ('{"level":"info","message":"x"}\n{"level":"error","message":"slow disk"}\n', "slow disk"),
        ('{"level":"info","message":"x"}\n', "it was not ready within 60 s"),
        ('c2cserve: no room\n{"level":"info","mess', "no room"),
    ],
)
def test_why_the_demos_server_did_not_come_up_is_one_sentence(log: str, reason: str) -> None:
    assert reason_of(log) == reason
