"""Real answers of doors, and the examples in the API's description, have the shapes it says."""

import json
from typing import Any

import pytest
from door_clients import CALL, CALLER, SCHEMA, says
from pydantic import TypeAdapter
from served import Served
from tokenizers import Tokenizer

from c2cserve.server.openapi.doors import DOOR_OPERATIONS

USER: Any = [{"role": "user", "content": "hello"}]
FUNCTION: Any = {"name": "weather", "parameters": SCHEMA}
CHAT: dict[str, Any] = {"model": CALLER, "messages": USER}
ASKED: dict[str, dict[str, Any]] = {
    "/v1/messages": {
        **CHAT, "max_tokens": 200, "tools": [{"name": "weather", "input_schema": SCHEMA}]
    },
    "/v1/messages/count_tokens": CHAT,
    "/v1/responses": {
        "model": CALLER, "input": "hello", "tools": [{"type": "function", **FUNCTION}]
    },
    "/api/chat": {**CHAT, "tools": [{"type": "function", "function": FUNCTION}]},
    "/api/generate": {"model": CALLER, "prompt": "hello"},
    "/api/show": {"model": CALLER},
}  # fmt: skip
OUTPUTS = ("hello", f"<think>hm</think>yes {CALL}", "")


def test_examples() -> None:
    for (method, path), operation in DOOR_OPERATIONS.items():
        assert (operation.examples is not None) == (method == "POST"), path
        if operation.examples is not None:
            body, answer = operation.examples
            TypeAdapter(operation.body).validate_python(body)
            TypeAdapter(operation.answer).validate_python(answer)


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("path", ASKED)
def test_answers(caller: Served, byte: Tokenizer, path: str, output: str) -> None:
    says(caller, byte, output)
    operation = DOOR_OPERATIONS["POST", path]
    whole = {} if operation.chunk is None else {"stream": False}
    answer = caller.http.post(path, json={**ASKED[path], **whole})
    assert answer.status_code == 200, answer.text
    TypeAdapter(operation.answer).validate_json(answer.content)
    if operation.chunk is None:
        return
    streamed = caller.http.post(path, json={**ASKED[path], "stream": True})
    assert streamed.headers["content-type"].startswith(operation.streams)
    lines = [line for line in streamed.text.splitlines() if not line.startswith("event: ")]
    for line in filter(None, lines):
        TypeAdapter(operation.chunk).validate_python(json.loads(line.removeprefix("data: ")))


@pytest.mark.parametrize("path", ["/api/tags", "/api/ps", "/api/version"])
def test_lists(caller: Served, path: str) -> None:
    answer = caller.http.get(path)
    TypeAdapter(DOOR_OPERATIONS["GET", path].answer).validate_json(answer.content)


@pytest.mark.parametrize("path", ASKED)
def test_errors(caller: Served, path: str) -> None:
    shape = TypeAdapter(DOOR_OPERATIONS["POST", path].error)
    form = {"content-type": "application/x-www-form-urlencoded", "sec-fetch-site": "none"}
    for answer in (
        caller.http.post(path, content=b"{"),
        caller.http.post(path, json={**ASKED[path], "made_up": 1}),
        caller.http.post(path, json={**ASKED[path], "model": "none"}),
        caller.http.post(path, content=b"{}", headers=form),
        caller.http.put(path, json={}),
    ):
        assert answer.status_code >= 400
        shape.validate_json(answer.content)
