"""Faults of a simulation: lost slices and slow links."""

from collections.abc import Collection
from dataclasses import dataclass
from math import inf
from typing import Protocol

from c2cserve.sim.world.links import Network
from c2cserve.sim.world.timeline import Timeline


class Faulty(Protocol):
    """The part of a simulation that faults act on."""

    @property
    def timeline(self) -> Timeline: ...

    @property
    def network(self) -> Network: ...

    @property
    def slice_ids(self) -> Collection[str]: ...

    def lose_slice(self, slice_id: str, back_s: float) -> None: ...


class Fault(Protocol):
    def schedule(self, simulation: Faulty) -> None:
        """Raises ValueError if the machine has no such slice or link."""
        ...


@dataclass(frozen=True, slots=True)
class SliceFault:
    """The slice's worker dies at `at_s` and is back `for_s` later."""

    slice_id: str
    at_s: float
    for_s: float

    def schedule(self, simulation: Faulty) -> None:
        if self.slice_id not in simulation.slice_ids:
            raise _unknown("slice", self.slice_id, simulation.slice_ids)
        simulation.timeline.at(self.at_s, simulation.lose_slice, self.slice_id, self.for_s)


@dataclass(frozen=True, slots=True)
class LinkFault:
    """The link has only `share` of its bandwidth from `at_s` on, for `for_s`."""

    link: str
    at_s: float
    for_s: float
    share: float

    def schedule(self, simulation: Faulty) -> None:
        if self.link not in simulation.network.links:
            raise _unknown("link", self.link, simulation.network.links)
        whole = simulation.network.links[self.link].nominal_bytes_per_s
        simulation.timeline.at(
            self.at_s, simulation.network.set_speed, self.link, whole * self.share
        )
        simulation.timeline.at(
            self.at_s + self.for_s, simulation.network.set_speed, self.link, whole
        )


def parse_fault(text: str) -> Fault:
    """`slice:ID@AT+FOR` or `link:ID@AT+FOR*SHARE`, times in seconds. Raises ValueError."""
    try:
        kind, rest = text.split(":", 1)
        name, times = rest.rsplit("@", 1)
        if kind == "slice":
            at_s, for_s = times.split("+")
            return SliceFault(name, _at_least_0(at_s), _at_least_0(for_s))
        if kind == "link":
            at_s, rest = times.split("+")
            for_s, share = rest.split("*")
            return LinkFault(name, _at_least_0(at_s), _at_least_0(for_s), _at_least_0(share))
    except ValueError as error:
        raise _mistake(text) from error
    raise _mistake(text)


def _at_least_0(text: str) -> float:
    value = float(text)
    if not 0 <= value < inf:
        raise ValueError(f"{text!r} is not a number of at least 0")
    return value


def _unknown(kind: str, name: str, known: Collection[str]) -> ValueError:
    return ValueError(f"no {kind} {name!r} to fail; there are: {', '.join(known)}")


def _mistake(text: str) -> ValueError:
    return ValueError(f"{text!r} is not slice:ID@AT+FOR or link:ID@AT+FOR*SHARE (seconds)")
