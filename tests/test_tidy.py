"""The project's rules as a test: who may import whom, and how large things may get."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SRC = ROOT / "src" / "c2cserve"

# Each role and the roles it may import, besides itself. Only `cli`, which may import all of them,
# and `serving` join policies and mechanisms.
MAY_IMPORT: dict[str, set[str]] = {
    "core": set(),
    "policy": {"core"},
    "runtime": {"core", "policy"},
    "sim": {"core", "policy", "runtime", "terminal"},
    "files": set(),
    "processes": set(),
    "catalog": {"core", "files"},
    "grammars": {"core"},
    "kernels": {"core"},
    "memory": {"core", "files", "kernels", "processes"},
    "transfer": {"core", "kernels"},
    "devices": {"core"},
    "engine": {"core", "files", "grammars", "kernels", "memory", "transfer", "devices"},
    "cluster": {"core", "processes", "runtime"},
    "server": {"core", "files", "grammars", "processes", "runtime", "catalog"},
    "dashboard": {"core", "runtime"},
    "terminal": {"core"},
    "profiling": {"core", "kernels", "transfer", "devices", "terminal"},
    "bench": {"core", "processes", "devices", "engine", "terminal"},
    "serving": {
        "core", "policy", "processes", "runtime", "sim", "files", "catalog", "cluster", "grammars",
        "kernels", "memory", "transfer", "devices", "engine", "server", "terminal",
    },
}  # fmt: skip
PROGRAM = "c2cserve.cli.main"
"""A process of the program may be started from anywhere."""
PURE_STDLIB = {"core", "policy"}
IMPURE_MODULES = {"time", "random", "os", "logging", "socket", "threading", "asyncio", "subprocess"}

FILE_LINES_MAX = 400
FUNCTION_LINES_MAX = 70
FOLDER_FILES_MAX = 20
CLI_LINES_MAX = 2960
POLICY_LINES_MAX = 9489
"""Of what serves: small enough to be read in an hour."""
BASELINES_LINES_MAX = 1570

FILES = sorted(SRC.rglob("*.py"))
FOLDERS = sorted({path.parent for path in FILES})


@lru_cache(maxsize=1)
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


def imports_of(path: Path) -> Iterator[tuple[str, int]]:
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            assert node.module is not None
            if node.module == "c2cserve":
                for alias in node.names:
                    yield f"c2cserve.{alias.name}", node.lineno
            else:
                yield node.module, node.lineno


def role_of(path: Path) -> str:
    relative = path.relative_to(SRC)
    return relative.parts[0] if len(relative.parts) > 1 else ""


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda p: str(p.relative_to(SRC)))
def test_imports_strings_and_sizes(folder: Path) -> None:
    """By folder: hundreds of tests, one of each file, would cost more than what they check."""
    for path in sorted(folder.glob("*.py")):
        check_imports(path)
        check_strings(path)
        check_sizes(path)


def check_imports(path: Path) -> None:
    role = role_of(path)
    if role in {"", "cli"}:
        return
    assert role in MAY_IMPORT, f"{role}/ is not a role of the architecture (docs/architecture.md)"
    allowed = MAY_IMPORT[role] | {role}
    for module, line in imports_of(path):
        parts = module.split(".")
        if parts[0] == "c2cserve" and len(parts) > 1 and not parts[1].startswith("__"):
            assert parts[1] in allowed, f"{path}:{line}: {role} must not import {module}"
        elif role in PURE_STDLIB:
            assert parts[0] in sys.stdlib_module_names, f"{path}:{line}: {role} imports {module}"
            assert parts[0] not in IMPURE_MODULES, f"{path}:{line}: {role} is pure, not {module}"


def check_strings(path: Path) -> None:
    """Modules that are named in them are there, and importing them would be allowed: a process is
    started with them."""
    role = role_of(path)
    for node in nodes_of(path):
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
            continue
        for name in re.findall(r"(?<![\w./])c2cserve(?:\.[a-z_]\w*)+", node.value):
            place = f"{path}:{node.lineno}: {name}"
            parts = name.split(".")[1:]
            module = SRC.joinpath(*parts)
            assert module.is_dir() or module.with_suffix(".py").exists(), place
            if role not in {"", "cli"} and name != PROGRAM:
                assert parts[0] in MAY_IMPORT[role] | {role}, place


def test_nothing_heavy_is_imported_by_the_package_or_the_server() -> None:
    probe = (
        "import sys, c2cserve; assert 'numpy' not in sys.modules;"
        "import c2cserve.policy.cluster.policy, c2cserve.policy.slice.policy, c2cserve.core.events;"
        "assert 'msgspec' not in sys.modules and 'numpy' not in sys.modules;"
        "import c2cserve.server.app, c2cserve.serving.controller.gateway, c2cserve.cli.main;"
        "assert 'torch' not in sys.modules, 'the server must start without torch'"
    )
    subprocess.run([sys.executable, "-c", probe], check=True, timeout=60)


def check_sizes(path: Path) -> None:
    lines = path.read_text().count("\n")
    assert lines <= FILE_LINES_MAX, f"{path} has {lines} lines: split it by idea"
    for node in nodes_of(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= FUNCTION_LINES_MAX, (
                f"{path}:{node.lineno}: {node.name}: {length} lines"
            )


def test_a_server_runs_no_baseline_and_nothing_that_is_only_simulated() -> None:
    """Neither `serving` nor the command that starts it imports them, also through others."""
    probe = (
        "import sys, pkgutil, importlib, c2cserve.serving, c2cserve.cli.serve;"
        "[importlib.import_module(one.name) for one in"
        " pkgutil.walk_packages(c2cserve.serving.__path__, 'c2cserve.serving.')];"
        "import c2cserve.runtime.replay;"
        "found = sorted(name for name in sys.modules if name.startswith("
        "('c2cserve.policy.baselines', 'c2cserve.sim.policies')));"
        "assert not found, found"
    )
    subprocess.run([sys.executable, "-c", probe], check=True, timeout=120)


def lines_of(*folders: str) -> int:
    paths = {path for folder in folders for path in (SRC / folder).rglob("*.py")}
    return sum(path.read_text().count("\n") for path in paths)


def test_policy_stays_small() -> None:
    baselines = lines_of("policy/baselines")
    assert baselines <= BASELINES_LINES_MAX
    assert lines_of("policy") - baselines <= POLICY_LINES_MAX


def test_commands_stay_small() -> None:
    assert lines_of("cli") <= CLI_LINES_MAX, "a command has options and output; the rest is not cli"


def test_folders_stay_small() -> None:
    suffixes = {".py", ".cu", ".cuh", ".h", ".cpp"}
    for folder in [SRC, *(path for path in SRC.rglob("*") if path.is_dir())]:
        files = [path for path in folder.iterdir() if path.suffix in suffixes]
        assert len(files) <= FOLDER_FILES_MAX, f"{folder} has {len(files)} source files"


def test_no_leftovers() -> None:
    markers = ("TO" + "DO", "FIX" + "ME", "NotImplemented" + "Error")
    for path in [*FILES, *sorted((ROOT / "tests").rglob("*.py"))]:
        text = path.read_text()
        for marker in markers:
            assert marker not in text, f"{path} still says {marker}"


def test_test_files_have_names_of_their_own() -> None:
    """Two of one name in different folders break collection, but only where caches are cold."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


def test_tests_do_not_import_tests() -> None:
    """What tests share is a helper module: importing a test module may collect its tests twice."""
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for module, line in imports_of(path):
            name = module.rpartition(".")[2]
            assert not name.startswith("test_"), (
                f"{path}:{line}: {name} is a test; move what is shared to a helper module"
            )


def test_every_dependency_is_explained() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = [*project["dependencies"]]
    for extra in project["optional-dependencies"].values():
        listed += extra
    page = (ROOT / "docs" / "dependencies.md").read_text()
    for requirement in listed:
        name = requirement.split("[")[0].split(">")[0].split("=")[0].strip()
        assert f"`{name}`" in page, f"docs/dependencies.md does not say why {name} is needed"
        assert "<" in requirement or requirement.startswith("nvidia-ml-py"), requirement
