"""How long processes wanted to run while others had the processors.

The kernel counts it for each thread (`/proc/PID/task/TID/schedstat`, second field). What is left
without it is the server's own: work, locks, timers and waits."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Self

_NS_PER_S = 1e9


def run_delays(pids: Iterable[int]) -> dict[int, float]:
    """Return the seconds so far of each thread of these processes. One that has ended has none."""
    found: dict[int, float] = {}
    for pid in pids:
        try:
            threads = list(Path(f"/proc/{pid}/task").iterdir())
        except FileNotFoundError:
            continue
        for thread in threads:
            try:
                fields = (thread / "schedstat").read_text().split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            found[int(thread.name)] = int(fields[1]) / _NS_PER_S
    return found


def delayed_s(before: dict[int, float], after: dict[int, float]) -> float:
    """Return the seconds between the two, of all threads together."""
    return sum(seconds - before.get(thread, 0.0) for thread, seconds in after.items())


class BackgroundWatch(ABC):
    """A thread that runs beside a block, until `_stop` is set at its end."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    @abstractmethod
    def _run(self) -> None: ...


class DelayWatch(BackgroundWatch):
    """Sums up what these processes are delayed until the end of the block, or until they end."""

    def __init__(self, pids: Iterable[int]) -> None:
        super().__init__()
        self._pids = list(pids)
        self._before = run_delays(self._pids)
        self._after = dict(self._before)

    @property
    def seconds(self) -> float:
        return delayed_s(self._before, self._after)

    def _run(self) -> None:
        while not self._stop.wait(0.02):
            self._after |= run_delays(self._pids)
