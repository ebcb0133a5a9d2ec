"""Commands in the documents, and the options that each of them has.

Nothing is started: `c2cserve`'s commands are asked in this process, other programs are read.
"""

import ast
import importlib.util
import re
import shlex
import tomllib
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import typer

from c2cserve.cli.commands import COMMANDS, commands
from documents import ROOT
from documents.pages import Line, Page

_STARTS = ("c2cserve", "make", "python", "python3", "pip")
_FOLDERS = ("scripts/", "benchmarks/")
_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9]*(?:-[a-z0-9]+)*(?![\w.*-])")
SHELL: frozenset[str | None] = frozenset({"bash", "sh", "console", ""})


class CommandError(AssertionError):
    """A command that the project does not have."""


def commands_of(page: Page) -> Iterator[tuple[Line, list[str]]]:
    """Yield the commands of code blocks and of code spans, as words."""
    joined = ""
    for line in page.lines:
        if line.language not in SHELL:
            continue
        joined += line.text.strip().removeprefix("$ ")
        if joined.endswith("\\"):
            joined = joined[:-1]
            continue
        if is_command(joined):
            yield line, shlex.split(joined, comments=True)
        joined = ""
    for line, text in page.spans():
        if is_command(text):
            yield line, shlex.split(text)
        elif text.split()[0] in COMMANDS and " --" in text:
            yield line, ["c2cserve", *shlex.split(text)]


def is_command(text: str) -> bool:
    """Whether the text begins as a command of the project, and has more than a name."""
    first, _, rest = text.partition(" ")
    if first.startswith(_FOLDERS) and first.endswith((".py", ".sh")):
        return bool(rest)
    return (first in _STARTS and bool(rest)) or bool(re.fullmatch(r"scripts/[\w-]+", first))


def check(words: Sequence[str], folder: Path = ROOT) -> None:
    """Raise CommandError if a word names no command, file, target or option of the project.

    Scripts are looked for in the root of the repository, then in `folder`.
    """
    match list(words):
        case ["c2cserve", *rest]:
            _check_c2cserve(rest)
        case ["make", *rest]:
            _check_make(rest)
        case ["pip", "install", *rest]:
            _check_pip(rest)
        case ["python" | "python3", "-m", module, *rest]:
            _check_module(module, rest)
        case ["python" | "python3", script, *rest] if not script.startswith("-"):
            here = (ROOT / script).is_file() or not (folder / script).is_file()
            path = ROOT / script if here else folder / script
            _check_options(rest, options_of(path), script)
        case [script, *rest] if script.startswith(_FOLDERS):
            _check_options(rest, options_of(ROOT / script), script)
        case _:
            raise CommandError(f"unknown: {' '.join(words)}")


def options_in(text: str) -> list[str]:
    return _OPTION.findall(text)


@cache
def all_options() -> frozenset[str]:
    """Return every long option of `c2cserve`, the benchmarks, the scripts and the examples."""
    found: set[str] = set()
    for name, lazy in COMMANDS.items():
        found |= _options_below(lazy.load(name))
    found |= _options_below(typer.main.get_command(commands))
    for folder in ("benchmarks", "scripts", "examples", "tests/soak", "tests/gpu"):
        for path in (ROOT / folder).rglob("*"):
            script = folder == "scripts" and path.is_file() and not path.suffix
            if path.suffix in {".py", ".sh"} or script:
                found |= options_of(path)
    for path in (ROOT / "src").rglob("*.py"):
        if "__main__" in path.read_text():
            found |= options_of(path)
    return frozenset(found)


@cache
def options_of(path: Path) -> frozenset[str]:
    """Return the long options that a script of the repository mentions or declares.

    Of a Python file these are those given to `add_argument`; of a shell script all that it names,
    and those of the Python programs that it ends in. Raises CommandError.
    """
    if not path.is_file():
        raise CommandError(f"no file {path}")
    text = path.read_text()
    if path.suffix == ".py":
        return frozenset(_declared(text)) | {"--help"}
    found = set(options_in(text)) | {"--help"}
    for module in re.findall(r"exec .*-m (\w+)", text):
        for part in sorted((ROOT / "tests" / module).glob("*.py")):
            found |= _declared(part.read_text())
    for name in re.findall(r"(?:source|\$0\"\)/)\s*([\w/.]*gpu_parts\.(?:sh|py))", text):
        part = ROOT / "scripts" / Path(name).name
        found |= set(options_in(part.read_text()))
    return frozenset(found)


def _declared(text: str) -> set[str]:
    """Options that are given to `add_argument`; without one, all that the program compares with."""
    nodes = list(ast.walk(ast.parse(text)))
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    parsed = [call for call in calls if getattr(call.func, "attr", "") == "add_argument"]
    among = [arg for call in parsed for arg in call.args] if parsed else nodes
    values = [node.value for node in among if isinstance(node, ast.Constant)]
    return {value for value in values if isinstance(value, str) and _OPTION.fullmatch(value)}


def _check_options(words: Sequence[str], known: frozenset[str], program: str) -> None:
    for word in words:
        name = word.partition("=")[0]
        if name.startswith("--") and name not in known:
            raise CommandError(f"{program} has no {name}")


def _check_c2cserve(words: list[str]) -> None:
    if not words or words[0].startswith("-"):
        _follow(typer.main.get_command(commands), words, "c2cserve")
        return
    if words[0] not in COMMANDS:
        raise CommandError(f"c2cserve has no command {words[0]}")
    _follow(COMMANDS[words[0]].load(words[0]), words[1:], f"c2cserve {words[0]}")


def _follow(command: Any, words: list[str], program: str) -> None:
    """Walk the words as the command would: subcommands, options with their values, arguments."""
    below: dict[str, Any] | None = getattr(command, "commands", None)
    if below and words and not words[0].startswith("-"):
        if words[0] not in below:
            raise CommandError(f"{program} has no command {words[0]}")
        _follow(below[words[0]], words[1:], f"{program} {words[0]}")
        return
    options = {name: one for one in command.params for name in (*one.opts, *one.secondary_opts)}
    room = sum(one.nargs for one in command.params if one.param_type_name == "argument")
    left = list(words)
    while left:
        name, equals, _ = left.pop(0).partition("=")
        if name in {"-h", "--help"}:
            continue
        if name == "--" and any(one.nargs == -1 for one in command.params):
            return  # what follows is another program's
        if not name.startswith("-"):
            room -= 1
            if room < 0:
                raise CommandError(f"{program} takes no argument {name}")
        elif name not in options:
            raise CommandError(f"{program} has no {name}")
        elif not (equals or getattr(options[name], "is_flag", False)):
            if not left:
                raise CommandError(f"{program}: {name} needs a value")
            left.pop(0)


def _options_below(command: Any) -> set[str]:
    found = {name for one in command.params for name in (*one.opts, *one.secondary_opts)}
    for own in getattr(command, "commands", {}).values():
        found |= _options_below(own)
    return {name for name in found if name.startswith("--")}


def _check_make(words: Sequence[str]) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for word in words:
        name, equals, _ = word.partition("=")
        if equals and f"$({name})" not in makefile and f"$(if $({name})" not in makefile:
            raise CommandError(f"the Makefile does not read {name}")
        if not equals and not re.search(rf"^{re.escape(name)}:", makefile, re.MULTILINE):
            raise CommandError(f"the Makefile has no target {name}")


def _check_pip(words: Sequence[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for word in words:
        if word.startswith("c2cserve"):
            raise CommandError("no package index has c2cserve: pip install '.[...]' in a checkout")
        if extras := re.match(r"\.\[(.*)\]$", word):
            for extra in extras[1].split(","):
                if extra not in project["optional-dependencies"]:
                    raise CommandError(f"pyproject.toml has no extra {extra}")
        if word.endswith(".txt") and not (ROOT / word).is_file():
            raise CommandError(f"no file {word}")


def _check_module(module: str, words: Sequence[str]) -> None:
    if module in {"venv", "pip", "pytest"}:
        return
    found = importlib.util.find_spec(module)
    if found is None or found.origin is None:
        raise CommandError(f"no module {module}")
    _check_options(words, frozenset(_declared(Path(found.origin).read_text())), module)
