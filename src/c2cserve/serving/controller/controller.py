"""The controller's loop, and a fresh one in its place when it breaks.

A defect in the policy or in the world must not end a server whose workers are sound and whose
clients wait. The loop starts anew with a fresh policy, which `serving.controller.restart` brings up
to date. A loop that breaks again and again ends the server.
"""

import logging
from collections.abc import Callable

from c2cserve.core.actions import BaselineClusterAction, ClusterAction
from c2cserve.core.events import ClusterEvent
from c2cserve.core.policy import Policy
from c2cserve.runtime.driver import run
from c2cserve.runtime.ports import Recorder
from c2cserve.serving.controller.fleet import FleetDown
from c2cserve.serving.controller.world import Aborted, ControllerWorld
from c2cserve.serving.loop_breaks import LoopBreaks, reason

log = logging.getLogger(__name__)

Action = ClusterAction | BaselineClusterAction
Loop = tuple[Policy[ClusterEvent, Action], Recorder[ClusterEvent, Action]]
"""A policy without any state yet, and the record of its stream."""


class Controller:
    def __init__(self, world: ControllerWorld, make_loop: Callable[[int], Loop]) -> None:
        """`make_loop` takes the number of the loop. It is called with 1 at once, and may raise."""
        self._world = world
        self._make_loop = make_loop
        self._loop = make_loop(1)
        self._number = 1
        self._breaks = LoopBreaks()

    def run(self) -> str | None:
        """Run until drained, or until the loop cannot go on. Return None after a drain, else the
        reason in one line."""
        broken = False
        while True:
            try:
                if broken:
                    self._start_anew()
                policy, record = self._loop
                run(policy, self._world, self._world, record)
                return None
            except (Aborted, FleetDown) as end:
                return str(end)
            except Exception as fault:
                log.exception("the controller's loop broke")
                self._breaks.note()
                if self._breaks.too_many:
                    return reason("controller", fault)
                broken = True

    def _start_anew(self) -> None:
        """Prepare a fresh loop. If a request was at fault, it has failed by now: then neither this
        break nor the one that led to it counts."""
        if self._world.restart():
            self._breaks.excuse(2)
        self._number += 1
        self._loop = self._make_loop(self._number)
        log.warning("the controller's loop starts anew")
