"""Answers of /v1/messages: one message, whole or as server-sent events."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from c2cserve.server.choices import ChoicePiece
from c2cserve.server.doors.blocks import Block, Blocks, arguments_of
from c2cserve.server.doors.door import EVENTS, Answer
from c2cserve.server.errors import ApiError

_json = msgspec.json.Encoder()
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ERRORS = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error",
    404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error",
    503: "overloaded_error",
}  # fmt: skip
_DELTAS = {
    "text": ("text_delta", "text"), "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}  # fmt: skip
"""Kind of a block -> the type of its deltas, and the field with their text."""
_PING = b'event: ping\ndata: {"type":"ping"}\n\n'


def error_body(error: ApiError) -> dict[str, Any]:
    """Return an error in Anthropic's shape, which has no place for the field at fault but the
    message."""
    usual = "api_error" if error.status >= 500 else "invalid_request_error"
    kind = _ERRORS.get(error.status, usual)
    return {"type": "error", "error": {"type": kind, "message": error.naming}}


class MessageWriter:
    """Writes the message of one answer. It hears of the output's blocks while pieces are added."""

    media_type = EVENTS

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._choice = answer.choices[0]
        self._blocks = Blocks(answer.asked.reading, self)
        self._out: list[bytes] = []

    def begin(self, piece: ChoicePiece) -> bytes:
        message = {**self._message(), "usage": self._usage(0)}
        self._send("message_start", message=message)
        self._out.append(_PING)
        return self.add(piece)

    def add(self, piece: ChoicePiece) -> bytes:
        self._blocks.add(piece)
        sent = b"".join(self._out)
        self._out.clear()
        return sent

    def end(self) -> bytes:
        self._send("message_delta", delta=self._stop(), usage=self._usage())
        self._send("message_stop")
        return b"".join(self._out)

    def fail(self, error: ApiError) -> bytes:
        return b"event: error\ndata: " + _json.encode(error_body(error)) + b"\n\n"

    def whole(self, pieces: Mapping[int, Sequence[ChoicePiece]]) -> bytes:
        self._blocks = Blocks(self._answer.asked.reading)
        for piece in pieces[0]:
            self._blocks.add(piece)
        content = [_whole(block) for block in self._blocks.done]
        return _json.encode(
            {**self._message(), "content": content, **self._stop(), "usage": self._usage()}
        )

    # ---- blocks, as events ----------------------------------------------------------------------

    def opened(self, block: Block) -> None:
        self._send("content_block_start", index=block.index, content_block=_begun(block))

    def grew(self, block: Block, text: str) -> None:
        kind, key = _DELTAS[block.kind]
        self._send("content_block_delta", index=block.index, delta={"type": kind, key: text})

    def closed(self, block: Block) -> None:
        self._send("content_block_stop", index=block.index)

    def _send(self, kind: str, **fields: Any) -> None:
        data = _json.encode({"type": kind, **fields})
        self._out.append(b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n")

    # ---- the message ----------------------------------------------------------------------------

    def _message(self) -> dict[str, Any]:
        """Return the message before its first block."""
        return {
            "id": f"msg_{self._answer.id}", "type": "message", "role": "assistant",
            "model": self._answer.asked.model, "content": [], "stop_reason": None,
            "stop_sequence": None,
        }  # fmt: skip

    def _stop(self) -> dict[str, Any]:
        finish, stop_string = self._blocks.finish or "", self._choice.stop_string
        if finish == "stop" and stop_string is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": stop_string}
        return {"stop_reason": _STOP_REASONS.get(finish, finish), "stop_sequence": None}

    def _usage(self, output: int | None = None) -> dict[str, Any]:
        """Return the usage. The three counts of input add up to the prompt."""
        cached = self._choice.cached_tokens
        return {
            "input_tokens": self._answer.prompt_tokens - cached,
            "cache_creation_input_tokens": 0, "cache_read_input_tokens": cached,
            "output_tokens": self._choice.output_tokens if output is None else output,
        }  # fmt: skip


def _begun(block: Block) -> dict[str, Any]:
    if block.kind == "call":
        return {"type": "tool_use", "id": block.id, "name": block.name, "input": {}}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


def _whole(block: Block) -> dict[str, Any]:
    if block.kind == "call":
        return {**_begun(block), "input": arguments_of(block.text)}
    key = "thinking" if block.kind == "reasoning" else "text"
    return {**_begun(block), key: block.text}
