"""A front's loop, and a fresh one in its place when it breaks.

A defect in the policy must cost neither a node's connection nor a request. All that matters to the
policy is known outside of it. So a fresh one is told of that, and requests go on where they run.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from c2cserve.core import fleet
from c2cserve.policy.fleet.policy import FleetPolicy
from c2cserve.runtime.driver import tick
from c2cserve.runtime.ports import Recorder
from c2cserve.serving.loop_breaks import LoopBreaks, reason

log = logging.getLogger(__name__)

_SHORTEST_S = 0.001
"""Between two decisions without an event: others are to be served meanwhile."""

Loop = tuple[FleetPolicy, Recorder[Any, Any]]
"""A policy without any state yet, and the record of its stream."""


@dataclass(frozen=True, slots=True)
class RestartTick:
    """The events of one tick of a fresh policy. `request`, `node`: what they are about; if the loop
    breaks in it, that is at fault."""

    events: tuple[fleet.FleetEvent, ...]
    request: str = ""
    node: str = ""


class LoopWorld(Protocol):
    """What a front's loop decides about."""

    def carry_out(self, action: fleet.FleetAction) -> None: ...

    def restart_ticks(self) -> Sequence[RestartTick]:
        """Return what a fresh policy is told, in ticks."""
        ...

    def expel(self, at_fault: RestartTick, fault: Exception) -> None:
        """Part with the request or the node of which no policy can be told."""
        ...

    def abort(self, reason: str) -> None: ...


class FrontLoop:
    def __init__(self, world: LoopWorld, make_loop: Callable[[int], Loop]) -> None:
        """`make_loop` takes the number of the loop. It is called with 1 at once, and may raise."""
        self._world = world
        self._make_loop = make_loop
        self._policy, self._record = make_loop(1)
        self._breaks = LoopBreaks()
        self._wakeup: asyncio.TimerHandle | None = None
        self._closed = False
        self.restarts = 0

    def tick(self, *events: fleet.FleetEvent) -> None:
        """Tell the policy what happened, and carry out what it decides."""
        if self._closed:
            return
        try:
            self._tick(events)
        except Exception as fault:
            log.exception("the front's loop broke")
            self._start_anew(fault)
        self._cancel_wakeup()
        if (at_s := self._policy.wakeup) is not None and not self._closed:
            delay_s = max(_SHORTEST_S, at_s - time.monotonic())
            self._wakeup = asyncio.get_running_loop().call_later(delay_s, self.tick)

    def submit(self, action: fleet.FleetAction) -> None:
        """Carry out a decision (`runtime.ports.Executor`)."""
        self._world.carry_out(action)

    def close(self) -> None:
        """Make no more decisions."""
        self._closed = True
        self._cancel_wakeup()

    def _cancel_wakeup(self) -> None:
        if self._wakeup is not None:
            self._wakeup.cancel()
            self._wakeup = None

    def _tick(self, events: Sequence[fleet.FleetEvent]) -> None:
        tick(self._policy, time.monotonic(), events, self, self._record)

    def _start_anew(self, fault: Exception) -> None:
        """Run fresh loops until one gets through all that it is told at first. A break does not
        count if what caused it was found."""
        self._breaks.note()
        found = False
        while not self._breaks.too_many and (broken := self._catch_up()) is not None:
            at_fault, fault = broken
            if at_fault.request or at_fault.node:
                self._world.expel(at_fault, fault)
                if not found:
                    self._breaks.excuse(1)
                found = True
            else:
                self._breaks.note()
        if self._breaks.too_many:
            self._world.abort(reason("front", fault))

    def _catch_up(self) -> tuple[RestartTick, Exception] | None:
        """Begin a fresh loop. Return the tick that breaks it, and how; None if none does."""
        self.restarts += 1
        log.warning("the front's loop starts anew")
        at = RestartTick(())
        try:
            self._policy, self._record = self._make_loop(self.restarts + 1)
            for at in self._world.restart_ticks():
                self._tick(at.events)
        except Exception as fault:
            what = f"request {at.request}" if at.request else f"node {at.node}" if at.node else "it"
            log.exception("%s breaks the front's loop as it starts", what)
            return at, fault
        return None
