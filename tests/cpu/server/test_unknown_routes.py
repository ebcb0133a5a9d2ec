"""A path or method that the server does not have is named in the answer and in the log."""

import logging

import anthropic
import openai
import pytest
from served import BYTE, Served

MESSAGES = [{"role": "user", "content": "a"}]


@pytest.mark.parametrize(
    ("method", "path", "meant"),
    [
        ("POST", "/chat/completions", "/v1/chat/completions"),
        ("POST", "/v1/v1/messages", "/v1/messages"),
        ("POST", "/v1/api/chat", "/api/chat"),
        ("POST", "/v1/completions/", "/v1/completions"),
        ("GET", "//v1/models", "/v1/models"),
        ("GET", "/v1/models/", "/v1/models"),
        ("GET", "/models", "/v1/models"),
        ("GET", "/metrics/", "/metrics"),
        ("GET", "/proxied/health", "/health"),
    ],
)
def test_a_path_that_is_almost_right_is_answered_with_the_right_one(
    served: Served, method: str, path: str, meant: str
) -> None:
    answer = served.http.request(method, f"{served.url}{path}", json={})
    assert answer.status_code == 404
    assert f"there is no {method} {path} here; did you mean {meant}?" in answer.text


@pytest.mark.parametrize("path", ["/v1", "/v1/", "/v1/embeddings", "/favicon.ico", "/%00%0A"])
def test_other_paths_are_named(served: Served, path: str) -> None:
    error = served.http.get(path).json()["error"]
    assert error["code"] == "unknown_url"
    assert error["message"] == f"there is no GET {path} here; /docs lists what there is"


def test_a_long_path_is_cut(served: Served) -> None:
    answer = served.http.get("/" + 5000 * "x")
    assert answer.status_code == 404
    assert len(answer.text) < 500


def test_the_methods_of_a_path_are_named(served: Served) -> None:
    answer = served.http.get("/v1/completions")
    assert answer.status_code == 405
    message = answer.json()["error"]["message"]
    assert message == "GET /v1/completions: this path takes POST"
    assert answer.headers["allow"] == "POST"


@pytest.mark.parametrize(
    ("method", "path", "takes"),
    [
        ("PUT", "/admin/models", "GET, HEAD, POST"),
        ("PATCH", "/admin/models/a/b", "DELETE, GET, HEAD"),
        ("OPTIONS", "/admin/models", "GET, HEAD, POST"),
    ],
)
def test_all_methods_of_a_path_are_named(
    served: Served, method: str, path: str, takes: str
) -> None:
    """Each method of a path is a route of its own; the answer named those of the first."""
    answer = served.http.request(method, f"{served.url}{path}")
    assert answer.status_code == 405
    assert answer.json()["error"]["message"] == f"{method} {path}: this path takes {takes}"
    assert answer.headers["allow"] == takes


def test_clients_with_a_wrong_address_say_what_is_wrong(served: Served) -> None:
    without = openai.OpenAI(base_url=served.url, api_key="none", max_retries=0)
    with pytest.raises(openai.NotFoundError, match="did you mean /v1/chat/completions"):
        without.chat.completions.create(model=BYTE, messages=MESSAGES)  # pyright: ignore[reportCallIssue, reportArgumentType]
    twice = anthropic.Anthropic(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
    with pytest.raises(anthropic.NotFoundError, match="did you mean /v1/messages"):
        twice.messages.create(model=BYTE, max_tokens=1, messages=MESSAGES)  # pyright: ignore[reportArgumentType]


def test_the_log_names_the_path(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "c2cserve.server"):
        served.http.post("/v1/embeddings", json={"model": BYTE, "input": "a"})
    assert any("no POST /v1/embeddings here" in record.message for record in caplog.records)
