"""The ports of a loop beside its policy. Live and simulated runs differ only in what implements
them."""

from collections.abc import Sequence
from typing import Protocol, TypeVar

E_co = TypeVar("E_co", covariant=True)
E_contra = TypeVar("E_contra", contravariant=True)
A_contra = TypeVar("A_contra", contravariant=True)


class Source(Protocol[E_co]):
    def wait(self, until: float | None) -> tuple[float, Sequence[E_co]]:
        """Block until something happened or the clock reads `until` (seconds); return the time
        and every event since the last call, oldest first. An `until` in the past polls."""
        ...


class Executor(Protocol[A_contra]):
    def submit(self, action: A_contra) -> None:
        """Start carrying out an action; its outcome arrives as events. A dead worker or a failed
        step never raises here: that is an event too."""
        ...


class Recorder(Protocol[E_contra, A_contra]):
    def __call__(
        self, now: float, events: Sequence[E_contra], actions: Sequence[A_contra]
    ) -> None: ...


def no_record(now: float, events: Sequence[object], actions: Sequence[object]) -> None:
    """Record nothing."""
