"""Whatever a body says, a door reads it or refuses it: it never fails."""

import json
from typing import Any

import pytest
from door_clients import SCHEMA
from hypothesis import given
from hypothesis import strategies as st

from c2cserve.server.doors.anthropic.fields import read_count
from c2cserve.server.doors.readers import READERS
from c2cserve.server.errors import ApiError

USER: Any = {"role": "user", "content": "x"}
FUNCTION: Any = {"name": "f", "parameters": SCHEMA, "strict": False}
TEXT: Any = {"type": "text", "text": "x"}
BODIES: dict[str, dict[str, Any]] = {
    "messages": {
        "model": "m", "max_tokens": 9, "system": [TEXT], "thinking": {"type": "adaptive"},
        "messages": [
            {"role": "user", "content": [TEXT]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "x", "signature": ""}, TEXT,
                {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "1", "content": [TEXT]}, TEXT
            ]},
        ],
        "tools": [{"name": "f", "input_schema": SCHEMA}], "tool_choice": {"type": "auto"},
        "output_config": {"effort": "low"}, "stop_sequences": ["x"], "metadata": {"user_id": "u"},
    },
    "responses": {
        "model": "m", "instructions": "x", "text": {"format": {"type": "text"}},
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
            {"type": "reasoning", "summary": [], "content": [
                {"type": "reasoning_text", "text": "x"}
            ]},
            {"type": "message", "role": "assistant", "content": [
                {"type": "output_text", "text": "x", "annotations": []}
            ]},
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": "x"},
        ],
        "tools": [{"type": "function", **FUNCTION}], "tool_choice": "auto",
        "reasoning": {"effort": "low"}, "metadata": {"a": "b"},
    },
    "ollama_chat": {
        "model": "m", "options": {"num_predict": 5, "stop": ["x"]}, "think": "low",
        "messages": [
            USER, {"role": "assistant", "tool_calls": [
                {"function": {"name": "f", "arguments": {"a": 1}}}
            ]},
            {"role": "tool", "tool_name": "f", "content": "x"},
        ],
        "tools": [{"type": "function", "function": FUNCTION}], "format": "", "keep_alive": -1,
    },
    "ollama_generate": {
        "model": "m", "prompt": "x", "system": "x", "options": {"temperature": 1}, "raw": False
    },
}  # fmt: skip
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4)
    | st.sampled_from(["auto", "any", "user", "text", "tool_use", "function_call", "\ud800"]),
    lambda inner: st.lists(inner, max_size=2)
    | st.dictionaries(st.sampled_from(["type", "role", "content", "name", "x"]), inner, max_size=3),
    max_leaves=5,
)  # fmt: skip


def places_of(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of all parts of a body."""
    parts: Any = ()
    if isinstance(value, dict | list):
        parts = value.items() if isinstance(value, dict) else enumerate(value)
    return [path, *(place for key, one in parts for place in places_of(one, (*path, key)))]


def changed(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = changed(value[path[0]], path[1:], new)
    return copy


@pytest.mark.parametrize("api", BODIES)
def test_the_bodies_are_right(api: Any) -> None:
    assert READERS[api](json.dumps(BODIES[api]).encode()).body.model == "m"


@pytest.mark.parametrize("api", BODIES)
@given(data=st.data())
def test_a_wrong_part_is_refused_or_read(api: Any, data: st.DataObject) -> None:
    place = data.draw(st.sampled_from(places_of(BODIES[api])))
    body = json.dumps(changed(BODIES[api], place, data.draw(VALUES))).encode()
    refused: list[ApiError] = []
    for read in (READERS[api], *([read_count] if api == "messages" else [])):
        try:
            read(body)
        except ApiError as error:
            refused.append(error)
    assert all(error.status == 400 and error.message for error in refused)
