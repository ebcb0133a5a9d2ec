"""The API's description names every route, and real answers have the shapes it says."""

import json
from typing import Any

import pytest
from pydantic import TypeAdapter
from served import BYTE, Served

from c2cserve.server.openapi import answers
from c2cserve.server.openapi.document import OPERATIONS

CHAT: dict[str, Any] = {"model": BYTE, "messages": [{"role": "user", "content": "hello"}]}
COMPLETION: dict[str, Any] = {"model": BYTE, "prompt": "hello", "max_tokens": 3}


@pytest.fixture
def document(served: Served) -> dict[str, Any]:
    answer = served.http.get("/openapi.json")
    assert answer.status_code == 200
    return answer.json()


def references(part: Any) -> set[str]:
    if isinstance(part, dict):
        own = {part["$ref"]} if isinstance(part.get("$ref"), str) else set[str]()
        return own.union(*map(references, part.values()))
    return set[str]().union(*map(references, part)) if isinstance(part, list) else set()


def test_every_route_is_described(document: dict[str, Any]) -> None:
    described = {(m.upper(), p) for p, one in document["paths"].items() for m in one}
    assert described == set(OPERATIONS)


def test_it_stands_by_itself(document: dict[str, Any]) -> None:
    known = {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
    assert references(document) <= known
    for path, operations in document["paths"].items():
        for operation in operations.values():
            assert operation["summary"]
            assert ("{name}" in path) == any(
                one["in"] == "path" for one in operation.get("parameters", ())
            )
            assert any(status.startswith("2") for status in operation["responses"])


def test_fields_of_requests(document: dict[str, Any]) -> None:
    chat = document["components"]["schemas"]["ChatBody"]
    assert {"model", "messages", "temperature", "stream_options"} <= set(chat["properties"])
    assert set(chat["required"]) == {"model", "messages"}
    assert not {"audio", "functions"} & set(chat["properties"]), "refused by name"


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/v1/completions", COMPLETION),
        ("POST", "/v1/completions", {**COMPLETION, "logprobs": 2, "echo": True}),
        ("POST", "/v1/chat/completions", CHAT),
        ("POST", "/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2}),
        ("POST", "/v1/chat/completions", {**CHAT, "service_tier": "auto"}),
        ("GET", "/v1/models", None),
        ("GET", f"/v1/models/{BYTE}", None),
        ("GET", "/admin/state", None),
        ("GET", "/admin/models", None),
        ("GET", f"/admin/models/{BYTE}", None),
        ("GET", "/admin/keys", None),
        ("GET", "/admin/usage", None),
        ("GET", "/health", None),
        ("GET", "/ready", None),
        ("GET", "/version", None),
    ],
)
def test_answers_have_their_shapes(served: Served, method: str, path: str, body: Any) -> None:
    served.says([50, 51, 52])
    answer = served.http.request(method, path, json=body)
    assert answer.status_code == 200, answer.text
    shape = OPERATIONS[method, path.replace(BYTE, "{name}")].answer
    TypeAdapter(shape).validate_json(answer.content)


@pytest.mark.parametrize("body", [COMPLETION, CHAT])
def test_events_have_their_shapes(served: Served, body: dict[str, Any]) -> None:
    path = "/v1/completions" if body is COMPLETION else "/v1/chat/completions"
    shape = TypeAdapter(OPERATIONS["POST", path].chunk)
    options = {"include_usage": True, "continuous_usage_stats": True}
    more = {"stream": True, "stream_options": options}
    text = served.http.post(path, json={**body, **more}).text
    events = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert events.pop() == "[DONE]"
    for event in events:
        shape.validate_python(json.loads(event))


def test_errors_have_their_shape(served: Served) -> None:
    for answer in (
        served.http.post("/v1/completions", json={}),
        served.http.get("/v1/models/none"),
        served.http.get("/nothing"),
    ):
        answers.Error.model_validate_json(answer.content)
