"""What a model's tokens say: enough to turn them into text, without the tokenizer that reads text.

A tokenizer takes a second to load and holds the interpreter's lock meanwhile. So the server has
only this of it, which a text process sends (server/text/pool.py).
"""

from typing import Any

import msgspec
from tokenizers import Tokenizer as FastTokenizer

from c2cserve.files.reading import one_line


class TokenizerError(ValueError):
    """The model's tokenizer or template can not be used; says why."""


class VocabularyFacts(msgspec.Struct):
    """A vocabulary on its way from one process to another."""

    kind: str
    """`bytes`, `pieces` or `other`: how tokens are spelled."""
    strips: bool
    """The first space of a text is not shown."""
    pieces: dict[int, str]
    specials: list[int]
    decoder: str = ""
    """For `other`: a tokenizer as JSON that decodes and does nothing else."""


class Vocabulary:
    """Thread-safe."""

    def __init__(self, facts: VocabularyFacts) -> None:
        """Raises TokenizerError."""
        self.kind, self.strips = facts.kind, facts.strips
        self._pieces = facts.pieces
        self._specials = frozenset(facts.specials)
        self._decoder: Any = _decoder(facts.decoder) if facts.decoder else None
        self._texts: dict[int, tuple[str, list[int]]] = {}
        self._raws: dict[int, bytes] = {}

    def decode(self, ids: list[int], *, special: bool = False) -> str:
        """Without special tokens, unless asked for. Only for `other` vocabularies.

        Raises TokenizerError.
        """
        try:
            return self._decoder.decode(ids, skip_special_tokens=not special)
        except BaseException as error:
            raise refusal(error) from error

    def token_text(self, token: int) -> tuple[str, list[int]]:
        """One token for log-probabilities: its text and its bytes."""
        known = self._texts.get(token)
        if known is None:
            known = self._texts[token] = self._token_text(token)
        return known

    def _token_text(self, token: int) -> tuple[str, list[int]]:
        if self.kind == "other":
            text = self.decode([token], special=True)
            return text, list(text.encode())
        byte = self.byte(token)
        raw = self._spelled(token) if byte is None else bytes([byte])
        return raw.decode(errors="replace"), list(raw)

    def raw(self, token: int) -> bytes:
        """What the token adds to the text, where that does not depend on its neighbours (`kind` is
        not `other`); nothing for special tokens."""
        known = self._raws.get(token)
        if known is None:
            known = b"" if token in self._specials else self._spelled(token)
            self._raws[token] = known
        return known

    def _spelled(self, token: int) -> bytes:
        piece = self._pieces.get(token, "")
        if self.kind == "pieces":
            return piece.replace("\u2581", " ").encode()
        # A token that was added as text is not spelled in the alphabet of bytes.
        spelled = all(char in _BYTES for char in piece)
        return bytes(_BYTES[char] for char in piece) if spelled else piece.encode()

    def byte(self, token: int) -> int | None:
        """The byte a byte-fallback token stands for."""
        raw = self.raw(token)
        if self.kind != "pieces" or len(raw) != 6 or not raw.startswith(b"<0x"):
            return None
        try:
            return int(raw[3:5], 16)
        except ValueError:
            return None


def _decoder(text: str) -> Any:
    try:
        return FastTokenizer.from_str(text)
    except BaseException as error:
        raise refusal(error) from error


def refusal(error: BaseException, what: str = "the tokenizer failed") -> BaseException:
    """What to raise for a failure of the `tokenizers` library: it raises bare Exceptions, and its
    defects (Rust's panics) are BaseExceptions. What stops a process is none of its failures."""
    if isinstance(error, Exception) or type(error).__name__ == "PanicException":
        return TokenizerError(f"{what}: {one_line(error)}")
    return error


def _byte_table() -> dict[str, int]:
    """Byte-level BPE writes every byte as a printable character: the inverse of that."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTES = _byte_table()
