"""Changes a module of a server under test as soon as it is imported, before anybody can call it.

The `sitecustomize` files of injected faults use it. A thread that waits for the module is too late
on a busy machine: a short request is over before the fault is in."""

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any


class _Finder(MetaPathFinder):
    def __init__(self, module: str, change: Callable[[Any], None]) -> None:
        self._module = module
        self._change = change

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None, /
    ) -> ModuleSpec | None:
        if fullname != self._module:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_change(module: ModuleType) -> None:
            execute(module)
            self._change(module)

        spec.loader.exec_module = execute_and_change
        return spec


def after_import(module: str, change: Callable[[Any], None]) -> None:
    """Calls `change` with the module once its code has run: now, if that was before."""
    if module in sys.modules:
        change(sys.modules[module])
        return
    sys.meta_path.insert(0, _Finder(module, change))
