"""Detokenizing a growing output, up to its stop strings."""

import codecs
from abc import ABC, abstractmethod
from collections.abc import Sequence

from c2cserve.server.text.vocabulary import Vocabulary


class Detokenizer:
    """Turns tokens of a growing output into text, at a constant cost per token.

    The texts, joined, equal what decoding prompt and output together gives after the prompt.
    """

    def __init__(self, vocabulary: Vocabulary, prompt: Sequence[int]) -> None:
        kinds = {"bytes": _ByteText, "pieces": _PieceText}
        self._text = kinds.get(vocabulary.kind, _WindowText)(vocabulary, prompt)

    def add(self, tokens: tuple[int, ...]) -> str:
        return self._text.add(tokens)

    def finish(self) -> str:
        """Return the text that was held back."""
        return self._text.finish()


class _ByteText:
    """Byte-level BPE (Llama 3, Qwen): tokens are bytes, text is their UTF-8."""

    def __init__(self, vocabulary: Vocabulary, prompt: Sequence[int]) -> None:
        self._raw = vocabulary.raw
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        # The prompt may end within a character. A character has at most four bytes.
        tail = b""
        for token in reversed(prompt):
            tail = self._raw(token) + tail
            if len(tail) >= 4:
                break
        self._decoder.decode(tail)

    def add(self, tokens: Sequence[int]) -> str:
        return self._decoder.decode(b"".join(map(self._raw, tokens)))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class _TokenText(ABC):
    """Text that is decoded token by token."""

    def add(self, tokens: Sequence[int]) -> str:
        return "".join([self._add(token) for token in tokens])

    @abstractmethod
    def _add(self, token: int) -> str: ...


class _PieceText(_TokenText):
    """SentencePiece with byte fallback (Llama 2, Mistral): tokens are text, or one byte each.

    A run of bytes is text if all of it is UTF-8, else a replacement character per byte. So it is
    held until it ends. The first space of a text is not shown, if no text was shown before.
    """

    def __init__(self, vocabulary: Vocabulary, prompt: Sequence[int]) -> None:
        self._vocabulary = vocabulary
        self._run = bytearray()
        self._strip = vocabulary.strips and not any(vocabulary.raw(t) for t in reversed(prompt))
        for token in reversed(prompt[-4:]):
            byte = vocabulary.byte(token)
            if byte is None:
                break
            self._run.insert(0, byte)
        # If the prompt ends in a run, only its unfinished character belongs to the output.
        whole = codecs.getincrementaldecoder("utf-8")("ignore")
        whole.decode(bytes(self._run))
        self._run = bytearray(whole.getstate()[0])

    def _add(self, token: int) -> str:
        byte = self._vocabulary.byte(token)
        if byte is not None:
            self._run.append(byte)
            return ""
        raw = self._vocabulary.raw(token)
        return self.finish() + self._shown(raw.decode()) if raw else ""

    def finish(self) -> str:
        if not self._run:
            return ""
        run, self._run = bytes(self._run), bytearray()
        try:
            return self._shown(run.decode())
        except UnicodeDecodeError:
            return self._shown("\N{REPLACEMENT CHARACTER}" * len(run))

    def _shown(self, text: str) -> str:
        if self._strip:
            self._strip = False
            return text.removeprefix(" ")
        return text


class _WindowText(_TokenText):
    """Any other decoder: the difference of two decodings of a short window. It is held back while
    the window ends in the middle of a character."""

    _CONTEXT = 6

    def __init__(self, vocabulary: Vocabulary, prompt: Sequence[int]) -> None:
        self._vocabulary = vocabulary
        self._ids = list(prompt[-self._CONTEXT :])
        self._prefix = 0
        self._read = len(self._ids)

    def _add(self, token: int) -> str:
        self._ids.append(token)
        return self._new(final=False)

    def finish(self) -> str:
        return self._new(final=True)

    def _new(self, *, final: bool) -> str:
        before = self._vocabulary.decode(self._ids[self._prefix : self._read])
        after = self._vocabulary.decode(self._ids[self._prefix :])
        if len(after) <= len(before) or (after.endswith("\N{REPLACEMENT CHARACTER}") and not final):
            return ""
        self._ids = self._ids[self._prefix :]  # the window never grows
        self._prefix, self._read = self._read - self._prefix, len(self._ids)
        return after[len(before) :]


class StopStrings:
    """Cuts a text where a stop string begins, also when it arrives in pieces.

    The string that is complete first counts. Of several that end together, the longest counts. So
    the result does not depend on how the text is cut into pieces.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""
        self.found = ""
        """The stop string that ended the text."""

    def __bool__(self) -> bool:
        return bool(self._stops)

    def add(self, text: str) -> tuple[str, bool]:
        """Return the text that can be shown now, and whether a stop string was found."""
        if not self._stops:
            return text, False
        self._held += text
        found = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            end, at = min(found)
            self.found = self._held[at:end]
            return self._held[:at], True
        keep = max(self._overlap(stop) for stop in self._stops)
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown, False

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held

    def _overlap(self, stop: str) -> int:
        """Return the length of the longest end of the text that begins the stop string."""
        for size in range(min(len(stop) - 1, len(self._held)), 0, -1):
            if self._held.endswith(stop[:size]):
                return size
        return 0
