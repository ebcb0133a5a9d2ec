"""A plugin that shows where the time of tests goes: `scripts/test-times`.

CPU seconds of a test are those of its process and of all below it, set-up and tear-down included.
What a test starts and another one ends counts for both, each for its part. They say more than the
time by the clock does, which depends on what runs beside."""

import os
import time
from collections import defaultdict
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any, Protocol

import pytest

SLOW_S = 2.0
"""What takes more is shown by name."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_KEY = "cpu_seconds"


class _Node(Protocol):
    workeroutput: Mapping[str, dict[str, float]]


def seconds_below() -> float:
    """What the descendants of this process took so far, those that have ended included."""
    children: dict[int, list[int]] = {}
    taken: dict[int, int] = {}
    own = os.getpid()
    for pid in (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        children.setdefault(int(fields[1]), []).append(pid)
        taken[pid] = sum(map(int, fields[13:15] if pid == own else fields[11:15]))
    total, found = 0, [own]
    while found:
        pid = found.pop()
        total += taken.get(pid, 0)
        found += children.get(pid, [])
    return total / _TICKS_PER_S


def _most_first(taken: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(taken.items(), key=lambda one: -one[1])


class CpuSeconds:
    def __init__(self) -> None:
        self._taken: defaultdict[str, float] = defaultdict(float)

    @pytest.hookimpl(wrapper=True)
    def pytest_collection(self) -> Generator[None, object, object]:
        found = yield
        self._taken["collection"] += time.process_time()
        return found

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        before, begun = seconds_below(), time.process_time()
        found = yield
        own_s = time.process_time() - begun  # without what it takes to ask about the others
        self._taken[item.nodeid] += own_s + seconds_below() - before
        return found

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        output: dict[str, Any] | None = getattr(session.config, "workeroutput", None)
        if output is not None:
            output[_KEY] = dict(self._taken)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: _Node) -> None:
        for name, taken in node.workeroutput[_KEY].items():
            self._taken[name] += taken

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        write = terminalreporter.write_line
        terminalreporter.section("CPU seconds")
        folders: defaultdict[str, float] = defaultdict(float)
        for test, taken in self._taken.items():
            folders[str(Path(test.partition("::")[0]).parent if "::" in test else test)] += taken
        for folder, taken in [*_most_first(folders), ("all", sum(folders.values()))]:
            write(f"{taken:8.1f}  {folder}")
        terminalreporter.section(f"tests that take more than {SLOW_S:.0f} CPU seconds")
        for test, taken in _most_first(self._taken):
            if taken > SLOW_S and "::" in test:
                write(f"{taken:8.1f}  {test}")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(CpuSeconds())
