"""Matching outputs with grammars, and the masks of the tokens that may come next.

    mask of a row   int32 [ceil(V / 32)]   bit v % 32 of word v // 32: token v may come next

A matcher's state is a function of the grammar and of the tokens it was given. So a request that
moves to another worker gets the masks it would have had. The library holds the interpreter's lock
while it reads a vocabulary, so workers do this in another process (`grammars.outputs`).
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from numpy.typing import NDArray

from c2cserve.grammars.table import read_table

Masks = NDArray[np.int32]
"""The masks of some rows [R, ceil(V / 32)]."""
_THREADS = 8
"""The most threads that make the masks of a step: each row takes about 0.1 ms of one."""


class GrammarFailed(RuntimeError):
    """The output cannot be held to its grammar any further; the message is one line."""


class Vocabulary(NamedTuple):
    """What the masks are over."""

    tokens: str
    """The path of the file with the bytes of the tokens (`grammars.table`)."""
    size: int
    """V, the number of logits of a row."""
    ends: tuple[int, ...]
    """The model's end tokens."""


def mask_words(vocab: int) -> int:
    """Return the words of a mask over so many tokens."""
    return -(-vocab // 32)


class _Tokens:
    """A vocabulary as the library asks for it."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: list[bytes], ends: Sequence[int]) -> None:
        self.tokens = tokens
        self.eos_token_id = ends[0]
        self.special_token_ids = sorted({*ends, *(i for i, one in enumerate(tokens) if not one)})

    def __call__(self, text: str | bytes) -> list[int]:
        # Grammars say `no_forcing`, so no text is ever to be tokenized.
        raise AssertionError("texts are not tokenized here")


class Matcher:
    """The state of one output. Not thread-safe."""

    def __init__(self, state: LLMatcher) -> None:
        self.state = state

    def take(self, tokens: Sequence[int]) -> None:
        """Go on by tokens that the masks allowed. Raises GrammarFailed."""
        if not self.state.consume_tokens(list(tokens)):
            raise GrammarFailed(_reason(self.state))

    @property
    def failure(self) -> str:
        """Why the matcher cannot go on, as a limit of the library; empty while it can."""
        return _reason(self.state) if self.state.is_error() else ""


class Matchers:
    """Makes the matchers of one vocabulary, and their masks. Thread-safe."""

    def __init__(self, vocabulary: Vocabulary, threads: int | None = None) -> None:
        """`threads`: how many make masks at once. This takes some tenths of a second. Raises
        OSError and msgspec.MsgspecError if the vocabulary's file cannot be read."""
        size, ends = vocabulary.size, vocabulary.ends
        known = read_table(vocabulary.tokens)[:size]
        # Models have more logits than tokens: their rows are rounded up. The library counts tokens.
        tokens: Any = _Tokens(known + [b""] * (size - len(known)), ends)
        # It cuts out "slices" of the vocabulary, by which masks of strings take half the time.
        self._tokenizer = LLTokenizer(tokens, n_vocab=size, eos_token=list(ends))
        cores = len(os.sched_getaffinity(0)) - 1  # the worker's own thread launches steps meanwhile
        self._executor = LLExecutor(max(1, min(_THREADS, cores)) if threads is None else threads)

    def matcher(self, grammar: str, output: Sequence[int]) -> Matcher:
        """Return the matcher of an output that has these tokens so far. Raises GrammarFailed."""
        matcher = Matcher(LLMatcher(self._tokenizer, grammar, log_level=0))
        if matcher.state.is_error():
            raise GrammarFailed(_reason(matcher.state))
        matcher.take(output)
        return matcher

    def take(self, outputs: Sequence[tuple[Matcher, Sequence[int]]]) -> None:
        """Have each matcher go on by tokens that the masks allowed. If a matcher cannot, it has a
        `failure`."""
        single = [(one.state, tokens[0]) for one, tokens in outputs if len(tokens) == 1]
        if single:
            self._executor.consume_token_par(single)
        for one, tokens in outputs:
            if len(tokens) > 1:
                one.state.consume_tokens(list(tokens))

    def fill(self, matchers: Mapping[int, Matcher], masks: Masks) -> dict[int, str]:
        """Write the mask of each matcher into its row of `masks`. A mask is empty if its matcher
        cannot go on. Return why, by the rows."""
        rows = [(one.state, row) for row, one in matchers.items()]
        self._executor.unsafe_compute_mask_ptr(
            rows, masks.ctypes.data, masks.strides[0], masks.shape[0]
        )
        failures = {row: why for row, one in matchers.items() if (why := one.failure)}
        for row in failures:
            masks[row] = 0  # the library's mask lets the output end there
        return failures


def _reason(state: LLMatcher) -> str:
    lines = state.get_error().split("\n<state>")[0].strip().splitlines()
    return f"the grammar cannot go on: {lines[0][:200] if lines else 'no token fits'}"
