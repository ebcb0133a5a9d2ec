"""The worker's side of grammar processes: outputs that are held to grammars, and their masks.

    worker     begin ──────── the step's layers ──────── masks
    process      └─▶ goes on by new tokens, fills ─▶ shared memory

A worker has a process for each vocabulary, from the first request on. So a vocabulary that is being
read delays no mask of another. All of them write into one memory (`grammars.memory`). A worker
keeps the tokens of its outputs: after the end of a process a new one gets them, and fills the same
masks.

    a process stands still      its outputs are late, and built again on a thread, which waits
      for long                  it is ended, and another one takes over
      with one output, often    that output fails alone
"""

import itertools
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from c2cserve.core.request import Grammar
from c2cserve.grammars.child import GrammarProcess
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

_STEP_PATIENCE_S = 0.5
"""How long a step waits for masks, which take milliseconds. It goes on without those that are late,
and asks a process that stands still for no more."""
_STALL, _LOSS, _STRIKES_MAX = 1, 2, 4
"""Weights of a late mask and of a process that ended, and with how many an output fails."""
_IDLE_MAX = 4
"""The processes that are kept for vocabularies of which there is no output."""


class Held:
    """One output that is held to a grammar. Not thread-safe."""

    def __init__(
        self, owner: "Outputs", number: int, grammar: str, output: Sequence[int], strikes: int = 0
    ) -> None:
        self._owner = owner
        self.number = number
        self.grammar = grammar
        self.tokens = list(output)
        self.failure = ""
        """Why it cannot go on, known with its next mask."""
        self.late = False
        """Its mask did not come in time, or its process has ended. `again` waits elsewhere."""
        self.strikes = strikes
        """How often in a row processes stood still with it, weighed (`_STALL`, `_LOSS`)."""
        self.process: GrammarProcess | None = None
        """The process that has its matcher,"""
        self.known = 0
        """and the tokens that it knows of."""

    def take(self, token: int) -> None:
        """Go on by a token that the mask allowed."""
        self.tokens.append(token)

    def again(self) -> "Future[Held]":
        """Begin to build it again after it was late, once a process answers."""
        return self._owner.build(self.grammar, self.tokens, self.strikes)

    def news(self, process: GrammarProcess) -> Output:
        """Return what the process does not know, for a message to it."""
        begin = self.known if self.process is process else 0
        grammar = "" if self.process is process else self.grammar
        self.process, self.known = process, len(self.tokens)
        return Output(self.number, tuple(self.tokens[begin:]), grammar)

    def struck(self, weight: int) -> bool:
        """Note that a process stood still with it. Return whether that was once too often."""
        self.strikes += weight
        if self.strikes >= _STRIKES_MAX:
            self.failure = "the grammar cannot go on: its masks do not come"
        return bool(self.failure)


class _Asked:
    """A message for masks, on its way to a process or back."""

    def __init__(self, helds: Sequence[Held], process: GrammarProcess) -> None:
        self.helds = helds
        self.process = process
        self.region: Region | None = None
        """Where its process writes the masks, once it is asked for them."""
        self.answered = False


class PendingFill:
    """The masks of some outputs, on their way."""

    def __init__(self, owner: "Outputs", helds: Sequence[Held], asked: Sequence[_Asked]) -> None:
        self._owner = owner
        self.helds = helds
        self.asked = asked
        self._masks: Masks | None = None

    def result(self) -> Masks:
        """Wait for the masks, in the order of the outputs. A mask is empty if its output cannot go
        on, and `failure` says why, or if it is `late`."""
        if self._masks is None:
            self._masks = self._owner.result(self)
        return self._masks

    @property
    def region(self) -> Region | None:
        """Where all of the masks are written in their order; None if there is no such place."""
        whole = len(self.asked) == 1 and len(self.asked[0].helds) == len(self.helds)
        return self.asked[0].region if whole else None

    def conclude(self) -> None:
        """Learn what a device learnt that has waited for the region: which outputs cannot go on,
        and which are late."""
        (asked,) = self.asked
        assert asked.region is not None, "no device has waited for these masks"
        until_s = time.monotonic() + (0.0 if asked.region.abandoned else _STEP_PATIENCE_S)
        came = self._owner.answered(asked, until_s) and not asked.region.abandoned
        for held in self.helds:
            held.late, held.strikes = not came, 0 if came else held.strikes


class Outputs:
    """The outputs of one vocabulary. One thread uses it, and `build` has another."""

    def __init__(self, vocabulary: Vocabulary, memory: MaskMemory | None = None) -> None:
        self._vocabulary = vocabulary
        self.memory = MaskMemory() if memory is None else memory
        self._words = mask_words(vocabulary.size)
        self._lock = threading.Lock()
        self._process: GrammarProcess | None = None
        self._numbers = itertools.count()
        self._dropped: deque[int] = deque()
        self._sent: deque[_Asked] = deque()
        """What was sent and is not read; the process answers in this order."""
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

    def build(self, grammar: str, output: Sequence[int], strikes: int = 0) -> "Future[Held]":
        """Begin to build the matcher of an output that has these tokens so far. The future raises
        GrammarFailed."""
        held = Held(self, next(self._numbers), grammar, output, strikes)
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

    def _running(self) -> GrammarProcess:
        with self._lock:
            if self._process is None:
                self._process = GrammarProcess(self._vocabulary, self.memory)
            return self._process

    def _lose(self, process: GrammarProcess) -> None:
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
        process = self._process
        if self._sent and self._sent[0].process is not process:
            self._gone(self._sent[0].process)
        asked: list[_Asked] = []
        if process is not None and self._caught_up(process):
            known = [held for held in helds if held.process is process and not held.failure]
            company = [held for held in known if not held.strikes]
            apart = [[held] for held in known if held.strikes]
            asked = [_Asked(part, process) for part in (company, *apart) if part]
        for part in asked:
            self._send(part)
        return PendingFill(self, helds, asked)

    def result(self, fill: PendingFill) -> Masks:
        """Return the masks of a fill, those that come within a step's patience."""
        until_s = time.monotonic() + _STEP_PATIENCE_S
        masks = np.zeros((len(fill.helds), self._words), np.int32)
        rows = {id(held): row for row, held in enumerate(fill.helds)}
        for part in fill.asked:
            if not self.answered(part, until_s) or part.region is None:
                continue
            for held, mask in zip(part.helds, part.region.masks, strict=True):
                masks[rows.pop(id(held))] = mask
                held.strikes = 0
        for row in rows.values():
            fill.helds[row].late = True
        return masks

    def answered(self, asked: _Asked, until_s: float) -> bool:
        """Wait for the answer to a message. Return whether it has come by then."""
        while not asked.answered and asked in self._sent and self._read(until_s):
            pass
        return asked.answered

    def _caught_up(self, process: GrammarProcess) -> bool:
        """Return whether the process can be asked: if it stood still, it has answered since."""
        while process.stalled and self._sent and self._read(0.0):
            pass
        return not process.stalled

    def _send(self, asked: _Asked) -> None:
        """Send a message for masks. It is not sent to a process that has ended, or if there is no
        room for its masks beside those that are not read."""
        region = self.memory.take(len(asked.helds), self._words)
        while region is None and self._sent and self._read(0.0):
            region = self.memory.take(len(asked.helds), self._words)
        if region is None:
            return
        outputs = tuple(held.news(asked.process) for held in asked.helds)
        message = Fill(region.masks_at, region.ready_at, outputs, self._drops())
        self._sent.append(asked)
        try:
            send(asked.process.fills, message)
            asked.region = region
        except OSError:
            self._gone(asked.process)

    def _read(self, until_s: float) -> bool:
        """Read the next answer. Return False if it does not come until then."""
        asked = self._sent[0]
        process = asked.process
        if process.stalled:
            until_s = 0.0  # a step has waited for it
        if not process.answers(until_s - time.monotonic()):
            if not process.stalled:
                process.stalled = True
                self._strike(asked, _STALL)
            return False
        try:
            failures = decode_filled(receive(process.fills)).failures
        except OSError:
            self._gone(process)
            return False
        self._sent.popleft()
        asked.answered = True
        for row, why in failures.items():
            asked.helds[row].failure = why
        process.stalled = process.stalled and bool(self._sent)
        return True

    def _gone(self, process: GrammarProcess) -> None:
        """Note that a process has ended, with what it was asked for."""
        if self._sent and self._sent[0].process is process:
            self._strike(self._sent[0], _LOSS)
        self._sent.clear()
        self._lose(process)

    def _strike(self, asked: _Asked, weight: int) -> None:
        """Note that a process stood still with a message. Those of its outputs that have company
        are asked for one by one next. A process that one has stopped too often ends."""
        (held, *others) = asked.helds
        if others:
            for one in asked.helds:
                one.strikes = max(one.strikes, _STALL)
        elif held.struck(weight) and weight == _STALL:
            self._gone(asked.process)


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

    def running(self) -> list[Outputs]:
        """Return the outputs of all vocabularies that have a process, or had one."""
        return list(self._outputs.values())

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
