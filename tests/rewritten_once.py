"""The tests' modules, with assertions that explain themselves, made once for all processes.

Each process of pytest-xdist collects all tests, in one order: after a checkout each would rewrite
each module at the same time as the others, and that takes longer than their tests' imports. What
is made is what pytest itself looks for, and makes where it is missing."""

import os
from pathlib import Path

import pytest
from _pytest.assertion import rewrite

_TESTS = Path(__file__).parent


def _cache_of(module: Path) -> Path:
    return rewrite.get_cache_dir(module) / (module.name[:-3] + rewrite.PYC_TAIL)


def _make(modules: list[Path], config: pytest.Config) -> None:
    state = config.stash[rewrite.assertstate_key]
    for module in modules:
        made, code = rewrite._rewrite_test(module, config)
        cache = _cache_of(module)
        cache.parent.mkdir(exist_ok=True)
        rewrite._write_pyc(state, code, made, cache)


def rewrite_once(config: pytest.Config) -> None:
    """Rewrite what no run has rewritten yet, on all cores. Modules that were changed since are left
    to the processes that import them."""
    modules = [one for one in sorted(_TESTS.rglob("test_*.py")) if not _cache_of(one).exists()]
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
