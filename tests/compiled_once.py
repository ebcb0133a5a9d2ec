"""Modules compiled once for all test processes, those of tests with assertions that explain
themselves.

Each process of pytest-xdist imports all tests, in one order: after a checkout each would compile
each module at the same time as the others, which takes longer than importing them. What is made is
what Python and pytest look for, and make where it is missing."""

import os
import py_compile
from importlib.util import cache_from_source
from pathlib import Path

import pytest
from _pytest.assertion import rewrite

_ROOT = Path(__file__).parent.parent


def _is_rewritten(module: Path) -> bool:
    return module.name.startswith("test_") or module.name == "conftest.py"


def _cache_of(module: Path) -> Path:
    if _is_rewritten(module):
        return rewrite.get_cache_dir(module) / (module.stem + rewrite.PYC_TAIL)
    return Path(cache_from_source(str(module)))


def _make(modules: list[Path], config: pytest.Config) -> None:
    state = config.stash[rewrite.assertstate_key]
    for module in modules:
        cache = _cache_of(module)
        if _is_rewritten(module):
            made, code = rewrite._rewrite_test(module, config)
            cache.parent.mkdir(exist_ok=True)
            rewrite._write_pyc(state, code, made, cache)
        else:
            py_compile.compile(str(module), str(cache))


def compile_once(config: pytest.Config) -> None:
    """Compile what no run has compiled yet, on all cores. Modules that were changed since are left
    to the processes that import them."""
    folders = (_ROOT / "src", _ROOT / "benchmarks", _ROOT / "tests")
    modules = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    modules = [one for one in modules if not _cache_of(one).exists()]
    cores = len(os.sched_getaffinity(0))
    children: list[int] = []
    for share in (modules[core::cores] for core in range(cores)):
        child = os.fork()
        if child == 0:
            try:
                _make(share, config)
            finally:
                os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
