"""Blocks of an output: their order, and calls of tools that come in parts."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from c2cserve.server.choices import ChoicePiece
from c2cserve.server.doors import blocks
from c2cserve.server.doors.blocks import Block, Blocks
from c2cserve.server.tools.reading import ReadingPlan

PLAN = ReadingPlan("hermes", ("f",), reasoning=True)
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
PIECES = st.lists(st.sampled_from(["x", " ", "\n", CALL, "yes "]), max_size=6).map("".join)


class Heard:
    """What a listener hears, as blocks put together again."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.open: Block | None = None

    def opened(self, block: Block) -> None:
        assert (self.open, block.index) == (None, len(self.texts))
        self.open = block
        self.texts.append("")

    def grew(self, block: Block, text: str) -> None:
        assert self.open is block
        assert text
        self.texts[-1] += text

    def closed(self, block: Block) -> None:
        assert self.open is block
        assert self.texts[-1] == block.text
        self.open = None


def read(texts: list[str]) -> list[tuple[str, str, str]]:
    heard = Heard()
    output = Blocks(PLAN, heard)
    for number, text in enumerate(texts):
        finish = "stop" if number == len(texts) - 1 else None
        output.add(ChoicePiece(0, text, finish=finish, tokens=1))
    assert heard.open is None
    assert len(heard.texts) == len(output.done)
    return [(block.kind, block.name, block.text) for block in output.done]


@given(st.sampled_from(["", "<think>hm</think>"]), PIECES)
def test_blocks_alternate(thought: str, text: str) -> None:
    """The pieces here are characters, so that no two calls or texts come in one."""
    found = read([*thought, *text, ""])
    kinds = [kind for kind, _, _ in found]
    assert ("reasoning" in kinds) == bool(thought)
    assert kinds.count("call") == text.count(CALL)
    assert all(pair != ("text", "text") for pair in pairwise(kinds))
    said = "".join(part for kind, _, part in found if kind == "text")
    assert "".join(said.split()) == "".join(text.replace(CALL, "").split())
    assert all(json.loads(part) == {"a": 1} for kind, _, part in found if kind == "call")


def test_spaces_alone_are_a_text() -> None:
    assert read([" ", "\n"]) == [("text", "", " \n")]
    assert read([f"\n{CALL}\n"]) == [("call", "f", '{"a": 1}')]


def test_calls_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of a call after its first one have its number and more arguments."""
    begun = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": ""}}
    parts: list[dict[str, Any]] = [
        {"content": "I call."},
        {"tool_calls": [{"index": 0, **begun}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a"'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ": 1}"}}]},
        {"tool_calls": [{"index": 1, **begun, "id": "c2"}]},
        {"tool_calls": [{"index": 1, "function": {"arguments": "{}"}}]},
    ]

    class Scripted:
        def __init__(self, plan: ReadingPlan) -> None:
            self._left = list(parts)

        def chunk(self, piece: ChoicePiece, *_: object, first: bool) -> dict[str, Any]:
            return {"delta": self._left.pop(0), "finish_reason": piece.finish}

    monkeypatch.setattr(blocks, "Readings", Scripted)
    assert read(["x"] * len(parts)) == [
        ("text", "", "I call."), ("call", "f", '{"a": 1}'), ("call", "f", "{}")
    ]  # fmt: skip


def test_tokens_of_reasoning() -> None:
    output = Blocks(PLAN)
    for text in ("<think>", "hm", "</think>", "yes", " no"):
        output.add(ChoicePiece(0, text, tokens=1))
    assert output.reasoning_tokens == 3
    plain = Blocks(PLAN)
    plain.add(ChoicePiece(0, "yes", tokens=1))
    assert plain.reasoning_tokens == 0
