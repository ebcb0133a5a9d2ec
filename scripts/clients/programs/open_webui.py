"""The requests that Open WebUI sends to servers with OpenAI's API and to Ollama's, without its
page: lists of models at the start, then chats with titles and tags beside them."""

import json
import urllib.error
import urllib.request
from typing import Any

from checks import (
    ANSWER,
    CALLER,
    KEY,
    MESSAGES,
    MODEL,
    TOOL,
    URL,
    feature,
    same,
)  # fmt: skip

_WHO = {
    "X-OpenWebUI-User-Name": "me", "X-OpenWebUI-User-Id": "1",
    "X-OpenWebUI-User-Email": "me@example.com", "X-OpenWebUI-User-Role": "user",
}  # fmt: skip


def ask(path: str, body: dict[str, Any] | None = None) -> str:
    """Return the text of an answer. Raises HTTPError for statuses of errors."""
    data = None if body is None else json.dumps(body).encode()
    fields = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json", **_WHO}
    with urllib.request.urlopen(
        urllib.request.Request(URL + path, data, fields), timeout=60
    ) as answer:
        return answer.read().decode()


def models() -> None:
    assert MODEL in {one["id"] for one in json.loads(ask("/v1/models"))["data"]}
    assert json.loads(ask("/api/version"))["version"]
    for one in json.loads(ask("/api/tags"))["models"]:
        assert one["model"] and one["digest"] and one["details"] is not None, one
    json.loads(ask("/api/ps"))


def chat() -> None:
    """A title and tags, asked for beside the chat."""
    for limit in ("max_tokens", "max_completion_tokens"):
        body = {"model": MODEL, "messages": MESSAGES, "stream": False, limit: 24, "temperature": 0}
        answer = json.loads(ask("/v1/chat/completions", body))
        same(answer["choices"][0]["message"]["content"], ANSWER)


def stream() -> None:
    body: dict[str, Any] = {
        "model": MODEL, "messages": MESSAGES, "stream": True, "temperature": 0,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    lines = [one for one in ask("/v1/chat/completions", body).splitlines() if one]
    same(lines[-1], "data: [DONE]")
    chunks = [json.loads(one.removeprefix("data: ")) for one in lines[:-1]]
    texts = [one["choices"][0]["delta"].get("content") or "" for one in chunks if one["choices"]]
    same("".join(texts), ANSWER)
    assert chunks[-1]["usage"]["total_tokens"]
    body = {
        "model": f"{MODEL}:latest", "messages": MESSAGES, "stream": True, "keep_alive": "5m",
        "options": {"temperature": 0, "num_predict": 24, "num_ctx": 512},
    }  # fmt: skip
    parts = [json.loads(one) for one in ask("/api/chat", body).splitlines()]
    same("".join(one["message"]["content"] for one in parts), ANSWER)
    assert parts[-1]["done"] and parts[-1]["eval_count"]


def tools() -> None:
    body = {
        "model": CALLER, "messages": MESSAGES, "tools": [TOOL], "stream": False, "max_tokens": 300,
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
    }  # fmt: skip
    message = json.loads(ask("/v1/chat/completions", body))["choices"][0]["message"]
    same(message["tool_calls"][0]["function"]["name"], "weather")


def errors() -> None:
    for path in ("/v1/chat/completions", "/api/chat"):
        try:
            ask(path, {"model": "adder-qwem", "messages": MESSAGES})
        except urllib.error.HTTPError as error:
            same(error.code, 404)
            assert MODEL in error.read().decode()
        else:
            raise AssertionError("no error")


for check in (models, chat, stream, tools, errors):
    feature(check.__name__, check)
