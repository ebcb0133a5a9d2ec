"""Simulations of a plan in time: those that have begun, and those that it will begin.

processor 0   ====done====|===under way==-----|---foretold---|
processor 1   ==done==|===done===|---foretold---|---foretold---|
                               now
"""

from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from c2cserve.sim.planning.trials import SeedResult, Simulated, TrialKey, key_of

_LATE = 0.15
"""What has run for longer than was expected goes on for this share of the time it has run."""


class Here(Executor):
    """Runs each simulation in this process, as it is submitted."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done = Future[Any]()
        done.set_result(fn(*args, **kwargs))
        return done


@dataclass(slots=True)
class Begun:
    """A simulation that was given to a processor, or waits for one."""

    job: Simulated
    at_s: float
    ended_s: float | None = None
    result: SeedResult | None = None


class Log(Executor):
    """Hands simulations to another executor, and notes when they begin and end."""

    def __init__(self, executor: Executor, clock: Callable[[], float]) -> None:
        self._executor, self._clock = executor, clock
        self.begun: dict[TrialKey, Begun] = {}
        """Simulations in the order in which they were handed on."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        [job] = args
        begun = self.begun[key_of(job)] = Begun(job, self._clock())
        future = self._executor.submit(fn, job)
        future.add_done_callback(partial(self._end, begun))
        return future

    def _end(self, begun: Begun, future: Future[SeedResult]) -> None:
        if not future.cancelled() and future.exception() is None:
            begun.result = future.result()
            begun.ended_s = self._clock()


class Later(Future[SeedResult]):
    """A result that is there at a moment of virtual time, which waiting for it reaches."""

    def __init__(self, foretold: "Foretold", end_s: float, result: SeedResult) -> None:
        super().__init__()
        self._foretold, self._end_s = foretold, end_s
        self.set_result(result)

    def result(self, timeout: float | None = None) -> SeedResult:
        self._foretold.reach(self._end_s)
        return super().result(timeout)


class Foretold(Executor):
    """Goes on from a log in virtual time, first come, first served."""

    def __init__(
        self, log: Log, guess: Callable[[Simulated], SeedResult], now_s: float, width: int
    ) -> None:
        self._guess, self._from_s = guess, now_s
        self._free_s = [0.0] * width
        self.now_s = 0.0
        self._known: dict[TrialKey, tuple[float, SeedResult]] = {}
        for key, begun in list(log.begun.items()):
            begin_s = max(begun.at_s, min(self._free_s))
            if begun.ended_s is not None and begun.result is not None:
                result, end_s = begun.result, begun.ended_s
            else:
                result = guess(begun.job)
                end_s = max(begin_s + result.took_s, now_s + _LATE * max(0.0, now_s - begin_s))
            self._occupy(end_s)
            self._known[key] = (end_s, result)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        [job] = args
        known = self._known.get(key_of(job))
        if known is None:
            result = self._guess(job)
            end_s = max(self.now_s, self._from_s, min(self._free_s)) + result.took_s
            self._occupy(end_s)
            known = (end_s, result)
        return Later(self, *known)

    def reach(self, time_s: float) -> None:
        self.now_s = max(self.now_s, time_s)

    def _occupy(self, end_s: float) -> None:
        """Give the processor that is free first something to do."""
        self._free_s[self._free_s.index(min(self._free_s))] = end_s
