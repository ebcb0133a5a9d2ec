"""One text process, from the server's side: questions go ahead of their answers.

The event loop may be late by many milliseconds when a server is overloaded. A process that waits
for its next question meanwhile does nothing. So it is sent questions ahead:

    process   | answers 1 | answers 2 | answers 3 | ...
    loop      sends 1, 2, 3 ............ reads 1, 2; sends 4, 5 ............

They are answered in order. A question's time counts from when the one before it was answered. What
is behind a question that takes long is *displaced*: its asker sends it to another process, and its
answer here is not used.
"""

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection

from c2cserve.core.model import name_of
from c2cserve.runtime.gateway import ModelFiles, Refused
from c2cserve.server.settings import TextSettings
from c2cserve.server.text.claims import PATIENCE_S, Claim
from c2cserve.server.text.messages import (
    FRAME_HEAD_BYTES,
    FromText,
    ModelOpened,
    OpenModel,
    TextFailure,
    TextRequest,
    ToText,
    decode_from_text,
    frame,
)
from c2cserve.server.text.start import TEXT_PROCESSES

_READ_S = 0.001
"""A late event loop first calls what is due, and reads later in the same turn. What is due after so
long, or in the next turn, finds all answers read that had arrived before."""


class Broken(Exception):
    """The process ended, or must not get another request."""


class Displaced(Exception):
    """A question before this one takes long, or the process has ended with it."""


class Question:
    """A message that was sent to a process, and its answer to come."""

    def __init__(self, message: ToText, claim: Claim, limit_s: float) -> None:
        self.claim = claim
        self.limit_s = limit_s
        self._is_last = isinstance(message, TextRequest)
        self.answer: asyncio.Future[FromText] = asyncio.get_running_loop().create_future()
        self.answer.add_done_callback(_retrieved)
        self.over = asyncio.Event()
        """The process has answered, whether or not that was still wanted, or it is gone."""

    def ends_claim(self, answer: FromText) -> bool:
        """Return whether the process is done with the request, and may have others."""
        wanted = self._is_last and not self.answer.done()
        return wanted and not (isinstance(answer, TextFailure) and answer.broken)

    async def answered(self) -> FromText:
        """Return the answer. Raises TimeoutError, `Broken` and `Displaced`. After the first two the
        process must be replaced; after the last it may be `lost`."""
        return await asyncio.shield(self.answer)

    def fail(self, error: Exception) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)


def _retrieved(answer: asyncio.Future[FromText]) -> None:
    """Mark a failure as seen: its asker may have left."""
    if not answer.cancelled():
        answer.exception()


class TextProcess(asyncio.Protocol):
    """One text process and this end of its socket. Used on the event loop."""

    def __init__(
        self, settings: TextSettings, ended: Callable[["TextProcess", list[Claim]], None]
    ) -> None:
        """`ended` receives the requests that the process is done with, as soon as their answers
        are read."""
        self._ended = ended
        self._opened: OrderedDict[str, str] = OrderedDict()
        """Versions of models whose tokenizers are loaded -> digests of their files, the least
        recently used first."""
        self._dropped: set[str] = set()
        """Versions whose tokenizers are of no use; the next `OpenModel` drops them."""
        self._capacity = settings.tokenizers
        started = TEXT_PROCESSES.take(settings.memory_bytes)
        self._end, self._process = started.end, started.process
        self._transport: asyncio.WriteTransport | None = None
        self._connecting = asyncio.Lock()
        self._read = bytearray()
        self._asked: deque[Question] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._stuck = False
        """It works for long for an asker that has gone to another process."""

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def lost(self) -> str | None:
        """Why the process must be replaced, if it must although no asker was told so."""
        if self._stuck:
            return "timeout"
        closing = self._transport is not None and self._transport.is_closing()
        return "broken" if closing or self._process.poll() is not None else None

    # ---- questions ------------------------------------------------------------------------------

    async def ask(self, message: ToText, claim: Claim, limit_s: float) -> FromText:
        """Connect if that was not done yet, and return the answer to a message. Raises as
        `Question.answered` does."""
        async with self._connecting:
            if self._transport is None:
                await self._connect()
        question = self.send(message, claim, limit_s)
        if question is None:
            raise Displaced
        return await question.answered()

    def send(self, message: ToText, claim: Claim, limit_s: float) -> Question | None:
        """Send a message. `claim.since` becomes the time when work on it begins. Return None if
        nothing can be sent now. Then the process is not connected, or is gone, or works for long
        for an asker that is gone."""
        if self._transport is None or self._transport.is_closing() or self._stuck:
            return None
        question = Question(message, claim, limit_s)
        self._asked.append(question)
        if len(self._asked) == 1:
            self._begin()
        self._transport.write(frame(message))
        return question

    async def settled(self, claim: Claim, limit_s: float) -> bool:
        """Wait until no question of a claim is under way. Return whether that took no longer than
        the limit."""
        questions = [one for one in self._asked if one.claim is claim]
        try:
            async with asyncio.timeout(limit_s):
                for question in questions:
                    await question.over.wait()
        except TimeoutError:
            return False
        return True

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            made, _ = await loop.create_unix_connection(lambda: self, sock=self._end)
        except OSError as error:
            raise Broken from error
        self._transport = made

    def _begin(self) -> None:
        """Begin the time of the first question."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._asked:
            first = self._asked[0]
            first.claim.since, first.claim.slow = time.monotonic(), False
            patience_s = min(PATIENCE_S, first.limit_s)
            self._when_read(patience_s, lambda: self._be_patient(first, patience_s))

    def _when_read(self, delay_s: float, then: Callable[[], None]) -> None:
        """Call `then` after the delay unless the first question is answered by then."""
        self._call_later(delay_s, lambda: self._call_later(_READ_S, then))

    def _call_later(self, delay_s: float, then: Callable[[], None]) -> None:
        self._timer = asyncio.get_running_loop().call_later(delay_s, then)

    def _be_patient(self, first: Question, patience_s: float) -> None:
        self._displace()
        if first.answer.done():
            self._stuck = True  # nothing is sent behind it any more
            return
        first.claim.slow = True
        self._when_read(first.limit_s - patience_s, lambda: first.fail(TimeoutError()))

    def _displace(self) -> None:
        for question in list(self._asked)[1:]:
            question.fail(Displaced())

    # ---- the connection -------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        self._read += data
        ended: list[Claim] = []
        while (answer := self._next_answer()) is not None:
            question = self._asked.popleft()
            if question.ends_claim(answer):
                ended.append(question.claim)
            if not question.answer.done():
                question.answer.set_result(answer)
            question.over.set()
            self._begin()
        if ended:
            self._ended(self, ended)

    def _next_answer(self) -> FromText | None:
        """Take an answer from what was read, if it is there as a whole."""
        if len(self._read) < FRAME_HEAD_BYTES or not self._asked:
            return None
        end = FRAME_HEAD_BYTES + int.from_bytes(self._read[:FRAME_HEAD_BYTES], "little")
        if len(self._read) < end:
            return None
        answer = decode_from_text(bytes(self._read[FRAME_HEAD_BYTES:end]))
        del self._read[:end]
        return answer

    def connection_lost(self, exc: Exception | None) -> None:
        self._displace()
        if self._asked:
            self._asked[0].fail(Broken())
        for question in self._asked:
            question.over.set()
        self._asked.clear()
        self._begin()

    async def end(self) -> None:
        """Kill the process and reap it."""
        if self._transport is not None:
            self._transport.abort()
        else:
            self._end.close()
        self._process.kill()
        await asyncio.to_thread(self._process.wait)

    # ---- tokenizers -----------------------------------------------------------------------------

    def has(self, version: str) -> bool:
        return version in self._opened

    def use(self, version: str) -> None:
        self._opened.move_to_end(version)

    @property
    def loaded(self) -> int:
        """How many tokenizers it has loaded; models with equal files have one together."""
        return len(set(self._opened.values()))

    async def open(
        self, files: ModelFiles, claim: Claim, known: Collection[str], limit_s: float
    ) -> FromText:
        """Load a tokenizer, after a check that its files are unchanged, and drop those of no use.
        `known`: digests of files whose vocabularies need not be sent. Raises as `ask` does, and
        `Refused`."""
        await asyncio.to_thread(files.check_tokenizer)
        message = OpenModel(files.key, files.path, list(known), list(self._dropped))
        self._dropped.clear()
        answer = await self.ask(message, claim, limit_s)
        if isinstance(answer, ModelOpened):
            self._opened[files.key] = answer.digest
            self._opened.move_to_end(files.key)
            self._bound()
            try:
                await asyncio.to_thread(files.check_tokenizer)
            except Refused:
                self._drop(files.key)
                raise
        return answer

    def _bound(self) -> None:
        """Drop the least recently used tokenizers beyond the most there may be. The process does it
        when it loads the next one."""
        recent = list(dict.fromkeys(reversed(self._opened.values())))
        gone = set(recent[self._capacity :])
        for version in [one for one, digest in self._opened.items() if digest in gone]:
            self._drop(version)

    def _drop(self, version: str) -> None:
        del self._opened[version]
        self._dropped.add(version)

    def forget(self, model: str) -> None:
        """Drop the tokenizers of all versions of a model."""
        for version in [one for one in self._opened if name_of(one) == model]:
            self._drop(version)
