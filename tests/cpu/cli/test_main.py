"""The command line as a whole: fast, lazy, and one clear line when something is wrong."""

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from c2cserve import __version__
from c2cserve.cli.commands import COMMANDS, Lazy, commands
from c2cserve.cli.main import app


def cli(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "c2cserve.cli.main", *args],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_help_lists_every_command() -> None:
    result = CliRunner().invoke(commands, ["--help"])
    assert result.exit_code == 0
    for name, lazy in COMMANDS.items():
        assert name in result.stdout
        assert lazy.help.split()[0] in result.stdout


def test_help_is_whole_in_80_columns() -> None:
    asked: list[tuple[Any, list[str]]] = [(typer.main.get_command(commands), [])]
    while asked:
        group, words = asked.pop()
        shown = CliRunner().invoke(commands, [*words, "--help"], env={"COLUMNS": "80"}).stdout
        assert "…" not in shown, words
        context = group.context_class(group)
        names = group.list_commands(context) if hasattr(group, "list_commands") else ()
        asked += [(group.get_command(context, name), [*words, name]) for name in names]


def test_the_package_is_the_command() -> None:
    command = [sys.executable, "-m", "c2cserve", "version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert __version__ in done.stdout


@pytest.mark.alone
def test_help_is_fast_and_light() -> None:
    probe = (
        "import sys; from c2cserve.cli.main import app\n"
        "try: app(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'starlette', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    fastest = 9.0
    for _ in range(3):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", probe], check=True, stdout=subprocess.DEVNULL)
        fastest = min(fastest, time.perf_counter() - start)
    assert fastest < 0.8, "0.3 s on an idle machine"


def test_version() -> None:
    done = cli("version")
    assert (done.returncode, done.stdout) == (0, f"c2cserve {__version__}\n")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("srve",), "Did you mean 'serve'?"),
        (("version", "--loud"), "--loud"),
        (("--loud",), "--loud"),
        (("models", "show"), "'name'"),
        (("bench", "serve", "--concurrency", "none"), "'--concurrency'"),
    ],
)
def test_wrong_usage_is_one_line_and_2(args: tuple[str, ...], says: str) -> None:
    done = cli(*args)
    assert done.returncode == 2
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_failures_show_a_traceback_only_with_debug() -> None:
    args = ("replay", "/nowhere.jsonl")
    plain = cli(*args)
    assert plain.returncode == 1
    assert plain.stderr.startswith("c2cserve: /nowhere.jsonl")
    assert len(plain.stderr.splitlines()) == 1
    assert "Traceback" in cli("--debug", *args).stderr


def test_a_broken_module_breaks_only_its_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(COMMANDS, "serve", Lazy("c2cserve.cli.none", "serve", "Serve."))
    for args, code in ((["serve"], 1), (["version"], 0), (["--help"], 0)):
        with pytest.raises(SystemExit) as done:
            app(args)
        assert done.value.code == code
    assert "c2cserve.cli.none" in capsys.readouterr().err


def test_every_command_loads() -> None:
    for name, lazy in COMMANDS.items():
        assert lazy.load(name).name == name


def test_output_to_a_closed_pipe_is_no_error_message() -> None:
    reader = "import sys; sys.stdin.readline()"
    command = (
        f"{sys.executable} -m c2cserve.cli.main doctor --json | {sys.executable} -c '{reader}'"
    )
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stderr == ""


def test_replay_of_something_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = tmp_path / "x.jsonl"
    record.write_text("{}\n")
    with pytest.raises(SystemExit) as done:
        app(["replay", str(record)])
    assert done.value.code == 1
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_version_as_an_option() -> None:
    done = cli("--version")
    assert (done.returncode, done.stdout) == (0, f"c2cserve {__version__}\n")


@pytest.mark.parametrize(
    ("typed", "offered"),
    [("c2cserve ser", "serve"), ("c2cserve models re", "reload"), ("c2cserve top --on", "--once")],
)
def test_shells_complete_the_program(
    monkeypatch: pytest.MonkeyPatch, typed: str, offered: str
) -> None:
    for name, value in {
        "COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split()) - 1),
        "_C2CSERVE_COMPLETE": "complete_bash",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    assert offered in cli().stdout.split()


def test_completion_is_installed_for_the_program_and_no_command() -> None:
    assert "--install-completion" in cli("--help").stdout
    for name in ("models", "bench", "kernels"):
        assert "completion" not in cli(name, "--help").stdout
