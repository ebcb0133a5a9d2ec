"""Answers of chats whose outputs are read: reasoning and calls beside the content."""

from typing import Any

from c2cserve.server.choices import ChoicePiece
from c2cserve.server.tools.forced import joined
from c2cserve.server.tools.reading import OutputReader, Parts, ReadingPlan


class Readings:
    """The readers of one answer, one for each choice."""

    def __init__(self, plan: ReadingPlan) -> None:
        self._plan = plan
        self._readers: dict[int, OutputReader] = {}
        self._calls: dict[int, int] = {}
        """Choice -> the number of its calls so far."""

    def chunk(
        self, piece: ChoicePiece, logprobs: dict[str, Any] | None, *, first: bool
    ) -> dict[str, Any]:
        """Return a piece as a choice of a chunk. A call comes whole, in one chunk, unless it is
        forced."""
        reader = self._readers.setdefault(piece.index, OutputReader(self._plan))
        found = [reader.add(piece.text)]
        if piece.finish is not None:
            found.append(reader.finish())
        delta: dict[str, Any] = {"role": "assistant", "content": ""} if first else {}
        for key in ("reasoning", "content"):
            if text := "".join(getattr(parts, key) for parts in found):
                delta["reasoning_content" if key == "reasoning" else key] = text
        if calls := [call for parts in found for call in parts.calls]:
            begin = self._calls.get(piece.index, 0)
            self._calls[piece.index] = begin + len(calls)
            delta["tool_calls"] = [
                {"index": number, **call} for number, call in enumerate(calls, begin)
            ]
        if pieces := [piece for parts in found for piece in parts.pieces]:
            delta["tool_calls"] = pieces
        return {
            "index": piece.index, "delta": delta, "logprobs": logprobs,
            "finish_reason": self._finish(piece.finish, reader),
        }  # fmt: skip

    def whole(self, text: str, finish: str | None) -> dict[str, Any]:
        """Return the fields of a whole choice: its message and why it ended."""
        reader = OutputReader(self._plan)
        found = [reader.add(text), reader.finish()]
        message = _message(
            "".join(parts.reasoning for parts in found),
            Parts(
                content="".join(parts.content for parts in found),
                calls=[call for parts in found for call in parts.calls]
                + joined([piece for parts in found for piece in parts.pieces]),
            ),
        )
        return {"message": message, "finish_reason": self._finish(finish, reader)}

    def _finish(self, finish: str | None, reader: OutputReader) -> str | None:
        called = reader.called and not self._plan.named
        return "tool_calls" if called and finish == "stop" else finish


def _message(reasoning: str, parts: Parts) -> dict[str, Any]:
    # OpenAI answers with null where there are only calls.
    content = None if parts.calls and not parts.content.strip() else parts.content
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if reasoning:
        message["reasoning_content"] = reasoning
    if parts.calls:
        message["tool_calls"] = parts.calls
    return message
