"""A model's vocabulary: enough to turn tokens into text, but not text into tokens.

A tokenizer takes a second to load and holds the interpreter's lock meanwhile. So the server has
only its vocabulary, which a text process sends (server/text/pool.py).
"""

from collections import OrderedDict
from copy import copy
from typing import Any

import msgspec
from tokenizers import Tokenizer as FastTokenizer

from c2cserve.core.model import name_of
from c2cserve.files.reading import one_line


class TokenizerError(ValueError):
    """The model's tokenizer or template cannot be used; the message says why."""


class VocabularyFacts(msgspec.Struct):
    """The data of a vocabulary, sent from one process to another."""

    kind: str
    """The spelling of tokens: `bytes`, `pieces` or `other`."""
    strips: bool
    """The first space of a text is not shown."""
    pieces: dict[int, str]
    specials: list[int]
    decoder: str = ""
    """A tokenizer as JSON that only decodes; empty unless `kind` is `other`."""


class Vocabulary:
    """Turns tokens into text. Thread-safe."""

    def __init__(self, facts: VocabularyFacts, digest: str = "") -> None:
        """`digest`: of the tokenizer's file. Raises TokenizerError if the decoder cannot be
        loaded."""
        self.digest = digest
        self.kind, self.strips = facts.kind, facts.strips
        self._pieces = facts.pieces
        self._specials = frozenset(facts.specials)
        self._decoder: Any = _decoder(facts.decoder) if facts.decoder else None
        self._texts: dict[int, tuple[str, list[int]]] = {}
        self._raws: dict[int, bytes] = {}
        self._showing: dict[frozenset[str], Vocabulary] = {}

    def showing(self, texts: frozenset[str]) -> "Vocabulary":
        """Return this vocabulary with some special tokens as text, by their spelling. `other` ones
        have their own decoder, which stays as it is."""
        if texts not in self._showing:
            shown = {one for one in self._specials if self._pieces.get(one) in texts}
            view = self
            if shown and self.kind != "other":
                view = copy(self)
                view._specials, view._raws, view._showing = self._specials - shown, {}, {}
            self._showing[texts] = view
        return self._showing[texts]

    def decode(self, ids: list[int], *, special: bool = False) -> str:
        """Return the text of tokens. `special`: show special tokens too. Only for `other`
        vocabularies. Raises TokenizerError."""
        try:
            return self._decoder.decode(ids, skip_special_tokens=not special)
        except BaseException as error:
            raise refusal(error) from error

    def token_text(self, token: int) -> tuple[str, list[int]]:
        """Return text and bytes of a token, as log-probabilities show it."""
        text = self._texts.get(token)
        if text is None:
            text = self._texts[token] = self._token_text(token)
        return text

    def _token_text(self, token: int) -> tuple[str, list[int]]:
        if self.kind == "other":
            text = self.decode([token], special=True)
            return text, list(text.encode())
        byte = self.byte(token)
        raw = self._spelled(token) if byte is None else bytes([byte])
        return raw.decode(errors="replace"), list(raw)

    def raw(self, token: int) -> bytes:
        """Return the bytes that a token adds to the text; empty for special tokens. Only for kinds
        where that does not depend on its neighbours (not `other`)."""
        raw = self._raws.get(token)
        if raw is None:
            raw = b"" if token in self._specials else self._spelled(token)
            self._raws[token] = raw
        return raw

    def _spelled(self, token: int) -> bytes:
        piece = self._pieces.get(token, "")
        if self.kind == "pieces":
            return piece.replace("\u2581", " ").encode()
        # A token that was added as text is not spelled in the alphabet of bytes.
        spelled = all(char in _BYTES for char in piece)
        return bytes(_BYTES[char] for char in piece) if spelled else piece.encode()

    def byte(self, token: int) -> int | None:
        """Return the byte that a byte-fallback token stands for, None for other tokens."""
        raw = self.raw(token)
        if self.kind != "pieces" or len(raw) != 6 or not raw.startswith(b"<0x"):
            return None
        try:
            return int(raw[3:5], 16)
        except ValueError:
            return None


class Vocabularies:
    """Those of models' versions. The least recently used ones make way."""

    def __init__(self, most: int) -> None:
        """`most`: models with equal files have one together."""
        self._most = most
        self._of: OrderedDict[str, Vocabulary] = OrderedDict()

    def by_digest(self) -> dict[str, Vocabulary]:
        return {one.digest: one for one in self._of.values()}

    def use(self, version: str) -> Vocabulary | None:
        """Return the vocabulary of a version, as the one that was used last."""
        if version in self._of:
            self._of.move_to_end(version)
        return self._of.get(version)

    def put(self, version: str, vocabulary: Vocabulary) -> None:
        self._of[version] = vocabulary
        self._of.move_to_end(version)
        while len(self.by_digest()) > self._most:
            self._of.popitem(last=False)

    def forget(self, model: str) -> None:
        """Drop those of all versions of a model."""
        for version in [one for one in self._of if name_of(one) == model]:
            del self._of[version]


def _decoder(text: str) -> Any:
    try:
        return FastTokenizer.from_str(text)
    except BaseException as error:
        raise refusal(error) from error


def refusal(error: BaseException, what: str = "the tokenizer failed") -> BaseException:
    """Return what to raise for an exception of the `tokenizers` library.

    The library raises bare Exceptions, and its defects (Rust's panics) are BaseExceptions. Other
    BaseExceptions, such as KeyboardInterrupt, are not its failures and are returned unchanged.
    """
    if isinstance(error, Exception) or type(error).__name__ == "PanicException":
        return TokenizerError(f"{what}: {one_line(error)}")
    return error


def _byte_table() -> dict[str, int]:
    """Return character -> byte: byte-level BPE writes every byte as a printable character."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTES = _byte_table()
