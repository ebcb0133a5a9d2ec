"""What decides in a loop: the controller's, a slice's, a front's."""

from collections.abc import Sequence
from typing import Protocol, TypeVar

E_contra = TypeVar("E_contra", contravariant=True)
A_co = TypeVar("A_co", covariant=True)


class Policy(Protocol[E_contra, A_co]):
    """A pure decision maker. `apply` every event of a tick, then `decide` once."""

    @property
    def done(self) -> bool: ...

    @property
    def wakeup(self) -> float | None:
        """When to be asked again if nothing happens, in clock seconds; None: only on events."""
        ...

    def apply(self, event: E_contra) -> None: ...

    def decide(self, now: float) -> Sequence[A_co]: ...
