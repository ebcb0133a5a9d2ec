"""Answers of /api/chat and /api/generate: JSON, a line for each part of a stream."""

import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from c2cserve.server.choices import ChoicePiece
from c2cserve.server.doors.blocks import Deltas, arguments_of
from c2cserve.server.doors.door import LINES, Answer
from c2cserve.server.errors import ApiError

_json = msgspec.json.Encoder()
_NS = 1_000_000_000


def error_body(error: ApiError) -> dict[str, Any]:
    """Return an error in Ollama's shape, which has no place for the field at fault but the
    message."""
    return {"error": error.naming}


class _Calls:
    """Calls of tools, which may come in parts: Ollama sends them whole."""

    def __init__(self) -> None:
        self._number = -1
        self._call: dict[str, Any] = {}
        """The call that may still grow."""
        self._arguments: list[str] = []

    def add(self, parts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Take parts of calls; return the calls that are whole now."""
        whole: list[dict[str, Any]] = []
        for part in parts:
            function = part["function"]
            if part["index"] != self._number:
                whole += self.finish()
                self._number = part["index"]
                called = {"index": self._number, "name": function["name"]}
                self._call = {"id": part["id"], "function": called}
            self._arguments.append(function.get("arguments") or "")
        return whole

    def finish(self) -> list[dict[str, Any]]:
        """Return the last call, if there is one."""
        if not self._call:
            return []
        call, arguments = self._call, arguments_of("".join(self._arguments))
        self._call = {}
        self._arguments.clear()
        return [{**call, "function": {**call["function"], "arguments": arguments}}]


class LineWriter:
    """Writes an answer of /api/generate."""

    media_type = LINES

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._choice = answer.choices[0]
        self._deltas = Deltas(answer.asked.reading)
        self._calls = _Calls()
        self._finish = "stop"

    def begin(self, piece: ChoicePiece) -> bytes:
        return self.add(piece)

    def add(self, piece: ChoicePiece) -> bytes:
        found = self._read(piece)
        return self._line({**self._said(*found), "done": False}) if any(found) else b""

    def end(self) -> bytes:
        return self._line({**self._said("", "", []), **self._done()})

    def fail(self, error: ApiError) -> bytes:
        return _json.encode(error_body(error)) + b"\n"

    def whole(self, pieces: Mapping[int, Sequence[ChoicePiece]]) -> bytes:
        texts, thoughts, calls = list[str](), list[str](), list[dict[str, Any]]()
        for piece in pieces[0]:
            text, thought, called = self._read(piece)
            texts.append(text)
            thoughts.append(thought)
            calls += called
        said = self._said("".join(texts), "".join(thoughts), calls)
        return self._line({**said, **self._done()})

    def _read(self, piece: ChoicePiece) -> tuple[str, str, list[dict[str, Any]]]:
        """Return the text, the reasoning and the calls of a piece."""
        delta, finish = self._deltas.read(piece)
        calls = self._calls.add(delta.get("tool_calls", ()))
        if finish is not None:
            calls += self._calls.finish()
            self._finish = "length" if finish == "length" else "stop"
        return delta.get("content", ""), delta.get("reasoning_content", ""), calls

    def _said(self, text: str, thought: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the fields of a line with new output."""
        return {"response": text, **({"thinking": thought} if thought else {})}

    def _line(self, fields: dict[str, Any]) -> bytes:
        now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        return (
            _json.encode({"model": self._answer.asked.model, "created_at": now, **fields}) + b"\n"
        )

    def _done(self) -> dict[str, Any]:
        """Return the fields of the last line. Durations are nanoseconds."""
        if self._answer.asked.no_output:
            return {"done": True, "done_reason": "load"}
        choice, timing = self._choice, self._choice.timing
        took_s = time.monotonic() - choice.job.request.arrival_s
        load_s = timing.wait_weights_s + timing.switch_s if timing else 0.0
        output_s = (choice.last_s or 0.0) - (choice.first_s or 0.0)
        return {
            "done": True, "done_reason": self._finish, "total_duration": int(took_s * _NS),
            "load_duration": int(load_s * _NS), "prompt_eval_count": self._answer.prompt_tokens,
            "prompt_eval_duration": int(timing.prefill_s * _NS) if timing else 0,
            "eval_count": choice.output_tokens, "eval_duration": int(output_s * _NS),
        }  # fmt: skip


class ChatLineWriter(LineWriter):
    """Writes an answer of /api/chat."""

    def _said(self, text: str, thought: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if thought:
            message["thinking"] = thought
        if calls:
            message["tool_calls"] = calls
        return {"message": message}
