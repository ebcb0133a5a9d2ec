"""Measuring in a process of its own, which is replaced when a measurement breaks it.

CUDA errors stick to a process: after one, nothing in it can be measured any more. The survey
therefore runs in a process that never touches the GPU, and asks another one question by question:

    survey ── question ──▶ child: the bench     an answer, or a refusal: the child is kept
           ◀── answer ───                       an error, its death, no answer in time: it is
                                                killed; the next question starts another one
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

_DEATH_S = 30.0
"""How long a driver may take to end a process that was killed."""


@dataclass(frozen=True, slots=True)
class Limits:
    start_s: float = 180.0
    """Kernels are loaded, weights are made and registered."""
    answer_s: float = 20.0
    """The survey asks for nothing that takes more than a few seconds."""
    failures: int = 3
    """Processes in a row that ended without an answer; after that, the GPU is given up."""


@dataclass(frozen=True, slots=True)
class _Machine:
    """What a bench says of itself."""

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
    """`survey.Bench` that another process computes, started by the first question.

    A measurement that ends that process raises `Failed`, and `Lost` if several in a row did. Raises
    `CliError` where the first process cannot even start. Used by `with`, which ends the process.
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
        return self._known().facts

    @property
    def homes(self) -> Sequence[LinkHome]:
        return self._known().homes

    @property
    def sms(self) -> Sequence[int]:
        return self._known().sms

    @property
    def slices(self) -> int:
        return self._known().slices

    @property
    def notes(self) -> Sequence[str]:
        return self._known().notes

    def copies(self, home: LinkHome) -> tuple[float, float, float]:
        return self._ask("copies", home)

    def write_bytes_per_s(self, sms: int) -> float:
        return self._ask("write_bytes_per_s", sms)

    def seconds(
        self, question: Question, dataflow: DataflowName, tiles: Tiles, chain: int
    ) -> float:
        return self._ask("seconds", question, dataflow, tiles, chain)

    def _known(self) -> _Machine:
        """What the first process said. A later one on the same GPU says the same."""
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
        """End the process; it says how it ended if nothing else does."""
        self._child = None
        how = _end(child.process, child.connection)
        return self._counted(why or f"the process that measured it {how}")

    def _counted(self, why: str) -> Failed | Lost:
        self._failures += 1
        if self._failures < self._limits.failures:
            return Failed(why)
        return Lost(f"{self._failures} measurements in a row ended their process: {why}")

    def _running(self) -> _Child:
        """The process, started anew if the last one has ended."""
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
    """Says why."""


def _receive(connection: Connection, limit_s: float) -> tuple[str, Any]:
    if not connection.poll(limit_s):
        raise _Silent(f"no answer within {limit_s:g} s")
    return connection.recv()


def _end(process: BaseProcess, connection: Connection) -> str:
    """Kill the process unless it has ended, and return how it ended."""
    connection.close()
    process.join(1.0)  # one that ends by itself tells more than one that was killed
    if process.exitcode is None:
        process.kill()
        process.join(_DEATH_S)
    code = process.exitcode
    if code is None:
        return f"does not die within {_DEATH_S:g} s"
    return f"was killed by signal {-code}" if code < 0 else f"exited with status {code}"


def _serve(make: Callable[[], Bench], connection: Connection) -> None:
    """The child: answer questions until nothing asks any more, or one breaks the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's ctrl-C is for the parent
    try:
        bench = make()
        ready = _Machine(bench.facts, bench.homes, bench.sms, bench.slices, bench.notes)
    except Exception as error:  # noqa: BLE001 - whatever it is, the parent says it
        _give_up(connection, "unusable", str(error) if type(error) is CliError else _told(error))
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
        except Exception as error:  # noqa: BLE001 - most stick to the process: another goes on
            _give_up(connection, "failed", _told(error))
            return
        connection.send(answer)


def _give_up(connection: Connection, kind: str, why: str) -> None:
    connection.send((kind, why))
    os._exit(1)  # destructors can wait for a lost GPU for ever


def _told(error: Exception) -> str:
    """What failed, in a line: CUDA's errors go on with advice."""
    first = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {first}"
