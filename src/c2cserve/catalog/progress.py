"""A download's progress as log lines: readable in a terminal and in a container's log alike."""

import logging
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

_EVERY_S = 5.0


class ProgressLog:
    """A `hub.Progress` that logs the sum over all files every few seconds, and at the end."""

    def __init__(self, model: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._model = model
        self._clock = clock
        self._first: dict[str, int] = {}
        """File -> the bytes it had at its first report; they do not count for the speed."""
        self._done: dict[str, int] = {}
        self._total: dict[str, int] = {}
        self._started_s = self._logged_s = clock()

    def __call__(self, file: str, done_bytes: int, total_bytes: int) -> None:
        self._first.setdefault(file, done_bytes)
        self._done[file] = done_bytes
        self._total[file] = total_bytes
        now_s = self._clock()
        done, total = sum(self._done.values()), sum(self._total.values())
        fetched = done - sum(self._first.values())
        if fetched > 0 and (done == total or now_s - self._logged_s >= _EVERY_S):
            self._logged_s = now_s
            rate = fetched / max(1e-9, now_s - self._started_s)
            log.info(
                "%s: %.2f of %.2f GB, %.1f MB/s", self._model, done / 1e9, total / 1e9, rate / 1e6
            )
