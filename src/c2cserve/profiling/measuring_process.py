"""Measuring in a process of its own, which is replaced when a measurement breaks it.

After a CUDA error, a process can measure nothing any more. So the survey runs in a process that
never uses the GPU, and asks another one question by question:

    survey ── question ──▶ child: the bench     an answer or a refusal: the child goes on
           ◀── answer ───                       an error, its death, or no answer in time: it is
                                                killed, and the next question starts another one
"""

import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, Self

from c2cserve.core.tensors import LinkHome
from c2cserve.kernels.gpu.gemm.choice.cost import Question
from c2cserve.kernels.gpu.gemm.choice.profile import MachineFacts
from c2cserve.kernels.gpu.gemm.dataflows.table import DataflowName
from c2cserve.kernels.gpu.gemm.traffic import Tiles
from c2cserve.profiling.survey import Bench, Failed, Lost, Refused
from c2cserve.terminal.output import CliError
from c2cserve.transfer.path_profile import PathProfile

_DEATH_S = 30.0
"""The time that a driver may take to end a killed process."""


@dataclass(frozen=True, slots=True)
class Limits:
    start_s: float = 180.0
    """The limit for loading kernels, and for making and registering weights."""
    answer_s: float = 20.0
    """The limit for one answer. Every question of the survey takes a few seconds at most."""
    failures: int = 3
    """The survey ends after so many processes in a row that ended without an answer."""


@dataclass(frozen=True, slots=True)
class _Machine:
    """The properties of a bench."""

    facts: MachineFacts
    homes: Sequence[LinkHome]
    sms: Sequence[int]
    slices: int
    notes: Sequence[str]


@dataclass(frozen=True, slots=True)
class _Child:
    process: BaseProcess
    connection: Connection
    machine: _Machine


class ProcessBench:
    """A `survey.Bench` in another process, which the first question starts.

    A measurement that ends that process raises `Failed`, and `Lost` if several in a row did. If the
    first process cannot start, `CliError` is raised. Use it in a `with`, which ends the process.
    """

    def __init__(self, make: Callable[[], Bench], limits: Limits = Limits()) -> None:
        """`make` is called in the process; it must be importable there."""
        self._make = make
        self._limits = limits
        self._child: _Child | None = None
        self._machine: _Machine | None = None
        self._failures = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        child, self._child = self._child, None
        if child is not None:
            _end(child.process, child.connection)

    @property
    def facts(self) -> MachineFacts:
        return self._properties().facts

    @property
    def homes(self) -> Sequence[LinkHome]:
        return self._properties().homes

    @property
    def sms(self) -> Sequence[int]:
        return self._properties().sms

    @property
    def slices(self) -> int:
        return self._properties().slices

    @property
    def notes(self) -> Sequence[str]:
        return self._properties().notes

    def copies(self, home: LinkHome) -> tuple[float, float, float]:
        return self._ask("copies", home)

    def paths(self, *, relays: bool) -> PathProfile:
        """Return what links carry, alone, and with `relays` combined."""
        return self._ask("paths", relays)

    def write_bytes_per_s(self, sms: int) -> float:
        return self._ask("write_bytes_per_s", sms)

    def seconds(
        self, question: Question, dataflow: DataflowName, tiles: Tiles, chain: int
    ) -> float:
        return self._ask("seconds", question, dataflow, tiles, chain)

    def _properties(self) -> _Machine:
        """Return what the first process sent. A later one on the same GPU sends the same."""
        return self._machine or self._running().machine

    def _ask(self, name: str, *arguments: object) -> Any:
        child = self._running()
        try:
            child.connection.send((name, arguments))
            kind, value = _receive(child.connection, self._limits.answer_s)
        except _Silent as silent:
            raise self._failed(child, f"hangs: {silent}") from silent
        except (EOFError, OSError) as error:
            raise self._failed(child, "") from error
        if kind == "failed":
            raise self._failed(child, value)
        self._failures = 0
        if kind == "refused":
            raise Refused(value)
        return value

    def _failed(self, child: _Child, why: str) -> Failed | Lost:
        """End the process. How it ended is the reason if `why` is empty."""
        self._child = None
        how = _end(child.process, child.connection)
        return self._counted(why or f"the process that measured it {how}")

    def _counted(self, why: str) -> Failed | Lost:
        self._failures += 1
        if self._failures < self._limits.failures:
            return Failed(why)
        return Lost(f"{self._failures} measurements in a row ended their process: {why}")

    def _running(self) -> _Child:
        """Return the process, started anew if the last one has ended."""
        if self._child is None:
            try:
                self._child = self._start()
            except _NotStarted as error:
                if self._machine is None:
                    raise CliError(str(error)) from error
                raise self._counted(f"no process to measure with: {error}") from error
            self._machine = self._machine or self._child.machine
        return self._child

    def _start(self) -> _Child:
        context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        mine, its = context.Pipe()
        process = context.Process(target=_serve, args=(self._make, its), daemon=True)
        process.start()
        its.close()
        try:
            kind, value = _receive(mine, self._limits.start_s)
        except _Silent as silent:
            _end(process, mine)
            raise _NotStarted(str(silent)) from silent
        except (EOFError, OSError) as error:
            raise _NotStarted(f"it {_end(process, mine)}") from error
        if kind != "ready":
            _end(process, mine)
            raise _NotStarted(value)
        return _Child(process, mine, value)


class _Silent(Exception):
    """No answer in time."""


class _NotStarted(Exception):
    """The process could not start. The message says why."""


def _receive(connection: Connection, limit_s: float) -> tuple[str, Any]:
    if not connection.poll(limit_s):
        raise _Silent(f"no answer within {limit_s:g} s")
    return connection.recv()


def _end(process: BaseProcess, connection: Connection) -> str:
    """Kill the process unless it has ended, and return how it ended."""
    connection.close()
    process.join(1.0)  # how it ends by itself says more than that it was killed
    if process.exitcode is None:
        process.kill()
        process.join(_DEATH_S)
    code = process.exitcode
    if code is None:
        return f"does not die within {_DEATH_S:g} s"
    return f"was killed by signal {-code}" if code < 0 else f"exited with status {code}"


def _serve(make: Callable[[], Bench], connection: Connection) -> None:
    """Answer questions, in the child, until its parent closes the connection or one breaks it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's ctrl-C is for the parent
    try:
        bench = make()
        ready = _Machine(bench.facts, bench.homes, bench.sms, bench.slices, bench.notes)
    except Exception as error:  # noqa: BLE001 - the parent reports every kind
        _give_up(connection, "unusable", str(error) if type(error) is CliError else _line(error))
        return
    connection.send(("ready", ready))
    while True:
        try:
            name, arguments = connection.recv()
        except EOFError:
            os._exit(0)
        try:
            answer = "done", getattr(bench, name)(*arguments)
        except Refused as refused:
            answer = "refused", str(refused)
        except Exception as error:  # noqa: BLE001 - most stay in the process: another goes on
            _give_up(connection, "failed", _line(error))
            return
        connection.send(answer)


def _give_up(connection: Connection, kind: str, why: str) -> None:
    connection.send((kind, why))
    os._exit(1)  # destructors can wait for a lost GPU for ever


def _line(error: Exception) -> str:
    """Return one line on an error. CUDA's errors have more lines, of advice."""
    first = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {first}"
