"""What a program imports, found without importing it: modules that are not there, names they lack.

Modules of this repository are read. Of others it is asked whether they are installed.
"""

import ast
import importlib.util
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[3]
SRC = ROOT / "src"
MODULE_NAME = re.compile(r"(?<![\w./-])c2cserve(?:\.[a-z_]\w*)+")
ON_GPU_MACHINES = frozenset({"cuda", "pynvml", "flashinfer"})
"""Packages of the extras `gpu` and `flash`: a machine without a GPU may lack them."""


def problems(path: Path, folders: Sequence[Path]) -> Iterator[str]:
    """Yield what the program at `path` names and does not exist.

    `folders` is where its modules are looked for, besides `src`: its own, and PYTHONPATH."""
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Import(names=names):
                for alias in names:
                    yield from _missing(path, node.lineno, alias.name, [], folders)
            case ast.ImportFrom(module=str(module), names=names, level=0):
                wanted = [alias.name for alias in names]
                yield from _missing(path, node.lineno, module, wanted, folders)
            case ast.Constant(value=str(text)):
                yield from missing_modules(text, f"{path}:{node.lineno}")
            case _:
                pass


def missing_modules(text: str, place: str) -> Iterator[str]:
    """Yield the dotted names of the package in a text that are neither modules nor in one."""
    for name in MODULE_NAME.findall(text):
        module, _, last = name.rpartition(".")
        if _find(name, [SRC]) is None and last not in _names(_find(module, [SRC])):
            yield f"{place}: {name}"


def _missing(
    path: Path, line: int, module: str, names: Sequence[str], folders: Sequence[Path]
) -> Iterator[str]:
    found = _find(module, [SRC, *folders])
    if found is None:
        top = module.partition(".")[0]
        installed = top in ON_GPU_MACHINES or importlib.util.find_spec(top) is not None
        if top == "c2cserve" or not installed:
            yield f"{path}:{line}: no module {module}"
        return
    for name in names:
        if name not in _names(found) and _find(f"{module}.{name}", [SRC, *folders]) is None:
            yield f"{path}:{line}: {module} has no {name}"


def _find(module: str, folders: Sequence[Path]) -> Path | None:
    """Return the file of a module, or the folder of a package without one."""
    parts = module.split(".")
    for folder in folders:
        base = folder.joinpath(*parts)
        for path in (base.with_name(base.name + ".py"), base / "__init__.py", base):
            if path.exists():
                return path
    return None


@cache
def _names(path: Path | None) -> frozenset[str]:
    """Return the names that a module defines or imports at its top level, also under a
    condition."""
    if path is None or not path.is_file():
        return frozenset()
    return frozenset(_bound(ast.parse(path.read_text()).body))


def _bound(body: Sequence[ast.stmt]) -> Iterator[str]:
    for node in body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.ClassDef(name=name):
                yield name
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                yield from (alias.asname or alias.name.partition(".")[0] for alias in names)
            case ast.If() | ast.Try() | ast.With():
                yield from _bound([one for one in ast.iter_child_nodes(node) if _is_stmt(one)])
            case _:
                for one in ast.walk(node):
                    if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store):
                        yield one.id


def _is_stmt(node: ast.AST) -> bool:
    return isinstance(node, ast.stmt)
