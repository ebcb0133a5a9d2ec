"""From the tokens of a growing output to its text, up to its stop strings."""

import codecs
from collections.abc import Sequence

from c2cserve.server.text.vocabulary import Vocabulary


class Detokenizer:
    """Text of a growing output, exact to the character, at a constant cost per token.

    The concatenated text is what decoding prompt and output in one piece says after the prompt.
    """

    def __init__(self, vocabulary: Vocabulary, prompt: Sequence[int]) -> None:
        kinds = {"bytes": _ByteText, "pieces": _PieceText}
        self._text = kinds.get(vocabulary.kind, _WindowText)(vocabulary, prompt)

    def add(self, tokens: tuple[int, ...]) -> str:
        return "".join([self._text.add(token) for token in tokens])

    def finish(self) -> str:
        """What was held back."""
        return self._text.finish()


class _ByteText:
    """Byte-level BPE (Llama 3, Qwen): tokens are bytes, text is their UTF-8."""

    def __init__(self, vocabulary: Vocabulary, prompt: Sequence[int]) -> None:
        self._raw = vocabulary.raw
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        # The prompt may end within a character; more than four bytes back there is no such one.
        tail = b""
        for token in reversed(prompt):
            tail = self._raw(token) + tail
            if len(tail) >= 4:
                break
        self._decoder.decode(tail)

    def add(self, token: int) -> str:
        return self._decoder.decode(self._raw(token))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class _PieceText:
    """SentencePiece with byte fallback (Llama 2, Mistral): tokens are text, or one byte each.

    A run of bytes is text if all of it is UTF-8, else a replacement character per byte: it is held
    until it ends. The first space of a text is not shown, if nothing was shown before.
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
        # Of a run the prompt ends in, only an unfinished character belongs to the output.
        whole = codecs.getincrementaldecoder("utf-8")("ignore")
        whole.decode(bytes(self._run))
        self._run = bytearray(whole.getstate()[0])

    def add(self, token: int) -> str:
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


class _WindowText:
    """Any other decoder: the difference of two decodings of a short window, held back while it ends
    in the middle of a character."""

    _CONTEXT = 6

    def __init__(self, vocabulary: Vocabulary, prompt: Sequence[int]) -> None:
        self._vocabulary = vocabulary
        self._ids = list(prompt[-self._CONTEXT :])
        self._prefix = 0
        self._read = len(self._ids)

    def add(self, token: int) -> str:
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
    """Cuts a text where one of some strings begins, also when it arrives in pieces.

    The string that is complete first counts, the longest of several that end together: so the
    result does not depend on how the text is cut into pieces.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""

    def add(self, text: str) -> tuple[str, bool]:
        """Text that can be shown now, and whether a stop string was found."""
        if not self._stops:
            return text, False
        self._held += text
        found = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            return self._held[: min(found)[1]], True
        keep = max(self._overlap(stop) for stop in self._stops)
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown, False

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held

    def _overlap(self, stop: str) -> int:
        """Length of the longest end of the text that begins the stop string."""
        for size in range(min(len(stop) - 1, len(self._held)), 0, -1):
            if self._held.endswith(stop[:size]):
                return size
        return 0
