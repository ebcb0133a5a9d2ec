"""An output as a list of blocks: what chat completions put side by side, in its order.

    <think> hm </think> It rains. <tool_call>...</tool_call>  ->  [reasoning, text, call]

Anthropic's `content` and the `output` of OpenAI's Responses are such lists.
"""

import json
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, cast

from msgspec.structs import replace

from c2cserve.server.choices import ChoicePiece
from c2cserve.server.tools.reading import ReadingPlan
from c2cserve.server.tools.readings import Readings

Kind = Literal["reasoning", "text", "call"]


class Deltas:
    """The pieces of one choice as deltas of chat completions."""

    def __init__(self, plan: ReadingPlan | None) -> None:
        # Only chats tell a call that was named from others by their reason to end.
        self._readings = None if plan is None else Readings(replace(plan, named=False))

    def read(self, piece: ChoicePiece) -> tuple[dict[str, Any], str | None]:
        """Return the delta (`content`, `reasoning_content`, `tool_calls`), and why the choice
        ended if it did."""
        if not (piece.text or piece.finish):
            return {}, None
        if self._readings is None:
            return ({"content": piece.text} if piece.text else {}), piece.finish
        choice = self._readings.chunk(piece, None, first=False)
        return choice["delta"], choice["finish_reason"]


@dataclass(slots=True)
class Block:
    index: int
    kind: Kind
    id: str = ""
    """The id of a call, as OpenAI's chats have it."""
    name: str = ""
    """The tool that is called."""
    parts: list[str] = field(default_factory=list[str])

    @property
    def text(self) -> str:
        """The text so far; of a call, its arguments as JSON."""
        return "".join(self.parts)


class BlockListener(Protocol):
    """Hears of blocks in their order: each is opened, grows and is closed before the next."""

    def opened(self, block: Block) -> None: ...

    def grew(self, block: Block, text: str) -> None: ...

    def closed(self, block: Block) -> None: ...


class _Deaf:
    """Listens for an answer that is sent whole."""

    def opened(self, block: Block) -> None: ...

    def grew(self, block: Block, text: str) -> None: ...

    def closed(self, block: Block) -> None: ...


class Blocks:
    """The blocks of one growing output."""

    def __init__(self, plan: ReadingPlan | None, listener: BlockListener | None = None) -> None:
        self._deltas = Deltas(plan)
        self._listener = listener or _Deaf()
        self._open: Block | None = None
        self._call = -1
        """The number of the last call."""
        self._blank = ""
        """Spaces that are part of a text only if more of it follows."""
        self._thoughts = 0
        self.done: list[Block] = []
        self.finish: str | None = None
        """Why the output ended, as in chat completions."""

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of the output up to the end of its reasoning, 0 if it has none."""
        reasoned = any(one.kind == "reasoning" for one in (*self.done, self._open) if one)
        return self._thoughts if reasoned else 0

    def add(self, piece: ChoicePiece) -> None:
        delta, finish = self._deltas.read(piece)
        if text := delta.get("reasoning_content"):
            self._grow("reasoning", text)
        if text := delta.get("content"):
            self._add_text(text)
        for call in delta.get("tool_calls", ()):
            self._add_call(call)
        if not self.done and (self._open is None or self._open.kind == "reasoning"):
            self._thoughts += piece.tokens
        if finish is not None:
            self.finish = finish
            if self._blank and self._open is None and not self.done:
                self._grow("text", self._blank)
            self._close()

    def _add_text(self, text: str) -> None:
        if self._open is None or self._open.kind != "text":
            text = self._blank + text
            if not text.strip():
                self._blank = text
                return
        self._blank = ""
        self._grow("text", text)

    def _add_call(self, call: dict[str, Any]) -> None:
        """Take a call, or the next part of its arguments."""
        if call["index"] != self._call:
            self._call = call["index"]
            self._begin("call", call["id"], call["function"]["name"])
        if arguments := call["function"].get("arguments"):
            self._grow("call", arguments)

    def _grow(self, kind: Kind, text: str) -> None:
        block = self._open
        if block is None or block.kind != kind:
            block = self._begin(kind)
        block.parts.append(text)
        self._listener.grew(block, text)

    def _begin(self, kind: Kind, id_: str = "", name: str = "") -> Block:
        self._close()
        block = self._open = Block(len(self.done), kind, id_, name)
        self._listener.opened(block)
        return block

    def _close(self) -> None:
        if self._open is not None:
            self.done.append(self._open)
            block, self._open = self._open, None
            self._listener.closed(block)


def arguments_of(text: str) -> dict[str, Any]:
    """Return the arguments of a call; empty if the output ended within them (`max_tokens`), as its
    reason to end says then."""
    try:
        arguments = json.loads(text or "{}")
    except ValueError:
        return {}
    return cast("dict[str, Any]", arguments) if isinstance(arguments, dict) else {}
