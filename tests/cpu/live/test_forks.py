"""Workers are forks of one process, and children of the server like any other process of its."""

import contextlib
import ctypes
import os
import select
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from child_processes import children_of
from descriptors import no_descriptors

from c2cserve.processes.prestarted import Prestarted
from c2cserve.server.settings import TextSettings
from c2cserve.server.text.start import TEXT_PROCESSES
from c2cserve.serving.controller.probe_start import PROBES
from c2cserve.serving.controller.workers import Spawned, Spawner
from c2cserve.serving.ipc import worker_forks
from c2cserve.serving.prestart import prestart

_SUBREAPER, _IS_SUBREAPER = 36, 37
_START = """
import sys, types
sys.modules["c2cserve.serving.worker.engine_host"] = engine = types.ModuleType("engine_host")
engine.WorkerEngine = None
{more}
from c2cserve.serving.worker.process import worker
worker()
"""
"""A fork server without its heavy imports."""

Start = Callable[..., Spawner]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Makes a spawner whose fork servers run `more` first."""
    prctl, before = ctypes.CDLL(None).prctl, ctypes.c_int()
    prctl(_IS_SUBREAPER, ctypes.byref(before))
    with contextlib.ExitStack() as stack:

        def started(more: str = "", timeout_s: float = 60.0) -> Spawner:
            command = (sys.executable, "-c", _START.format(more=more))
            monkeypatch.setattr(worker_forks, "FORK_SERVER", command)
            return stack.enter_context(contextlib.closing(Spawner(timeout_s)))

        yield started
    prctl(_SUBREAPER, before.value)  # other tests' forks are children of this process, too


def take(spawner: Spawner) -> Spawned:
    while (spawned := spawner.take()) is None:
        awaited = spawner.awaited_fd
        assert awaited is not None
        assert select.select([awaited], [], [], 60.0)[0], "no answer"
    return spawned


def forks_pid(spawner: Spawner) -> int:
    assert spawner._forks is not None
    return spawner._forks.pid


def parent(pid: int) -> int:
    stat = Path(f"/proc/{pid}/stat").read_text()
    return int(stat.rpartition(")")[2].split()[1])


def test_workers_are_children_of_the_server_in_groups_of_their_own(start: Start) -> None:
    spawner = start()
    first, second = take(spawner), take(spawner)
    for one in (first, second):
        assert one.process.poll() is None
        assert not one.ending
        assert parent(one.process.pid) == os.getpid()
    first.process.kill()
    assert first.process.wait() == first.process.poll() == -signal.SIGKILL
    assert first.ending
    assert second.process.poll() is None
    assert os.getpgid(second.process.pid) == second.process.pid
    for one in (first, second):
        one.end()


def test_a_worker_that_is_of_no_use_ends(start: Start) -> None:
    spawned = take(start())
    spawned.channel.close()
    assert spawned.process.wait() == 0


def test_workers_outlive_a_fork_server_and_another_one_takes_its_place(start: Start) -> None:
    spawner = start()
    old = take(spawner)
    killed = forks_pid(spawner)
    os.kill(killed, signal.SIGKILL)
    os.waitid(os.P_PID, killed, os.WEXITED | os.WNOWAIT)
    new = take(spawner)
    assert forks_pid(spawner) != killed
    assert old.process.poll() is None
    for one in (old, new):
        one.end()


def test_a_fork_server_that_dies_while_it_is_asked_is_an_error_once(start: Start) -> None:
    spawner = start()
    assert spawner.take() is None, "it has just been started"
    os.kill(forks_pid(spawner), signal.SIGKILL)
    with pytest.raises(OSError, match="the fork server ended: killed by signal 9"):
        take(spawner)
    take(spawner).end()


def test_a_fork_server_that_cannot_import_is_an_error(start: Start) -> None:
    with pytest.raises(OSError, match="the fork server ended: exited with status 1"):
        take(start("import nothing_of_this_name"))


def test_a_fork_server_that_does_not_answer_is_replaced(start: Start) -> None:
    spawner = start("import signal; signal.pause()", timeout_s=100.0)
    assert spawner.take() is None
    silent = forks_pid(spawner)
    spawner._asked_s -= 101.0
    with pytest.raises(TimeoutError, match="the fork server took more than 100 s"):
        spawner.take()
    assert not Path(f"/proc/{silent}").exists()
    assert spawner.awaited_fd is None


_NO_PROCESSES = """
import errno, os
def fork():
    raise OSError(errno.EAGAIN, "no more processes")
os.fork = fork
"""


def test_a_fork_that_fails_is_the_answer_and_the_next_may_succeed(start: Start) -> None:
    spawner = start(_NO_PROCESSES)
    for _ in range(2):
        with pytest.raises(OSError, match="Resource temporarily unavailable"):
            take(spawner)


def test_what_cannot_be_started_leaves_nothing_behind(start: Start) -> None:
    spawner = start()
    before = os.listdir("/proc/self/fd")
    with no_descriptors(), pytest.raises(OSError, match="Too many open files"):
        spawner.take()
    assert os.listdir("/proc/self/fd") == before
    take(spawner).end()
    spawner.close()
    assert os.listdir("/proc/self/fd") == before


def test_the_fork_server_that_was_started_ahead_is_used(start: Start) -> None:
    start().close()  # its command is the short one from here on
    before = set(children_of(os.getpid()))
    worker_forks.FORK_SERVERS.prestart()
    (ahead,) = set(children_of(os.getpid())) - before
    spawner = start()
    spawned = take(spawner)
    assert parent(spawned.process.pid) == os.getpid()
    spawned.end()
    assert forks_pid(spawner) == ahead
    assert not len(worker_forks.FORK_SERVERS)


@pytest.mark.parametrize("options", [["--port", "0", "--help"], ["--cluster=auto"]])
def test_a_server_without_workers_starts_none_ahead(options: list[str]) -> None:
    before = set(children_of(os.getpid()))
    prestart(options)
    assert set(children_of(os.getpid())) == before


def test_a_server_starts_ahead_what_it_needs_for_its_first_token() -> None:
    prestart(["--port", "0"])
    forks, probe = worker_forks.FORK_SERVERS.take(), PROBES.take()
    text = TEXT_PROCESSES.take(TextSettings().memory_bytes)
    for started in (probe, text.process):
        started.kill()
        started.wait()
    text.end.close()
    forks.close()
    for end in (probe.stdin, probe.stdout):
        assert end is not None
        end.close()
    assert not len(worker_forks.FORK_SERVERS) + len(PROBES) + len(TEXT_PROCESSES)


def test_a_child_that_was_started_ahead_serves_equal_arguments_only() -> None:
    started: list[int] = []
    ones = Prestarted(lambda size: started.append(size) or len(started))  # type: ignore[func-returns-value]
    ones.prestart(8)
    assert ones.take(4) == 2
    assert ones.take(8) == 1
    assert ones.take(8) == 3
