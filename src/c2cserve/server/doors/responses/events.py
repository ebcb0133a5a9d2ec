"""Answers of /v1/responses: a response with its items, whole or as server-sent events."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from c2cserve.server.choices import ChoicePiece
from c2cserve.server.doors.blocks import Block, Blocks
from c2cserve.server.doors.door import EVENTS, Answer
from c2cserve.server.errors import ApiError

_json = msgspec.json.Encoder()
_fields_of = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_PREFIXES = {"text": "msg", "reasoning": "rs", "call": "fc"}
_DELTAS = {
    "text": "response.output_text", "reasoning": "response.reasoning_text",
    "call": "response.function_call_arguments",
}  # fmt: skip
"""Kind of a block -> the names of the events of its text, without `.delta` and `.done`."""


class ResponseWriter:
    """Writes the response of one answer. It hears of the output's blocks while pieces are added."""

    media_type = EVENTS

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._choice = answer.choices[0]
        self._blocks = Blocks(answer.asked.reading, self)
        # Instructions and tools may be long: they are copied as they are, never read here.
        self._repeated = _fields_of(answer.asked.repeated)
        self._created_s = int(time.time())
        self._number = 0
        self._out: list[bytes] = []

    def begin(self, piece: ChoicePiece) -> bytes:
        for kind in ("response.created", "response.in_progress"):
            self._send(kind, response=self._response("in_progress"))
        return self.add(piece)

    def add(self, piece: ChoicePiece) -> bytes:
        self._blocks.add(piece)
        return self._sent()

    def end(self) -> bytes:
        response = self._done()
        self._send(f"response.{response['status']}", response=response)
        return self._sent()

    def fail(self, error: ApiError) -> bytes:
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        failed = {"error": {"code": code, "message": error.message}}
        self._send("response.failed", response=self._response("failed") | failed)
        return self._sent()

    def whole(self, pieces: Mapping[int, Sequence[ChoicePiece]]) -> bytes:
        self._blocks = Blocks(self._answer.asked.reading)
        for piece in pieces[0]:
            self._blocks.add(piece)
        return _json.encode(self._done())

    # ---- blocks, as events ----------------------------------------------------------------------

    def opened(self, block: Block) -> None:
        item = {**self._item(block), "status": "in_progress"}
        if block.kind != "call":
            item["content"] = []
        self._send("response.output_item.added", output_index=block.index, item=item)
        if block.kind != "call":
            self._send("response.content_part.added", **self._place(block), part=_part(block))

    def grew(self, block: Block, text: str) -> None:
        more = {"logprobs": []} if block.kind == "text" else {}
        self._send(f"{_DELTAS[block.kind]}.delta", **self._place(block), delta=text, **more)

    def closed(self, block: Block) -> None:
        place, done = self._place(block), f"{_DELTAS[block.kind]}.done"
        if block.kind == "call":
            self._send(done, **place, name=block.name, arguments=block.text)
        else:
            more = {"logprobs": []} if block.kind == "text" else {}
            self._send(done, **place, text=block.text, **more)
            self._send("response.content_part.done", **place, part=_part(block))
        item = self._item(block)
        self._send("response.output_item.done", output_index=block.index, item=item)

    def _place(self, block: Block) -> dict[str, Any]:
        place: dict[str, Any] = {"item_id": self._id(block), "output_index": block.index}
        return place if block.kind == "call" else {**place, "content_index": 0}

    def _send(self, kind: str, **fields: Any) -> None:
        data = _json.encode({"type": kind, "sequence_number": self._number, **fields})
        self._number += 1
        self._out.append(b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n")

    def _sent(self) -> bytes:
        sent = b"".join(self._out)
        self._out.clear()
        return sent

    # ---- the response ---------------------------------------------------------------------------

    def _id(self, block: Block) -> str:
        return f"{_PREFIXES[block.kind]}_{self._answer.id}_{block.index}"

    def _item(self, block: Block) -> dict[str, Any]:
        """Return a block as an item of the output, as far as it has grown."""
        last = block.index == len(self._blocks.done) - 1
        cut = last and self._blocks.finish == "length"
        item: dict[str, Any] = {
            "id": self._id(block),
            "status": "incomplete" if cut else "completed",
        }
        if block.kind == "call":
            return {
                **item, "type": "function_call", "call_id": block.id, "name": block.name,
                "arguments": block.text,
            }  # fmt: skip
        if block.kind == "reasoning":
            return {
                **item, "type": "reasoning", "summary": [], "content": [_part(block)],
                "encrypted_content": None,
            }  # fmt: skip
        return {**item, "type": "message", "role": "assistant", "content": [_part(block)]}

    def _response(self, status: str) -> dict[str, Any]:
        """Return the response with the blocks that are done, and no usage."""
        asked = self._answer.asked
        tier = {"service_tier": "default"} if asked.service_tier else {}
        return {
            "id": f"resp_{self._answer.id}", "object": "response", "created_at": self._created_s,
            "status": status, "error": None, "incomplete_details": None, "model": asked.model,
            "output": [self._item(block) for block in self._blocks.done], "usage": None,
            "temperature": asked.sampling.temperature, "top_p": asked.sampling.top_p,
            **self._repeated, **tier,
        }  # fmt: skip

    def _done(self) -> dict[str, Any]:
        """Return the response at its end. Its status is also the name of its event."""
        cut = self._blocks.finish == "length"
        response = self._response("incomplete" if cut else "completed")
        if cut:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        prompt, output = self._answer.prompt_tokens, self._choice.output_tokens
        cached = {"cached_tokens": self._choice.cached_tokens, "cache_write_tokens": 0}
        response["usage"] = {
            "input_tokens": prompt, "input_tokens_details": cached, "output_tokens": output,
            "output_tokens_details": {"reasoning_tokens": self._blocks.reasoning_tokens},
            "total_tokens": prompt + output,
        }  # fmt: skip
        return response


def _part(block: Block) -> dict[str, Any]:
    """Return the text of a block as the only part of its item."""
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}
