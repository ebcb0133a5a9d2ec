"""Child processes that are started before they are needed.

A child that imports for as long as its parent is ready when the parent is, if both begin together.
This module imports nothing large: a command line uses it before its own imports.
"""

import contextlib
from collections.abc import Callable
from typing import Generic, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Prestarted(Generic[P, T]):
    """Starts children of one kind, some of them ahead. Used by one thread at a time."""

    def __init__(self, start: Callable[P, T]) -> None:
        """`start` starts a child, and raises OSError if it cannot."""
        self._start = start
        self._ready: list[tuple[object, T]] = []
        """Arguments, and the child that was started with them."""

    def prestart(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Start a child, which the next `take` of equal arguments returns. Where that fails, for
        want of processes or descriptors, `take` tries again and says why."""
        with contextlib.suppress(OSError):
            self.add(self._start(*args, **kwargs), *args, **kwargs)

    def add(self, child: T, *args: P.args, **kwargs: P.kwargs) -> None:
        """Have a later `take` of equal arguments return this child."""
        self._ready.append(((args, kwargs), child))

    def take(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Return a child that was started ahead, or start one. Raises OSError."""
        for i, (given, _) in enumerate(self._ready):
            if given == (args, kwargs):
                return self._ready.pop(i)[1]
        return self._start(*args, **kwargs)

    def __len__(self) -> int:
        """How many are ready."""
        return len(self._ready)
