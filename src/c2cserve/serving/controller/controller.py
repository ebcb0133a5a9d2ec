"""The controller's loop, and a fresh one in its place when it breaks.

A defect in the policy or in the world must not end a server whose workers are sound and whose
clients wait. The loop starts anew with a fresh policy, which is told what is known
(`serving.controller.books`); a loop that breaks again and again ends the server.
"""

import logging
import time
from collections import deque
from collections.abc import Callable

from c2cserve.core.actions import ClusterAction
from c2cserve.core.events import ClusterEvent
from c2cserve.runtime.driver import run
from c2cserve.runtime.ports import Policy, Recorder
from c2cserve.serving.controller.fleet import FleetDown
from c2cserve.serving.controller.world import Aborted, World

log = logging.getLogger(__name__)

_BREAKS_MAX = 5
_WINDOW_S = 60.0

Loop = tuple[Policy[ClusterEvent, ClusterAction], Recorder[ClusterEvent, ClusterAction]]
"""A policy that knows nothing yet, and the record of its stream."""


class Controller:
    def __init__(self, world: World, make_loop: Callable[[int], Loop]) -> None:
        """`make_loop` is called with the number of the loop: with 1 at once, which may raise."""
        self._world = world
        self._make_loop = make_loop
        self._loop = make_loop(1)
        self._number = 1
        self._breaks: deque[float] = deque()
        """When it broke lately, by no request's fault."""

    def run(self) -> str | None:
        """Until drained (None), or until it cannot go on (why, in one line)."""
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
                if self._too_often():
                    return (
                        f"the controller's loop broke {_BREAKS_MAX} times within {_WINDOW_S:g} s, "
                        f"at last: {type(fault).__name__}: {fault}"
                    )
                broken = True

    def _start_anew(self) -> None:
        """A request at fault is gone: it and the break that told of it do not count."""
        if self._world.restart():
            for _ in range(min(2, len(self._breaks))):
                self._breaks.pop()
        self._number += 1
        self._loop = self._make_loop(self._number)
        log.warning("the controller's loop starts anew")

    def _too_often(self) -> bool:
        now = time.monotonic()
        self._breaks.append(now)
        while now - self._breaks[0] > _WINDOW_S:
            self._breaks.popleft()
        return len(self._breaks) >= _BREAKS_MAX
