"""What is not supported is refused by name, what is wrong says where, and nothing is a 500."""

import json
from typing import Any

import httpx
import openai
import pytest
from example_counts import examples
from fake_gateway import Play
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from served import BYTE, Served
from tokenizers import Tokenizer

from c2cserve.runtime.gateway import Refused

COMPLETION: dict[str, Any] = {"model": BYTE, "prompt": "hello", "max_tokens": 3}
CHAT: dict[str, Any] = {"model": BYTE, "messages": [{"role": "user", "content": "hello"}]}
PATHS = {"completions": ("/v1/completions", COMPLETION), "chat": ("/v1/chat/completions", CHAT)}

TOOL = {"type": "function", "function": {"name": "f"}}
UNSUPPORTED = [
    ("completions", "suffix", "!"),
    ("completions", "best_of", 2),
    ("completions", "guided_json", {}),
    ("completions", "messages", []),
    ("completions", "top_logprobs", 2),
    ("chat", "tools", [TOOL]),
    ("chat", "tool_choice", "auto"),
    ("chat", "functions", [{"name": "f"}]),
    ("chat", "function_call", "auto"),
    ("chat", "audio", {"voice": "alloy", "format": "wav"}),
    ("chat", "modalities", ["audio"]),
    ("chat", "prediction", {"type": "content", "content": "x"}),
    ("chat", "reasoning_effort", "a lot"),
    ("chat", "web_search_options", {}),
    ("chat", "service_tier", "gold"),
    ("chat", "verbosity", "low"),
    ("chat", "prompt", "x"),
    ("chat", "echo", True),
    ("chat", "no_such_field", 1),
]


def _schema(schema: object, name: str = "x", **more: object) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": name, "schema": schema, **more}}


def refused(served: Served, path: str, body: object, status: int = 400) -> dict[str, Any]:
    """The error of a request that must not have reached the gateway."""
    before = len(served.gateway.jobs)
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = served.http.post(path, content=content)
    assert answer.status_code == status, answer.text
    assert len(served.gateway.jobs) == before
    assert set(answer.json()) == {"error"}
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    return error


@pytest.mark.parametrize(("api", "field", "value"), UNSUPPORTED)
def test_unsupported_fields_are_named(served: Served, api: str, field: str, value: object) -> None:
    path, body = PATHS[api]
    error = refused(served, path, {**body, field: value})
    assert field in error["message"]
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("response_format", "named"),
    [
        ({"type": "xml"}, "response_format.type"),
        ({"type": "json_schema"}, "response_format.json_schema"),
        (_schema({"type": "text"}), "response_format.json_schema.schema"),
        (_schema({"not": {"type": "string"}}), "response_format.json_schema.schema"),
        (_schema({"$ref": "#/nowhere"}), "response_format.json_schema.schema"),
        (_schema({"x-guidance": {"lenient": True}}), "response_format.json_schema.schema"),
        (_schema({"pattern": "(", "type": "string"}), "response_format.json_schema.schema"),
        (_schema({"const": "x" * 70000}), "response_format.json_schema.schema"),
        (_schema({"type": "object"}, name="a b"), "response_format.json_schema.name"),
        (_schema({"type": "object"}, more=1), "response_format.json_schema.more"),
    ],
)
def test_a_wrong_format_is_named(
    served: Served, response_format: dict[str, Any], named: str
) -> None:
    error = refused(served, PATHS["chat"][0], {**CHAT, "response_format": response_format})
    assert error["param"] == named
    assert named in error["message"]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({}, "structured_outputs"),
        ({"regex": "a", "choice": ["b"]}, "structured_outputs"),
        ({"regex": "("}, "structured_outputs.regex"),
        ({"regex": ""}, "structured_outputs.regex"),
        ({"choice": []}, "structured_outputs.choice"),
        ({"choice": [""]}, "structured_outputs.choice.0"),
        ({"json": "{"}, "structured_outputs.json"),
        ({"json": {"type": "text"}}, "structured_outputs.json"),
        ({"json_object": False}, "structured_outputs.json_object"),
        ({"grammar": "start: b"}, "structured_outputs.grammar"),
        ({"grammar": "nothing"}, "structured_outputs.grammar"),
        ({"grammar": '%llguidance {}\nstart: "a"'}, "structured_outputs.grammar"),
        ({"whitespace_pattern": " "}, "structured_outputs.whitespace_pattern"),
    ],
)
def test_wrong_structured_outputs_are_named(
    served: Served, given: dict[str, Any], named: str
) -> None:
    for api in ("chat", "completions"):
        path, body = PATHS[api]
        error = refused(served, path, {**body, "structured_outputs": given})
        assert error["param"] == named


def test_two_formats_at_once_are_refused(served: Served) -> None:
    both = {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}
    assert refused(served, PATHS["chat"][0], {**CHAT, **both})["param"] == "structured_outputs"
    for fields in both.items():
        body = {**CHAT, "tools": [TOOL], "tool_choice": "required", **dict([fields])}
        assert refused(served, PATHS["chat"][0], body)["param"] == "tool_choice"


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
        {"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]},
        {"role": "user", "content": 5},
        {"role": "assistant", "content": "x", "tool_calls": [{"id": "1", **TOOL}]},
        {"role": "user", "content": "x", "weight": 1},
        {"role": "robot", "content": "x"},
        {"content": "x"},
    ],
)
def test_bad_messages_say_which_one(served: Served, message: dict[str, Any]) -> None:
    body = {**CHAT, "messages": [{"role": "user", "content": "fine"}, message]}
    error = refused(served, PATHS["chat"][0], body)
    assert error["param"].startswith("messages.1")


WRONG = [
    ("temperature", -0.1), ("temperature", 2.1), ("temperature", "hot"), ("temperature", True),
    ("top_p", 0), ("top_p", 1.5), ("top_k", -2), ("top_k", 1.5), ("min_p", 2),
    ("presence_penalty", 3), ("frequency_penalty", -3), ("repetition_penalty", 0),
    ("n", 0), ("n", "two"), ("n", 10_000), ("max_tokens", -1), ("max_tokens", 2.5),
    ("min_tokens", -1), ("seed", "x"), ("seed", 2**70), ("stop", 5), ("stop", [""]),
    ("stop", ["x", 5]), ("stop_token_ids", ["a"]), ("stop_token_ids", [100_000]),
    ("stop_token_ids", [-1]), ("logit_bias", {"a": 1}), ("logit_bias", {"7": 101}),
    ("logit_bias", {"100000": 1}), ("logit_bias", {"7": 1, "07": 2}), ("logit_bias", []),
    ("stream", "yes"), ("stream", 1),
    ("stream_options", {"include_usage": True}), ("ignore_eos", 1), ("user", 7),
    ("priority", "high"), ("model", 7), ("model", None),
]  # fmt: skip


@pytest.mark.parametrize("api", list(PATHS))
@pytest.mark.parametrize(("field", "value"), WRONG)
def test_wrong_values_name_their_field(served: Served, api: str, field: str, value: object) -> None:
    path, body = PATHS[api]
    error = refused(served, path, {**body, field: value})
    assert field in (error["param"] or "") + error["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt", 5), ("prompt", []), ("prompt", [[]]), ("prompt", ["a", 5]), ("prompt", [1, "a"]),
        ("prompt", [1.5]), ("prompt", [-1]), ("prompt", [100_000]), ("prompt", None),
        ("logprobs", -1), ("logprobs", 1000), ("logprobs", True), ("echo", "yes"),
    ],
)  # fmt: skip
def test_wrong_completion_fields(served: Served, field: str, value: object) -> None:
    error = refused(served, PATHS["completions"][0], {**COMPLETION, field: value})
    assert field in (error["param"] or "")


@pytest.mark.parametrize("role", ["user", "system", "assistant", "tool"])
@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
        {"type": "file", "file": {"file_id": "x"}},
        {"type": "video_url", "video_url": {"url": "x"}},
        {"type": "input_image", "image_url": "x"},
    ],
)
def test_other_contents_than_text(served: Served, role: str, part: dict[str, Any]) -> None:
    content = [{"type": "text", "text": "what is this?"}, part]
    messages = [{"role": "user", "content": "fine"}, {"role": role, "content": content}]
    for path in (PATHS["chat"][0], "/tokenize"):
        error = refused(served, path, {"model": BYTE, "messages": messages})
        assert error["param"] == "messages.1.content.1.type"
        assert error["code"] == "unsupported_parameter"
        assert error["message"].startswith(
            f"messages.1.content.1.type: {part['type']!r} is not supported: the models here read "
            "text only"
        )


@pytest.mark.parametrize(
    ("api", "field", "reason"),
    [
        ("chat", "logits_processors", "no code of its clients"),
        ("completions", "logits_processors", "no code of its clients"),
        ("completions", "suffix", "fills in the middle"),
        ("chat", "audio", "write text only"),
    ],
)
def test_some_fields_say_why(served: Served, api: str, field: str, reason: str) -> None:
    path, body = PATHS[api]
    error = refused(served, path, {**body, field: ["x"]})
    assert (error["param"], error["code"]) == (field, "unsupported_parameter")
    assert reason in error["message"]


def test_wrong_chat_fields(served: Served) -> None:
    path = PATHS["chat"][0]
    for extra, field in (
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"logprobs": 5}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens"),
    ):
        error = refused(served, path, {**CHAT, **extra})
        assert field in (error["param"] or "") + error["message"]
    missing = {"model": BYTE}
    assert refused(served, path, missing)["param"] == "messages"
    assert refused(served, PATHS["completions"][0], missing)["param"] == "prompt"
    assert refused(served, path, {"messages": CHAT["messages"]})["param"] == "model"


@pytest.mark.parametrize(
    ("api", "more", "field"),
    [
        ("completions", {"n": 2, "best_of": 3}, "best_of"),
        ("completions", {"stream_options": {"include_usage": True}}, "stream_options"),
        ("chat", {"top_logprobs": 2}, "top_logprobs"),
        ("chat", {"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
    ],
)
def test_of_two_that_contradict_each_other_one_is_named(
    served: Served, api: str, more: dict[str, Any], field: str
) -> None:
    path, body = PATHS[api]
    error = refused(served, path, {**body, **more})
    assert error["param"] == field
    assert error["message"].startswith(f"{field}: ")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b"null",
        b'{"model": }',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"model": "\\ud800", "prompt": "x", "messages": []}',
    ],
)
def test_not_json(served: Served, body: bytes) -> None:
    for path, _ in PATHS.values():
        refused(served, path, body)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_none(served: Served, number: str) -> None:
    for path, fine in PATHS.values():
        for field in ("temperature", "top_p", "repetition_penalty", "presence_penalty"):
            body = json.dumps(fine)[:-1] + f', "{field}": {number}}}'
            assert field in str(refused(served, path, body.encode()))


def test_context_length(served: Served, byte: Tokenizer) -> None:
    count = len(byte.encode("hello").ids)
    body = {**COMPLETION, "max_tokens": 256 - count}
    assert served.http.post("/v1/completions", json=body).status_code == 200
    error = refused(served, "/v1/completions", {**body, "max_tokens": 257 - count})
    assert error["code"] == "context_length_exceeded"
    for number in (256, 257, count, 257 - count):
        assert str(number) in error["message"]
    long = {**CHAT, "messages": [{"role": "user", "content": "7 " * 300}]}
    assert refused(served, PATHS["chat"][0], long)["code"] == "context_length_exceeded"
    full = {**COMPLETION, "prompt": [9] * 256, "max_tokens": 1}
    assert refused(served, "/v1/completions", full)["code"] == "context_length_exceeded"


def test_slo_headers(served: Served) -> None:
    for value in ("fast", "-1", "0", "nan", "inf", "1e30"):
        answer = served.http.post(
            "/v1/completions", json=COMPLETION, headers={"x-slo-ttft-ms": value}
        )
        assert answer.status_code == 400
        assert "x-slo-ttft-ms" in answer.json()["error"]["message"]


def test_templates_may_refuse(served: Served) -> None:
    body = {**CHAT, "messages": [{"role": "developer", "content": "x"}]}
    error = served.http.post("/v1/chat/completions", json=body)
    assert error.status_code in (200, 400)
    if error.status_code == 400:
        assert "unknown role" in error.json()["error"]["message"]


def test_unknown_models_and_paths(served: Served) -> None:
    for path, body in PATHS.values():
        error = refused(served, path, {**body, "model": "org/none"}, 404)
        assert error["code"] == "model_not_found"
        assert "org/none" in error["message"]
    for method, path, status in (
        ("GET", "/v1/nothing", 404),
        ("GET", "/v1/completions", 405),
        ("PUT", "/v1/chat/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("GET", "/v1/models/org/none", 404),
    ):
        answer = served.http.request(method, path)
        assert answer.status_code == status
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_body_limit(served: Served) -> None:
    big = {**COMPLETION, "prompt": "x" * (9 << 20)}
    error = refused(served, "/v1/completions", big, 413)
    assert "8388608" in error["message"]

    def chunks() -> Any:
        for _ in range(9):
            yield b" " * (1 << 20)

    answer = served.http.post("/v1/completions", content=chunks())
    assert answer.status_code == 413


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (404, openai.NotFoundError),
        (429, openai.RateLimitError),
        (503, openai.InternalServerError),
        (400, openai.BadRequestError),
    ],
)
def test_what_the_gateway_refuses(
    served: Served, stream: bool, status: int, kind: type[openai.APIStatusError]
) -> None:
    refusal = Refused(status, "because of the test", retry_after_s=2.4)
    served.plays(lambda job: Play(refuse=refusal))
    with pytest.raises(kind) as caught:
        served.client.completions.create(stream=stream, **COMPLETION)
    assert "because of the test" in str(caught.value)
    assert int(caught.value.response.headers["retry-after"]) >= 2
    with pytest.raises(kind):
        served.client.chat.completions.create(n=3, stream=stream, **CHAT)


def test_a_model_that_fails(served: Served, byte: Tokenizer) -> None:
    served.says(byte.encode("one two three").ids[1:], fail_after=2)
    with pytest.raises(openai.InternalServerError, match="the weights are gone"):
        served.client.completions.create(**{**COMPLETION, "max_tokens": 50})
    stream = served.client.completions.create(stream=True, **{**COMPLETION, "max_tokens": 50})
    assert next(iter(stream)).choices[0].text, "what came before is not lost"
    with pytest.raises(openai.APIError, match="the weights are gone"):
        list(stream)
    served.says([50], fail_after=0)
    with pytest.raises(openai.APIError, match="the weights are gone"):
        list(served.client.completions.create(stream=True, **COMPLETION))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4)
    ),
    max_leaves=8,
)
FIELDS = st.sampled_from(
    [
        *sorted({field for field, _ in WRONG} | {field for _, field, _ in UNSUPPORTED}),
        "echo", "logprobs", "chat_template_kwargs", "response_format", "metadata",
    ]
)  # fmt: skip


@settings(
    max_examples=examples(300),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    api=st.sampled_from(list(PATHS)),
    changes=st.dictionaries(FIELDS, JSON, max_size=4),
    dropped=st.sets(st.sampled_from(["model", "prompt", "messages"]), max_size=1),
)
def test_no_body_breaks_the_server(
    served: Served, api: str, changes: dict[str, Any], dropped: set[str]
) -> None:
    path, fine = PATHS[api]
    body = {key: value for key, value in fine.items() if key not in dropped} | changes
    answer = served.http.post(path, content=json.dumps(body).encode())
    assert answer.status_code in (200, 400, 404), answer.text
    if answer.status_code != 200:
        assert answer.json()["error"]["message"]


@settings(
    max_examples=examples(100),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(body=st.binary(max_size=80) | JSON.map(lambda value: json.dumps(value).encode()))
def test_no_bytes_break_the_server(served: Served, body: bytes) -> None:
    for path, _ in PATHS.values():
        answer: httpx.Response = served.http.post(path, content=body)
        assert answer.status_code == 400, answer.text
