"""The worker's side of grammar processes: outputs that are held to grammars, and their masks.

    worker     begin ──────── the step's layers ──────── masks
    process      └─▶ goes on by new tokens, fills ─▶ shared memory

A worker has a process for each vocabulary, from the first request on. So a vocabulary that is being
read delays no mask of another. All of them write into one memory (`grammars.memory`). A worker
keeps the tokens of its outputs: after the end of a process a new one gets them, and fills the same
masks.
"""

import itertools
import logging
import socket
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from c2cserve.core.request import Grammar
from c2cserve.grammars.matching import GrammarFailed, Masks, Vocabulary, mask_words
from c2cserve.grammars.memory import MaskMemory, Region
from c2cserve.grammars.messages import (
    Build,
    Fill,
    Output,
    decode_built,
    decode_filled,
    receive,
    send,
)

log = logging.getLogger(__name__)

_PATIENCE_S = 30.0
"""Longer than any answer takes: the library bounds its work on a mask."""
_IDLE_MAX = 4
"""The processes that are kept for vocabularies of which there is no output."""


class Held:
    """One output that is held to a grammar. Not thread-safe."""

    def __init__(self, number: int, grammar: str, output: Sequence[int]) -> None:
        self.number = number
        self.grammar = grammar
        self.tokens = list(output)
        self.failure = ""
        """Why it cannot go on, known with its next mask."""
        self.process: _Process | None = None
        """The process that has its matcher,"""
        self.known = 0
        """and the tokens that it knows of."""

    def take(self, token: int) -> None:
        """Go on by a token that the mask allowed."""
        self.tokens.append(token)

    def news(self, process: "_Process") -> Output:
        """Return what the process does not know, for a message to it."""
        begin = self.known if self.process is process else 0
        grammar = "" if self.process is process else self.grammar
        self.process, self.known = process, len(self.tokens)
        return Output(self.number, tuple(self.tokens[begin:]), grammar)


class _Process:
    """One grammar process and its sockets. Its methods raise OSError where it has ended."""

    def __init__(self, vocabulary: Vocabulary, memory: MaskMemory) -> None:
        self.fills, fills = socket.socketpair()
        self.builds, builds = socket.socketpair()
        try:
            given = (fills.fileno(), builds.fileno(), memory.file)
            ends = map(str, vocabulary.ends)
            self._popen = subprocess.Popen(
                [sys.executable, "-m", "c2cserve.grammars.process", *map(str, given),
                 vocabulary.tokens, str(vocabulary.size), *ends],
                stdin=subprocess.DEVNULL, pass_fds=given,
            )  # fmt: skip
        finally:
            fills.close()
            builds.close()
        self.fills.settimeout(_PATIENCE_S)
        self.builds.settimeout(_PATIENCE_S)

    @property
    def pid(self) -> int:
        return self._popen.pid

    def alive(self) -> bool:
        return self._popen.poll() is None

    def end(self) -> None:
        """End it, if it has not. What waits for it on another thread is woken."""
        self._popen.kill()
        self._popen.wait()
        for one in (self.fills, self.builds):
            one.close()


class PendingFill:
    """The masks of some outputs, on their way."""

    def __init__(self, owner: "Outputs", helds: Sequence[Held], process: _Process) -> None:
        self._owner = owner
        self.helds = helds
        self.process = process
        self.region: Region | None = None
        """Where its process writes the masks, once it is asked for them."""
        self.rebuilt = False
        """Its process has to build some of the grammars first."""
        self.answered = False
        self.masks: Masks | None = None

    def result(self) -> Masks:
        """Wait for the masks, in the order of the outputs. The mask of one that cannot go on is
        empty, and its `failure` says why."""
        return self._owner.result(self)

    def settle(self) -> None:
        """Learn what a device learnt that has waited for the masks: which outputs cannot go on."""
        assert self.region is not None, "no device has waited for these masks"
        if not self.region.abandoned:
            self._owner.settle(self)
        if self.region.abandoned or not self.answered:
            for held in self.helds:
                held.failure = "the grammar cannot go on: its masks did not come in time"


class Outputs:
    """The outputs of one vocabulary. One thread uses it, and `build` has another."""

    def __init__(self, vocabulary: Vocabulary, memory: MaskMemory | None = None) -> None:
        self._vocabulary = vocabulary
        self.memory = MaskMemory() if memory is None else memory
        self._words = mask_words(vocabulary.size)
        self._lock = threading.Lock()
        self._process: _Process | None = None
        self._numbers = itertools.count()
        self._dropped: deque[int] = deque()
        self._sent: deque[PendingFill] = deque()
        """Fills that were sent and are not read; the process answers in this order."""
        self._builder = ThreadPoolExecutor(1, "grammars")
        self.live = 0
        self.lost = 0
        """Processes that ended while they were needed."""

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def close(self) -> None:
        self._builder.shutdown(wait=False, cancel_futures=True)
        if self._process is not None:
            self._process.end()
            self._process = None

    # ---- building -------------------------------------------------------------------------------

    def build(self, grammar: str, output: Sequence[int]) -> "Future[Held]":
        """Begin to build the matcher of an output that has these tokens so far. The future raises
        GrammarFailed."""
        held = Held(next(self._numbers), grammar, output)
        self.live += 1
        weakref.finalize(held, self._drop, held.number).atexit = False
        return self._builder.submit(self._build, held)

    def _drop(self, number: int) -> None:
        self.live -= 1
        self._dropped.append(number)

    def _build(self, held: Held) -> Held:
        for _ in range(2):  # it may have been another grammar that ended the process
            process = self._running()
            try:
                send(process.builds, Build(held.news(process), self._drops()))
                failure = decode_built(receive(process.builds)).failure
            except OSError:
                self._lose(process)
                continue
            if failure:
                raise GrammarFailed(failure)
            return held
        raise GrammarFailed("the grammar cannot be built: its process ended twice")

    def _drops(self) -> tuple[int, ...]:
        return tuple(self._dropped.popleft() for _ in range(len(self._dropped)))

    def _running(self) -> _Process:
        with self._lock:
            if self._process is None:
                self._process = _Process(self._vocabulary, self.memory)
            return self._process

    def _lose(self, process: _Process) -> None:
        """Note that a process ended, or did not answer."""
        with self._lock:
            if self._process is not process:
                return
            self._process = None
            self.lost += 1
        process.end()
        log.warning("a grammar process ended; another one takes over its outputs")

    # ---- masks ----------------------------------------------------------------------------------

    def begin(self, helds: Sequence[Held]) -> PendingFill:
        """Begin to fill the masks of some outputs, whose tokens are all known."""
        fill = PendingFill(self, helds, self._running())
        if self._sent and self._sent[0].process is not fill.process:
            self._sent.clear()  # the process of these has ended
        try:
            self._send(fill)
        except OSError:
            self._forget_sent(fill.process)  # `result` asks another process
        return fill

    def result(self, fill: PendingFill) -> Masks:
        self.settle(fill)
        if fill.masks is None:
            if fill.answered and fill.region is not None:
                fill.masks = fill.region.masks.copy()
            else:
                fill.masks = np.concatenate([self._alone(held) for held in fill.helds])
        return fill.masks

    def settle(self, fill: PendingFill) -> None:
        """Wait for the answer to a fill. There is none if the process has ended."""
        while not fill.answered and fill in self._sent:
            self._read()

    def _alone(self, held: Held) -> Masks:
        """Return the mask of one output after its process ended. A grammar that ends the next one,
        too, fails alone."""
        fill = self.begin([held])
        self.settle(fill)
        if not fill.answered or fill.region is None:
            held.failure = "the grammar cannot go on: its process ended twice"
            return np.zeros((1, self._words), np.int32)
        return fill.region.masks.copy()

    def _send(self, fill: PendingFill) -> None:
        region = self.memory.take(len(fill.helds), self._words)
        while region is None and self._sent:
            self._read()
            region = self.memory.take(len(fill.helds), self._words)
        assert region is not None, "a step has fewer rows"
        outputs = tuple(held.news(fill.process) for held in fill.helds)
        fill.rebuilt = any(one.grammar for one in outputs)
        message = Fill(region.masks_at, region.ready_at, outputs, self._drops())
        send(fill.process.fills, message)
        fill.region = region
        self._sent.append(fill)

    def _read(self) -> None:
        """Read the next answer."""
        fill = self._sent[0]
        try:
            failures = decode_filled(receive(fill.process.fills)).failures
        except OSError:
            self._forget_sent(fill.process)
            return
        self._sent.popleft()
        fill.answered = True
        for row, why in failures.items():
            fill.helds[row].failure = why

    def _forget_sent(self, process: _Process) -> None:
        self._lose(process)
        self._sent.clear()


class Grammars:
    """The outputs of one worker's slice, by their vocabularies. One thread uses it."""

    def __init__(self, memory: MaskMemory | None = None) -> None:
        """`memory`: of the masks; that of a GPU slice is read by its GPU."""
        self.memory = MaskMemory() if memory is None else memory
        self._outputs: dict[Vocabulary, Outputs] = {}
        self._lost = 0

    @property
    def lost(self) -> int:
        """Grammar processes that ended while they were needed."""
        return self._lost + sum(one.lost for one in self._outputs.values())

    def of(self, grammar: Grammar, vocab: int) -> Outputs:
        """Return the outputs of a vocabulary. `vocab`: the logits of a row."""
        vocabulary = Vocabulary(grammar.tokens, vocab, grammar.ends)
        outputs = self._outputs.pop(vocabulary, None)
        if outputs is None:
            self._end_idle()
            outputs = Outputs(vocabulary, self.memory)
        self._outputs[vocabulary] = outputs  # the one used last is last
        return outputs

    def _end_idle(self) -> None:
        """End the processes that were not used for longest, if many have no output."""
        idle = [name for name, one in self._outputs.items() if not one.live]
        for name in idle[: max(0, len(idle) - _IDLE_MAX + 1)]:
            self._lost += self._outputs[name].lost
            self._outputs.pop(name).close()

    def close(self) -> None:
        for one in self._outputs.values():
            one.close()
        self._outputs.clear()
