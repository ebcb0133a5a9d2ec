"""Forks of this process, which compute side by side."""

import gc
import os
import signal
from collections.abc import Generator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import active_children, get_context

from c2cserve.processes.parent_death import end_with_parent


def cpus() -> int:
    """Return how many CPUs this process may run on."""
    return len(os.sched_getaffinity(0))


@contextmanager
def forks(count: int) -> Generator[Executor | None]:
    """Yield an executor of so many processes; None for one, which is this process itself.

    They are forks, which have imported what this process has. So it must have no other threads yet.
    At the end, tasks that still run are ended: no result is waited for."""
    if count == 1:
        yield None
        return
    others = set(active_children())
    gc.freeze()  # else a collection in a fork would copy every page of objects
    pool = ProcessPoolExecutor(count, get_context("fork"), initializer=_begin)
    try:
        _fork_all(pool)
        yield pool
    finally:
        for process in set(active_children()) - others:
            process.terminate()
        pool.shutdown(cancel_futures=True)
        gc.unfreeze()


def _fork_all(pool: Executor) -> None:
    """Fork all processes before the first task. An interrupt waits meanwhile, or a fork that has
    not begun would print where it was."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        pool.submit(os.getpid).result()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin() -> None:
    """Leave an interrupt of the terminal to the parent, which ends its children."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    end_with_parent()
