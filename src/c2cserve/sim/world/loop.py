"""The machine's loops: each has a policy, an inbox of events, and an executor."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from c2cserve.core.policy import Policy
from c2cserve.runtime.driver import tick
from c2cserve.runtime.ports import Executor, Recorder
from c2cserve.sim.world.timeline import Timeline

E = TypeVar("E")
A = TypeVar("A")


class PolicyLoop(Generic[E, A]):
    def __init__(self, policy: Policy[E, A], executor: Executor[A], record: Recorder[E, A]) -> None:
        self.policy, self.executor, self.record = policy, executor, record
        self.inbox: list[E] = []
        self.queued = False
        self.wake_s: float | None = None
        """When its policy is asked next if no event comes."""
        self.observe: Callable[[], Sequence[E]] | None = None
        """Returns the events of a tick that the policy is told before all others."""


class LoopScheduler:
    """Ticks every loop that has events, in the order of their first event.

    It goes on until no loop has anything to do at this moment."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._queue: deque[PolicyLoop] = deque()  # pyright: ignore[reportMissingTypeArgument]
        self.ticks = 0

    def notify(self, loop: PolicyLoop[E, A], event: E) -> None:
        loop.inbox.append(event)
        if not loop.queued:
            loop.queued = True
            self._queue.append(loop)

    def run_due(self) -> None:
        now = self._timeline.now
        queue = self._queue
        while queue:
            loop = queue.popleft()
            loop.queued = False
            events, loop.inbox = loop.inbox, []
            if loop.observe is not None:
                events = [*loop.observe(), *events]
            tick(loop.policy, now, events, loop.executor, loop.record)
            self.ticks += 1
            wake_s = loop.policy.wakeup
            if wake_s is not None and wake_s != loop.wake_s:
                loop.wake_s = wake_s
                self._timeline.at(wake_s, self._wake, loop, wake_s)

    def _wake(self, loop: PolicyLoop[E, A], wake_s: float) -> None:
        if loop.wake_s == wake_s:
            loop.wake_s = None
            if not loop.queued:
                loop.queued = True
                self._queue.append(loop)
