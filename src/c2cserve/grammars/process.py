"""A grammar process: matches outputs of one vocabulary for a worker, and fills their masks.

The library holds the interpreter's lock while it builds the tree of a vocabulary. Here that stops
no step of the worker. A grammar that takes all memory ends this process alone.

    main thread      fills: a step waits for them
    second thread    builds: the library builds a grammar without the lock
"""

import mmap
import resource
import signal
import socket
import sys
import threading

import msgspec
import numpy as np

from c2cserve.grammars.matching import GrammarFailed, Matcher, Matchers, Vocabulary, mask_words
from c2cserve.grammars.messages import (
    Build,
    Built,
    Fill,
    Filled,
    Output,
    decode_build,
    decode_fill,
    receive,
    send,
)

_MEMORY_BYTES = 4 << 30


class _Grammars:
    """The matchers of this process."""

    def __init__(self, vocabulary: Vocabulary, memory: mmap.mmap) -> None:
        self._words = mask_words(vocabulary.size)
        self._masks = np.frombuffer(memory, np.int32)
        self._held: dict[int, Matcher | str] = {}
        """Number -> the matcher, or why there is none."""
        self._filling = threading.Lock()
        self._unreadable = ""
        try:
            self._matchers = Matchers(vocabulary)
        except (OSError, msgspec.MsgspecError) as error:
            self._unreadable = f"the vocabulary cannot be read: {error}"

    def build(self, message: Build) -> Built:
        """Build a matcher. The answer comes when no fill is under way: a worker that gets it finds
        a process that answers."""
        built = self._build(message)
        with self._filling:
            return built

    def _build(self, message: Build) -> Built:
        self._drop(message.drop)
        matcher = self._built(message.output)
        if isinstance(matcher, str):
            return Built(matcher)
        self._held[message.output.number] = matcher
        return Built("")

    def _built(self, output: Output) -> Matcher | str:
        if self._unreadable:
            return self._unreadable
        try:
            return self._matchers.matcher(output.grammar, output.tokens)
        except GrammarFailed as failed:
            return str(failed)

    def fill(self, message: Fill) -> Filled:
        with self._filling:
            return self._fill(message)

    def _fill(self, message: Fill) -> Filled:
        self._drop(message.drop)
        begin, count = message.offset // 4, len(message.outputs)
        masks = self._masks[begin : begin + count * self._words].reshape(count, self._words)
        rows: dict[int, Matcher] = {}
        failures: dict[int, str] = {}
        news: list[tuple[Matcher, tuple[int, ...]]] = []
        for row, output in enumerate(message.outputs):
            matcher = self._held[output.number]
            if isinstance(matcher, str):
                failures[row] = matcher
                masks[row] = 0
                continue
            rows[row] = matcher
            news.append((matcher, output.tokens))
        if rows:
            self._matchers.take(news)
            failures |= self._matchers.fill(rows, masks)
        self._masks[message.ready // 4] = 1  # before the answer: then the worker may use the place
        return Filled(failures)

    def _drop(self, numbers: tuple[int, ...]) -> None:
        for number in numbers:
            self._held.pop(number, None)


def _serve_builds(end: socket.socket, grammars: _Grammars) -> None:
    try:
        while True:
            send(end, grammars.build(decode_build(receive(end))))
    except OSError:
        return  # the worker has ended, and the main thread sees that, too


def _serve_fills(end: socket.socket, grammars: _Grammars) -> None:
    try:
        while True:
            send(end, grammars.fill(decode_fill(receive(end))))
    except OSError:
        return


def main(fills: int, builds: int, memory: int, vocabulary: Vocabulary) -> None:
    """Serve until the worker ends. `fills`, `builds`, `memory`: descriptors."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # meant for the worker, with which this ends
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    grammars = _Grammars(vocabulary, mmap.mmap(memory, 0))
    building = (socket.socket(fileno=builds), grammars)
    threading.Thread(target=_serve_builds, args=building, daemon=True).start()
    _serve_fills(socket.socket(fileno=fills), grammars)


if __name__ == "__main__":
    ends = tuple(int(one) for one in sys.argv[6:])
    main(
        int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]),
        Vocabulary(sys.argv[4], int(sys.argv[5]), ends),
    )  # fmt: skip
