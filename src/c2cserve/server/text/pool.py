"""The server's text processes, which validate, render and tokenize what clients send.

If a request takes too long, its process is killed and replaced. Costly requests never take the last
process (`claims`), so a long text or a checkpoint's slow template delays no others.
"""

import asyncio
import logging
import socket
import subprocess
import sys
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from c2cserve.core.model import name_of
from c2cserve.runtime.environment import child_environment
from c2cserve.runtime.gateway import ModelFiles, Refused
from c2cserve.server.errors import ApiError, unservable
from c2cserve.server.settings import TextSettings
from c2cserve.server.text.claims import LARGE_BYTES, Claim, Sharing
from c2cserve.server.text.messages import (
    FRAME_HEAD_BYTES,
    FromText,
    ModelOpened,
    OpenModel,
    TextAnswer,
    TextFailure,
    TextRequest,
    TextResult,
    ToText,
    decode_from_text,
    frame,
)
from c2cserve.server.text.vocabulary import TokenizerError, Vocabulary

log = logging.getLogger(__name__)

_READ_BYTES = 1 << 20
_WAIT_S = 30.0
"""Time that a request waits for a process before it gets 429."""
_RETRY_S = 5.0
# A tokenizer's own threads would fight the slices for their cores.
_ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "RUST_BACKTRACE": "0"}


class _Broken(Exception):
    """The process ended, or must not get another request."""


class _Process:
    """One text process and this end of its socket."""

    def __init__(self, settings: TextSettings) -> None:
        self._opened: OrderedDict[str, None] = OrderedDict()
        """Versions of models whose tokenizers are loaded, the least recently used first."""
        self._dropped: set[str] = set()
        """Versions whose tokenizers are of no use; the next `OpenModel` drops them."""
        self._capacity = settings.tokenizers
        self._end, its = socket.socketpair()
        with its:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "c2cserve.server.text.process", str(settings.memory_bytes)],
                stdin=its.fileno(),
                env=child_environment(**_ENVIRONMENT),
                process_group=0,  # a terminal's ctrl-C is for the server
            )
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    async def ask(self, message: ToText, timeout_s: float) -> FromText:
        """Return the answer to a message. Raises TimeoutError and _Broken. After these, or when
        cancelled, the process must be replaced."""
        async with asyncio.timeout(timeout_s):
            try:
                if self._streams is None:
                    self._streams = await asyncio.open_connection(sock=self._end, limit=_READ_BYTES)
                reader, writer = self._streams
                writer.write(frame(message))
                await writer.drain()
                head = await reader.readexactly(FRAME_HEAD_BYTES)
                data = await reader.readexactly(int.from_bytes(head, "little"))
            except (OSError, asyncio.IncompleteReadError) as error:
                raise _Broken from error
        return decode_from_text(data)

    def has(self, version: str) -> bool:
        return version in self._opened

    def use(self, version: str) -> None:
        self._opened.move_to_end(version)

    async def open(self, files: ModelFiles, *, facts: bool, timeout_s: float) -> FromText:
        """Load a tokenizer, after a check that its files are unchanged, and drop those of no use.
        Raises as `ask` does, and `Refused`."""
        await asyncio.to_thread(files.check_tokenizer)
        if not self.has(files.key) and len(self._opened) >= self._capacity:
            self._drop(next(iter(self._opened)))
        message = OpenModel(files.key, files.path, facts, list(self._dropped))
        self._dropped.clear()
        answer = await self.ask(message, timeout_s)
        if isinstance(answer, ModelOpened):
            self._opened[files.key] = None
            try:
                await asyncio.to_thread(files.check_tokenizer)
            except Refused:
                self._drop(files.key)
                raise
        return answer

    def _drop(self, version: str) -> None:
        del self._opened[version]
        self._dropped.add(version)

    def forget(self, model: str) -> None:
        """Drop the tokenizers of all versions of a model."""
        for version in [one for one in self._opened if name_of(one) == model]:
            self._drop(version)

    async def end(self) -> None:
        """Kill the process and reap it."""
        if self._streams is not None:
            self._streams[1].transport.abort()
        else:
            self._end.close()
        self._process.kill()
        await asyncio.to_thread(self._process.wait)


class TextPool:
    """The text processes and their queue. Used on the server's event loop, between `start` and
    `close`."""

    def __init__(self, settings: TextSettings, vocabularies: int) -> None:
        """`vocabularies`: the most to keep; the least recently used ones make way."""
        self._settings = settings
        self._idle: list[_Process] = []
        self._busy: dict[_Process, Claim] = {}
        """Process -> the request that it works for."""
        self._waiting: OrderedDict[asyncio.Future[_Process], Claim] = OrderedDict()
        self._sharing = Sharing(settings.processes)
        self._vocabularies: OrderedDict[str, Vocabulary] = OrderedDict()
        """Version -> its vocabulary, the least recently used first."""
        self._vocabularies_max = vocabularies
        self._endings: set[asyncio.Task[None]] = set()
        self.killed: Counter[str] = Counter({"timeout": 0, "broken": 0, "cancelled": 0})
        """Reason -> processes that were replaced for it."""

    def start(self) -> None:
        self._idle = [_Process(self._settings) for _ in range(self._settings.processes)]

    async def close(self) -> None:
        """End all processes, without waiting for their present work."""
        processes = [*self._idle, *self._busy]
        self._idle, self._busy = [], {}
        for waiter in self._waiting:
            waiter.cancel()
        await asyncio.gather(*(one.end() for one in processes), *self._endings)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def pids(self) -> list[int]:
        return [one.pid for one in (*self._idle, *self._busy)]

    def forget(self, model: str) -> None:
        """Drop all data of a model that was removed or reloaded."""
        for version in [one for one in self._vocabularies if name_of(one) == model]:
            del self._vocabularies[version]
        for process in (*self._idle, *self._busy):
            process.forget(model)

    # ---- work ---------------------------------------------------------------------------------

    async def work(
        self, work: TextRequest, files: ModelFiles | None, param: str
    ) -> tuple[TextResult | TextAnswer, Vocabulary | None]:
        """Have a process prepare a request. `files`: those of its target; without them, there is no
        vocabulary. `param`: the field to blame when it takes too long. Raises ApiError, and
        `Refused` when the tokenizer's files have changed."""
        version = "" if files is None else files.key
        claim = Claim(name_of(version), version, len(work.body) >= LARGE_BYTES)
        async with self._process(claim) as process:
            vocabulary = None if files is None else await self._vocabulary(process, files)
            claim.since = time.monotonic()  # a tokenizer may take long to load
            limit_s = self._settings.timeout_s
            try:
                answer = await process.ask(work, limit_s)
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

    async def _vocabulary(self, process: _Process, files: ModelFiles) -> Vocabulary:
        """Return the vocabulary of a version, and have its tokenizer loaded in the process."""
        version = files.key
        vocabulary = self._vocabularies.get(version)
        if vocabulary is not None and process.has(version):
            self._vocabularies.move_to_end(version)
            process.use(version)
            return vocabulary
        limit_s = self._settings.load_timeout_s
        try:
            answer = await process.open(files, facts=vocabulary is None, timeout_s=limit_s)
        except TimeoutError as error:
            raise unservable(version, "its tokenizer takes too long to load") from error
        if isinstance(answer, TextFailure):
            raise _api_error(answer)
        assert isinstance(answer, ModelOpened)
        if answer.facts is not None:
            try:
                vocabulary = Vocabulary(answer.facts)
            except TokenizerError as error:
                raise unservable(version, str(error)) from error
        assert vocabulary is not None
        self._vocabularies[version] = vocabulary
        self._vocabularies.move_to_end(version)
        while len(self._vocabularies) > self._vocabularies_max:
            self._vocabularies.popitem(last=False)
        return vocabulary

    # ---- processes ----------------------------------------------------------------------------

    @asynccontextmanager
    async def _process(self, claim: Claim) -> AsyncGenerator[_Process]:
        """Lend a process to a request. A process that fails is counted and replaced."""
        process = await self._take(claim)
        lost: str | None = "cancelled"
        try:
            yield process
            lost = None
        except ApiError as error:
            timed_out = isinstance(error.__cause__, TimeoutError)
            broken = isinstance(error.__cause__, _Broken)
            lost = "timeout" if timed_out else "broken" if broken else None
            raise
        except Refused:
            lost = None
            raise
        except _Broken as error:
            lost = "broken"
            text = "the request could not be tokenized: its process ended"
            raise ApiError(500, text) from error
        finally:
            self._give_back(process, lost)

    async def _take(self, claim: Claim) -> _Process:
        if len(self._waiting) >= self._settings.waiting:
            raise self._crowded()
        waiter: asyncio.Future[_Process] = asyncio.get_running_loop().create_future()
        self._waiting[waiter] = claim
        self._hand_out()
        claimed = False
        try:
            async with asyncio.timeout(_WAIT_S):
                process = await asyncio.shield(waiter)
            claimed = True
            return process
        except TimeoutError as error:
            raise self._crowded() from error
        finally:
            self._waiting.pop(waiter, None)
            # A process may have been assigned in the moment of giving up.
            if not claimed and waiter.done() and not waiter.cancelled():
                self._give_back(waiter.result(), None)

    def _hand_out(self) -> None:
        """Assign idle processes to the longest waiting requests that may have one."""
        now = time.monotonic()
        for waiter, claim in list(self._waiting.items()):
            if not self._idle:
                return
            if waiter.done() or not self._sharing.may_start(claim, self._busy.values(), now):
                continue
            process = next((one for one in self._idle if one.has(claim.version)), self._idle[0])
            self._idle.remove(process)
            if not process.alive:
                self._replace(process, "broken")
                process = self._idle.pop()
            claim.since = now
            self._busy[process] = claim
            del self._waiting[waiter]
            waiter.set_result(process)

    def _give_back(self, process: _Process, lost: str | None) -> None:
        """Take a process back. `lost`: why it must be replaced, if it must."""
        claim = self._busy.pop(process, None)
        if claim is None:
            return  # the pool was closed
        self._sharing.ended(claim, time.monotonic())
        if lost is None:
            self._idle.append(process)
        else:
            self._replace(process, lost)
        self._hand_out()

    def _replace(self, process: _Process, reason: str) -> None:
        self.killed[reason] += 1
        log.warning("text process %d is replaced: %s", process.pid, reason)
        ending = asyncio.create_task(process.end())
        self._endings.add(ending)
        ending.add_done_callback(self._endings.discard)
        self._idle.append(_Process(self._settings))

    @staticmethod
    def _crowded() -> ApiError:
        text = "too many requests wait to be tokenized"
        return ApiError(429, text, code="rate_limit_exceeded", retry_after_s=_RETRY_S)


def _api_error(failed: TextFailure) -> ApiError:
    error = ApiError(failed.status, failed.message, param=failed.param, code=failed.code)
    if failed.broken:
        error.__cause__ = _Broken()
    return error
