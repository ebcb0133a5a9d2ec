"""Matching outputs with grammars, and the masks of the tokens that may come next.

    mask of a row   int32 [ceil(V / 32)]   bit v % 32 of word v // 32: token v may come next

A matcher's state is a function of the grammar and of the tokens it was given. So a request that
moves to another worker gets the masks it would have had.
"""

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from numpy.typing import NDArray

from c2cserve.core.request import Grammar
from c2cserve.grammars.table import read_table

Masks = NDArray[np.int32]
"""The masks of some rows [R, ceil(V / 32)]."""
_MASK_THREADS = 4


class GrammarFailed(RuntimeError):
    """The output cannot be held to its grammar any further; the message is one line."""


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

    def takes(self, token: int) -> bool:
        """Go on by a token. Return False if that failed (`failure`)."""
        return self.state.consume_token(token)

    @property
    def failure(self) -> str:
        """Why the matcher cannot go on, as a limit of the library; empty while it can."""
        return _reason(self.state) if self.state.is_error() else ""


class Matchers:
    """Makes the matchers of one process, and their masks. Thread-safe."""

    def __init__(self, threads: int | None = None) -> None:
        """`threads`: how many make masks at once."""
        self._tokenizers: dict[tuple[str, int, tuple[int, ...]], LLTokenizer] = {}
        count = min(_MASK_THREADS, len(os.sched_getaffinity(0))) if threads is None else threads
        self._threads = count
        self._executor: LLExecutor | None = None
        self._builder = ThreadPoolExecutor(1, "grammars")
        self._filler = ThreadPoolExecutor(1, "masks")

    def matcher(self, grammar: Grammar, vocab: int, output: Sequence[int]) -> Matcher:
        """Return the matcher of an output that has these tokens so far. The first one of a
        vocabulary takes up to a second. Raises GrammarFailed and OSError."""
        matcher = Matcher(LLMatcher(self._tokenizer(grammar, vocab), grammar.text, log_level=0))
        if matcher.state.is_error():
            raise GrammarFailed(_reason(matcher.state))
        matcher.take(output)
        return matcher

    def build(self, grammar: Grammar, vocab: int, output: Sequence[int]) -> Future[Matcher]:
        """Do the same on another thread."""
        return self._builder.submit(self.matcher, grammar, vocab, output)

    def _tokenizer(self, grammar: Grammar, vocab: int) -> LLTokenizer:
        key = (grammar.tokens, vocab, grammar.ends)
        tokenizer = self._tokenizers.get(key)
        if tokenizer is None:
            tokens: Any = _Tokens(read_table(grammar.tokens)[:vocab], grammar.ends)
            # Its "slices" would make masks of strings cheaper, and building it twice as long.
            tokenizer = LLTokenizer(tokens, n_vocab=vocab, eos_token=list(grammar.ends), slices=[])
            self._tokenizers[key] = tokenizer
        return tokenizer

    def fill(self, matchers: Sequence[Matcher], masks: Masks) -> None:
        """Write the mask of each matcher into its row of `masks`. It is empty after a failure."""
        if self._executor is None:
            self._executor = LLExecutor(self._threads)
        rows = [(one.state, row) for row, one in enumerate(matchers)]
        self._executor.unsafe_compute_mask_ptr(
            rows, masks.ctypes.data, masks.strides[0], masks.shape[0]
        )
        for row, one in enumerate(matchers):
            if one.failure:
                masks[row] = 0  # the library's mask lets the output end there

    def begin(self, matchers: Sequence[Matcher], masks: Masks) -> "Future[None]":
        """Do the same on another thread. The matchers are not to be used before it is done."""
        return self._filler.submit(self.fill, matchers, masks)


def _reason(state: LLMatcher) -> str:
    lines = state.get_error().split("\n<state>")[0].strip().splitlines()
    return f"the grammar cannot go on: {lines[0][:200] if lines else 'no token fits'}"
