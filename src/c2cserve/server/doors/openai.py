"""OpenAI's completions and chat completions: the door whose shapes are the server's own."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from c2cserve import __version__
from c2cserve.server.choices import ChoicePiece, ChoiceStream
from c2cserve.server.doors.door import EVENTS, Answer
from c2cserve.server.errors import ApiError
from c2cserve.server.shapes import (
    Envelope,
    chat_chunk,
    chat_logprobs,
    choice_usage,
    completion_logprobs,
    text_chunk,
    token_offsets,
    usage,
)
from c2cserve.server.tools.readings import Readings

_json = msgspec.json.Encoder()
_FINGERPRINT = f"c2cserve-{__version__}"


def openai_writer(answer: Answer) -> "OpenAiWriter":
    kind = _CountingWriter if answer.asked.continuous_usage else OpenAiWriter
    return kind(answer)


class OpenAiWriter:
    """Turns the pieces of one answer into chunks or whole choices."""

    media_type = EVENTS

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._envelope = Envelope.new(answer.id, answer.asked, _FINGERPRINT)
        self._echo = answer.asked.echo
        self._started: set[int] = set()
        plan = answer.asked.reading
        self._readings = None if plan is None else Readings(plan)

    # ---- streamed -------------------------------------------------------------------------------

    def begin(self, piece: ChoicePiece) -> bytes:
        return _event(self._chunk(piece))

    def add(self, piece: ChoicePiece) -> bytes:
        if piece.text or piece.finish or piece.logprobs:
            content = self._chunk(piece)
            return _event(content) if content else b""
        self._skip(piece)
        return b""

    def end(self) -> bytes:
        done = b"data: [DONE]\n\n"
        if not self._answer.asked.include_usage:
            return done
        last = self._envelope.wrap([])
        last["usage"] = self._usage()
        return _event(last) + done

    def fail(self, error: ApiError) -> bytes:
        return _event(error.body())

    def _skip(self, piece: ChoicePiece) -> None:
        """Note a piece that has nothing to show."""

    def _chunk(self, piece: ChoicePiece) -> dict[str, Any]:
        """Return the chunk of a piece; empty if its text is held until it is known what it is."""
        first = piece.index not in self._started
        self._started.add(piece.index)
        if self._envelope.chat:
            logprobs = self._logprobs([piece])
            if self._readings is None:
                choice = chat_chunk(piece, logprobs, first=first)
            else:
                choice = self._readings.chunk(piece, logprobs, first=first)
                if not (choice["delta"] or piece.finish or logprobs):
                    return {}
        else:
            choice = text_chunk(piece, self._logprobs([piece], first))
            if first and self._echo:
                choice["text"] = self._answer.choices[piece.index].prompt.text + choice["text"]
        content = self._envelope.wrap([choice])
        if self._answer.asked.include_usage:
            content["usage"] = None
        return content

    # ---- in one piece ---------------------------------------------------------------------------

    def whole(self, pieces: Mapping[int, Sequence[ChoicePiece]]) -> bytes:
        choices = [self._whole(choice, pieces[choice.index]) for choice in self._answer.choices]
        content = self._envelope.wrap(choices)
        content["usage"] = self._usage()
        return _json.encode(content)

    def _whole(self, choice: ChoiceStream, pieces: Sequence[ChoicePiece]) -> dict[str, Any]:
        text = "".join(piece.text for piece in pieces)
        shaped = {
            "index": choice.index, "finish_reason": pieces[-1].finish,
            "logprobs": self._logprobs(pieces, True),
        }  # fmt: skip
        if self._readings is not None:
            return {**shaped, **self._readings.whole(text, pieces[-1].finish)}
        if self._envelope.chat:
            return {**shaped, "message": {"role": "assistant", "content": text, "refusal": None}}
        return {**shaped, "text": (choice.prompt.text if self._echo else "") + text}

    def _usage(self) -> dict[str, Any]:
        return usage(self._answer.choices, len(self._answer.prepared.prompts))

    def _logprobs(
        self, pieces: Sequence[ChoicePiece], first: bool = False
    ) -> dict[str, Any] | None:
        choice = self._answer.choices[pieces[0].index]
        if choice.job.sampling.logprobs is None:
            return None
        vocabulary = self._answer.prepared.vocabulary
        if self._envelope.chat:  # OpenAI's chats do not show the end token
            shown = (one.logprobs[:-1] if one.ends else one.logprobs for one in pieces)
            return chat_logprobs(vocabulary, [entry for part in shown for entry in part])
        entries = [entry for piece in pieces for entry in piece.logprobs]
        before = len(choice.prompt.text) if self._echo else 0
        offsets = [before + offset for piece in pieces for offset in piece.offsets]
        if not (first and self._echo):
            return completion_logprobs(vocabulary, entries, offsets)
        prompt = choice.job.tokens
        offsets = [*token_offsets(vocabulary, prompt)[1:], *offsets]
        return completion_logprobs(
            vocabulary, [*choice.prompt_logprobs, *entries], offsets, unscored=prompt[0]
        )


class _CountingWriter(OpenAiWriter):
    """Adds to each chunk the usage of its choice so far."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer)
        self._tokens = [0] * len(answer.choices)
        """Output tokens of each choice. A choice itself may be ahead of its chunks."""

    def _skip(self, piece: ChoicePiece) -> None:
        self._tokens[piece.index] += piece.tokens

    def _chunk(self, piece: ChoicePiece) -> dict[str, Any]:
        self._skip(piece)
        choice = self._answer.choices[piece.index]
        content = super()._chunk(piece)
        if content:
            content["usage"] = choice_usage(choice, self._tokens[piece.index])
        return content


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + _json.encode(content) + b"\n\n"
