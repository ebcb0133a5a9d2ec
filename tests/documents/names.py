"""Files and tests that the documents name."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from documents import RESULTS, ROOT
from documents.pages import Line, Page

_ROOTS = ("", "src/c2cserve/", "docs/", "tests/", "benchmarks/", "benchmarks/results/", "scripts/")
_FILE = re.compile(r"(?P<folder>[\w./-]+/)?[\w*-]+\.(?:py|md|json|toml|sh|cu|cuh|h|cpp|txt|csv)")
_TEST = re.compile(r"(?P<file>[\w/]*test_\w+\.py)?(?P<dots>::)?(?P<name>test_\w+)?")
_FIRST_FOLDERS = frozenset(
    path.name
    for top in (ROOT, ROOT / "src" / "c2cserve")
    for path in top.iterdir()
    if path.is_dir()
)


def missing_files(page: Page) -> Iterator[str]:
    """Yield the files in code spans that the repository does not have.

    A name without a folder counts where it can only be one of the project's: a result, or a test.
    """
    for line, text in page.spans():
        name = text.partition(" ")[0].partition("::")[0]
        found = _FILE.fullmatch(name)
        if found is None:
            continue
        folder = found["folder"] or ""
        known = folder.split("/")[0] in _FIRST_FOLDERS if folder else name.startswith("test_")
        if known and not any(_exists(root + name) for root in _ROOTS):
            if not folder and list((ROOT / "tests").rglob(name)):
                continue
            yield f"{page}:{line.number}: no file {name}"


def missing_in_drawings(page: Page) -> Iterator[str]:
    """Yield the modules, named with their folder, that a drawing shows and the package lacks."""
    for line in page.lines:
        if line.language != "":
            continue
        for found in re.finditer(r"(?<![\w./*-])(?:[a-z_]+/)+[a-z_]\w*\.py\b", line.text):
            name = found[0]
            known = name.split("/")[0] in _FIRST_FOLDERS
            if known and not any(_exists(root + name) for root in _ROOTS):
                yield f"{page}:{line.number}: no file {name}"


def missing_tests(page: Page) -> Iterator[str]:
    """Yield the tests in code spans that are in none of the files they are said to be in.

    `::test_x` and `test_x` belong to the file that was named before on the same line.
    """
    last: tuple[Line, str] | None = None
    for line, text in page.spans():
        found = _TEST.fullmatch(text)
        if found is None or not any(found.groups()):
            continue
        if found["file"]:
            last = (line, found["file"])
        name = found["name"]
        if name is None:
            continue
        files = [last[1]] if last is not None and last[0] is line else ["test_*.py"]
        paths = [path for file in files for path in _test_files(file)]
        if not any(name in _functions(path) for path in paths):
            yield f"{page}:{line.number}: no {name} in {', '.join(files)}"


def named_results(page: Page) -> set[str]:
    """Return the results that a reader of the page sees named, globs resolved."""
    found: set[str] = set()
    for line in page.lines:
        for name in re.findall(r"[\w*]+\.json", line.text):
            found |= {path.name for path in RESULTS.glob(name)}
    return found


def _exists(name: str) -> bool:
    return bool(list(ROOT.glob(name))) if "*" in name else (ROOT / name).exists()


def _test_files(name: str) -> list[Path]:
    """Return the files of that name; with a folder, from the repository's root or from tests/."""
    if "/" not in name:
        return sorted((ROOT / "tests").rglob(name))
    return [path for path in (ROOT / name, ROOT / "tests" / name) if path.is_file()]


@cache
def _functions(path: Path) -> frozenset[str]:
    if not path.is_file():
        return frozenset()
    nodes = ast.walk(ast.parse(path.read_text()))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(node.name for node in nodes if isinstance(node, kinds))
