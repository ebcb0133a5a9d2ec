"""The server's text processes, which validate, render and tokenize what clients send.

If a request takes too long, its process is killed and replaced. Costly requests never take the last
process (`claims`), so a long text or a checkpoint's slow template delays no others. Small requests
are sent to a process ahead of its answers (`pipeline`).
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from c2cserve.core.model import name_of
from c2cserve.runtime.gateway import ModelFiles
from c2cserve.server.errors import ApiError, unservable
from c2cserve.server.settings import TextSettings
from c2cserve.server.text.claims import PATIENCE_S, Assigned, Claim, Sharing
from c2cserve.server.text.messages import (
    ModelOpened,
    TextAnswer,
    TextFailure,
    TextRequest,
    TextResult,
)
from c2cserve.server.text.pipeline import Broken, Displaced, Question, TextProcess
from c2cserve.server.text.vocabulary import TokenizerError, Vocabularies, Vocabulary

log = logging.getLogger(__name__)

_WAIT_S = 30.0
"""Time that a request waits for a process before it gets 429."""
_RETRY_S = 5.0
_ANOTHER_S = 2.0
"""How long after the first process the others are started, unless a request waits for one before.
Their imports would otherwise delay the server's first answer."""
_START_RETRY_S = 0.5
"""How soon a process is started again that could not be."""


@dataclass(frozen=True, slots=True)
class _Lent:
    """A process that a request has."""

    process: TextProcess
    question: Question | None
    """The request, sent already. None if the process must load its tokenizer before."""
    vocabulary: Vocabulary | None


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A request that waits for a process."""

    claim: Claim
    work: TextRequest
    lent: asyncio.Future[_Lent]


class TextPool:
    """The text processes and their queue. Used on the server's event loop, between `start` and
    `close`."""

    def __init__(self, settings: TextSettings, vocabularies: int) -> None:
        """`vocabularies`: the most to keep."""
        self._settings = settings
        self._assigned: dict[TextProcess, Assigned] = {}
        """Process -> the requests that have it."""
        self._waiting: dict[Claim, _Waiting] = {}
        """Those without a process, the one that has waited longest first."""
        self._sharing = Sharing(settings.processes)
        self._vocabularies = Vocabularies(vocabularies)
        self._settling: set[Claim] = set()
        """Those whose clients left, while a process still works for them."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._others: asyncio.TimerHandle | None = None
        """Starts those processes that are not started yet."""
        self._start_failed = False
        self.killed: Counter[str] = Counter({"timeout": 0, "broken": 0, "cancelled": 0})
        """Reason -> processes that were replaced for it."""

    def start(self) -> None:
        self._assigned = {self._process(): Assigned()}
        self._others = asyncio.get_running_loop().call_later(_ANOTHER_S, self._start_others)

    def _start_others(self) -> None:
        """Start the processes that are not started yet."""
        if self._others is not None:
            self._others.cancel()
            self._others = None
            while len(self._assigned) < self._settings.processes and self._start_another():
                pass

    def _start_another(self) -> bool:
        """Start a process. Return whether that worked; if not, it is tried again soon."""
        try:
            self._assigned[self._process()] = Assigned()
        except OSError as error:  # no descriptors or processes are left: that is not for ever
            if not self._start_failed:
                log.error("a text process cannot be started now: %s", error)
            self._start_failed = True
            if self._others is None:
                loop = asyncio.get_running_loop()
                self._others = loop.call_later(_START_RETRY_S, self._start_again)
            return False
        self._start_failed = False
        return True

    def _start_again(self) -> None:
        self._start_others()
        self._hand_out()

    def _process(self) -> TextProcess:
        return TextProcess(self._settings, self._ended)

    async def close(self) -> None:
        """End all processes, without waiting for their present work."""
        if self._others is not None:
            self._others.cancel()
            self._others = None
        processes, self._assigned = list(self._assigned), {}
        for one in self._waiting.values():
            one.lent.cancel()
        await asyncio.gather(*(one.end() for one in processes), *self._tasks)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def pids(self) -> list[int]:
        return [one.pid for one in self._assigned]

    def forget(self, model: str) -> None:
        """Drop all data of a model that was removed or reloaded."""
        self._vocabularies.forget(model)
        for process in self._assigned:
            process.forget(model)

    # ---- work ---------------------------------------------------------------------------------

    async def work(
        self, work: TextRequest, files: ModelFiles | None, param: str
    ) -> tuple[TextResult | TextAnswer, Vocabulary | None]:
        """Have a process prepare a request. `files`: those of its target; without them, there is no
        vocabulary. `param`: the field to blame when it takes too long. Raises ApiError, and
        `Refused` when the tokenizer's files have changed."""
        version = "" if files is None else files.key
        claim = Claim(name_of(version), version, len(work.body))
        while True:
            try:
                async with self._lent(claim, work) as lent:
                    return await self._work(lent, claim, work, files, param)
            except Displaced:
                claim.displaced = True  # once is enough: it has a process to itself then

    async def _work(
        self, lent: _Lent, claim: Claim, work: TextRequest, files: ModelFiles | None, param: str,
    ) -> tuple[TextResult | TextAnswer, Vocabulary | None]:  # fmt: skip
        question, vocabulary = lent.question, lent.vocabulary
        limit_s = self._settings.timeout_s
        if question is None and files is not None:
            vocabulary = await self._vocabulary(lent.process, claim, files)
        try:
            if question is None:
                answer = await lent.process.ask(work, claim, limit_s)
            else:
                answer = await question.answered()
        except TimeoutError as error:
            message = (
                f"{param} took longer than {limit_s:g} s to render and tokenize, this server's "
                "limit (--text-timeout)"
            )
            raise ApiError(400, message, param=param, code="limit_exceeded") from error
        assert isinstance(answer, TextResult | TextAnswer | TextFailure)
        if isinstance(answer, TextFailure):
            raise _api_error(answer)
        return answer, vocabulary

    async def _vocabulary(
        self, process: TextProcess, claim: Claim, files: ModelFiles
    ) -> Vocabulary:
        """Return the vocabulary of a version, and have its tokenizer loaded in the process."""
        version = files.key
        if (vocabulary := self._used(process, version)) is not None:
            return vocabulary
        limit_s = self._settings.load_timeout_s
        known = self._vocabularies.by_digest()
        try:
            answer = await process.open(files, claim, known, limit_s)
        except TimeoutError as error:
            raise unservable(version, "its tokenizer takes too long to load") from error
        if isinstance(answer, TextFailure):
            raise _api_error(answer)
        assert isinstance(answer, ModelOpened)
        vocabulary = known.get(answer.digest)
        if answer.facts is not None:
            try:
                vocabulary = Vocabulary(answer.facts, answer.digest)
            except TokenizerError as error:
                raise unservable(version, str(error)) from error
        assert vocabulary is not None
        self._vocabularies.put(version, vocabulary)
        return vocabulary

    # ---- processes ----------------------------------------------------------------------------

    @asynccontextmanager
    async def _lent(self, claim: Claim, work: TextRequest) -> AsyncGenerator[_Lent]:
        """Lend a process to a request. A process that fails is counted and replaced."""
        lent = await self._take(claim, work)
        lost: str | None = None
        try:
            yield lent
        except ApiError as error:
            timed_out = isinstance(error.__cause__, TimeoutError)
            broken = isinstance(error.__cause__, Broken)
            lost = "timeout" if timed_out else "broken" if broken else None
            raise
        except asyncio.CancelledError:
            self._settle(lent.process, claim)
            raise
        except Broken as error:
            lost = "broken"
            raise ApiError(500, "the request could not be tokenized: its process ended") from error
        finally:
            if claim not in self._settling:
                self._give_back(lent.process, claim, lost)

    def _settle(self, process: TextProcess, claim: Claim) -> None:
        """Take a process back from a request whose client left, when its work for it is over. One
        that takes long is replaced."""

        async def settle() -> None:
            over = await process.settled(claim, PATIENCE_S)
            self._settling.discard(claim)
            self._give_back(process, claim, None if over else "cancelled")

        self._settling.add(claim)
        self._run(settle())

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _take(self, claim: Claim, work: TextRequest) -> _Lent:
        if len(self._waiting) >= self._settings.waiting:
            raise self._crowded()
        lent: asyncio.Future[_Lent] = asyncio.get_running_loop().create_future()
        self._waiting[claim] = _Waiting(claim, work, lent)
        self._hand_out()
        claimed = False
        try:
            async with asyncio.timeout(_WAIT_S):
                found = await asyncio.shield(lent)
            claimed = True
            return found
        except TimeoutError as error:
            raise self._crowded() from error
        finally:
            self._waiting.pop(claim, None)
            # A process may have been assigned in the moment of giving up.
            if not claimed and lent.done() and not lent.cancelled():
                self._settle(lent.result().process, claim)

    def _hand_out(self) -> None:
        """Assign processes to the longest waiting requests that may have one.

        A request that must have a process to itself gets one in its turn. Until one is idle, those
        after it are sent behind others on other processes only."""
        now = time.monotonic()
        for process in [one for one, assigned in self._assigned.items() if not assigned.claims]:
            if (lost := process.lost) is not None:
                self._replace(process, lost)
        if self._waiting and all(assigned.claims for assigned in self._assigned.values()):
            self._start_others()
        kept: set[TextProcess] = set()
        refused: set[tuple[str, bool, bool]] = set()
        """Kinds of requests that no process was free for: it can only be fewer in this round."""
        given: list[Claim] = []
        for claim, one in self._waiting.items():
            if all(
                assigned.full or process in kept for process, assigned in self._assigned.items()
            ):
                break
            kind = claim.version, claim.large, claim.displaced
            if one.lent.done() or kind in refused:
                continue
            process = self._start(claim, kept, now) or self._follow(claim, kept, now)
            if process is None:
                refused.add(kind)
                kept |= self._keep(claim, kept, now)
                continue
            self._assigned[process].add(claim)
            claim.since = now
            given.append(claim)
            one.lent.set_result(self._send(process, claim, one.work))
        for claim in given:
            del self._waiting[claim]

    def _send(self, process: TextProcess, claim: Claim, work: TextRequest) -> _Lent:
        """Send a request if its process can do it at once. Waiting for the request's own turn on
        the event loop could take longer than the work."""
        question = None
        if (vocabulary := self._used(process, claim.version)) is not None:
            question = process.send(work, claim, self._settings.timeout_s)
        return _Lent(process, question, vocabulary)

    def _used(self, process: TextProcess, version: str) -> Vocabulary | None:
        """Note a use of a version, and return its vocabulary. None: the version must be opened
        before, in the process or here."""
        if not process.has(version) or (vocabulary := self._vocabularies.use(version)) is None:
            return None
        process.use(version)
        return vocabulary

    def _start(self, claim: Claim, kept: set[TextProcess], now: float) -> TextProcess | None:
        """Return an idle process for a request: one with its tokenizer, or the one with the
        fewest."""
        idle = [one for one, own in self._assigned.items() if not own.claims and one not in kept]
        running = [own.claims[0] for own in self._assigned.values() if own.claims]
        if not idle or not self._sharing.may_start(claim, running, now):
            return None
        ready = next((one for one in idle if one.has(claim.version)), None)
        return ready or min(idle, key=lambda one: one.loaded)

    def _follow(self, claim: Claim, kept: set[TextProcess], now: float) -> TextProcess | None:
        """Return the process with least to do to which a request may be sent behind others."""
        found: list[tuple[int, TextProcess]] = []
        for process, assigned in self._assigned.items():
            if not assigned.claims or assigned.full or process in kept:
                continue
            if not process.has(claim.version):
                continue
            others = [one for other, one in self._assigned.items() if other is not process]
            if self._sharing.may_follow(claim, assigned, others, now):
                found.append((len(assigned.claims), process))
        return min(found, key=lambda one: one[0])[1] if found else None

    def _keep(self, claim: Claim, kept: set[TextProcess], now: float) -> set[TextProcess]:
        """Return the process that is to become idle for a request, if the request could have it
        then and can have none before."""
        if any(one.has(claim.version) for one in self._assigned) and not claim.alone:
            return set()
        for process in sorted(self._assigned, key=lambda one: len(self._assigned[one].claims)):
            others = [
                own.claims[0]
                for one, own in self._assigned.items()
                if own.claims and one is not process
            ]
            if process not in kept and self._sharing.may_start(claim, others, now):
                return {process}
        return set()

    def _ended(self, process: TextProcess, ended: Sequence[Claim]) -> None:
        """Take a process back from requests that it has answered: others are sent to it before
        these get their next turn on the event loop."""
        assigned, now = self._assigned.get(process), time.monotonic()
        if assigned is None:
            return  # it was replaced, or the pool was closed
        for claim in ended:
            assigned.remove(claim)
            self._sharing.ended(claim, now)
        self._hand_out()

    def _give_back(self, process: TextProcess, claim: Claim, lost: str | None) -> None:
        """Take a process back from a request, unless that was done when it was answered. `lost`:
        why the process must be replaced, if it must."""
        assigned = self._assigned.get(process)
        if assigned is None:
            return
        if claim in assigned.claims:
            assigned.remove(claim)
            self._sharing.ended(claim, time.monotonic())
        if lost is not None:
            self._replace(process, lost)
        self._hand_out()

    def _replace(self, process: TextProcess, reason: str) -> None:
        self.killed[reason] += 1
        log.warning("text process %d is replaced: %s", process.pid, reason)
        del self._assigned[process]
        self._run(process.end())
        self._start_another()

    @staticmethod
    def _crowded() -> ApiError:
        text = "too many requests wait to be tokenized"
        return ApiError(429, text, code="rate_limit_exceeded", retry_after_s=_RETRY_S)


def _api_error(failed: TextFailure) -> ApiError:
    error = ApiError(failed.status, failed.message, param=failed.param, code=failed.code)
    if failed.broken:
        error.__cause__ = Broken()
    return error
