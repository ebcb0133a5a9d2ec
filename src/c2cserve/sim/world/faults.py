"""Faults of a simulation: lost slices and slow links."""

from dataclasses import dataclass
from typing import Protocol

from c2cserve.sim.world.links import Network
from c2cserve.sim.world.timeline import Timeline


class Faulty(Protocol):
    """The part of a simulation that faults act on."""

    @property
    def timeline(self) -> Timeline: ...

    @property
    def network(self) -> Network: ...

    def lose_slice(self, slice_id: str, back_s: float) -> None: ...


class Fault(Protocol):
    def schedule(self, simulation: Faulty) -> None: ...


@dataclass(frozen=True, slots=True)
class SliceFault:
    """The slice's worker dies at `at_s` and is back `for_s` later."""

    slice_id: str
    at_s: float
    for_s: float

    def schedule(self, simulation: Faulty) -> None:
        simulation.timeline.at(self.at_s, simulation.lose_slice, self.slice_id, self.for_s)


@dataclass(frozen=True, slots=True)
class LinkFault:
    """The link has only `share` of its bandwidth from `at_s` on, for `for_s`."""

    link: str
    at_s: float
    for_s: float
    share: float

    def schedule(self, simulation: Faulty) -> None:
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
            return SliceFault(name, float(at_s), float(for_s))
        if kind == "link":
            at_s, rest = times.split("+")
            for_s, share = rest.split("*")
            return LinkFault(name, float(at_s), float(for_s), float(share))
    except ValueError as error:
        raise _mistake(text) from error
    raise _mistake(text)


def _mistake(text: str) -> ValueError:
    return ValueError(f"{text!r} is not slice:ID@AT+FOR or link:ID@AT+FOR*SHARE (seconds)")
