"""What other threads tell the controller: a queue, and a descriptor that is readable when something
is in it."""

import contextlib
import os
import weakref
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence

from c2cserve.core.events import ClusterEvent
from c2cserve.serving.controller.jobs import LiveJob


class Inbox:
    """The controller's thread takes from it, until that ends; any thread may call the rest."""

    def __init__(self) -> None:
        self._items: deque[ClusterEvent | LiveJob] = deque()
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Loaders and signals may post until the process ends: its number is not given away before.
        weakref.finalize(self, os.close, self.wake_fd)

    def post(self, item: ClusterEvent | LiveJob) -> None:
        self._items.append(item)
        self.wake()

    def post_all(self, jobs: Sequence[LiveJob]) -> None:
        """Post jobs that are taken together."""
        self._items.extend(jobs)
        self.wake()

    def wake(self) -> None:
        os.eventfd_write(self.wake_fd, 1)

    def posted(self) -> Mapping[str, int]:
        """Return how many jobs of each tenant wait to be taken."""
        if not self._items:
            return {}
        items = list(self._items)
        return Counter([one.request.tenant for one in items if isinstance(one, LiveJob)])

    def take(self) -> Iterator[ClusterEvent | LiveJob]:
        """Yield all that was posted, oldest first."""
        with contextlib.suppress(BlockingIOError):  # nothing was posted
            os.eventfd_read(self.wake_fd)
        while self._items:
            yield self._items.popleft()
