"""/tokenize and /detokenize, in the shapes of vLLM."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from served import BYTE, PIECE, Served, make_gateway
from tokenizers import Tokenizer

from c2cserve.server.access.gate import Gate
from c2cserve.server.settings import RequestLimits, ServerSettings

TEXT = "the answer is 42: 你好"
CHAT = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def limited(byte_dir: Path, piece_dir: Path) -> Iterator[Served]:
    limits = RequestLimits(messages=2, prompt_chars=50, prompt_tokens=20)
    settings = ServerSettings(api_keys=("k",), requests=limits)
    gate = Gate(settings.api_keys)
    with Served(make_gateway(byte_dir, piece_dir), settings, gate) as served:
        yield served


def tokenize(served: Served, model: str = BYTE, **fields: Any) -> dict[str, Any]:
    answer = served.http.post("/tokenize", json={"model": model, **fields})
    assert answer.status_code == 200, answer.text
    assert set(answer.json()) == {"count", "max_model_len", "tokens", "token_strs"}
    return answer.json()


def test_a_prompt(served: Served, byte: Tokenizer) -> None:
    expected = byte.encode(TEXT)
    found = tokenize(served, prompt=TEXT)
    assert found["tokens"] == expected.ids
    assert found["count"] == len(expected.ids)
    assert found["max_model_len"] == 256
    assert found["token_strs"] is None
    assert tokenize(served, "nick", prompt=TEXT, return_token_strs=True)["token_strs"] == (
        expected.tokens
    )
    bare = tokenize(served, prompt=TEXT, add_special_tokens=False)
    assert bare["tokens"] == byte.encode(TEXT, add_special_tokens=False).ids
    assert tokenize(served, prompt="", add_special_tokens=False)["tokens"] == []


def test_a_chat_has_the_tokens_that_a_request_would_have(served: Served, byte: Tokenizer) -> None:
    served.client.chat.completions.create(model=BYTE, messages=CHAT)  # pyright: ignore
    assert tokenize(served, messages=CHAT)["tokens"] == list(served.job.tokens)
    bare = tokenize(served, messages=CHAT, add_generation_prompt=False)["tokens"]
    text = byte.decode(bare, skip_special_tokens=False)
    assert text == "<|im_start|>user\nhello<|im_end|>\n"
    special = tokenize(served, messages=CHAT, add_special_tokens=True)["tokens"]
    assert byte.id_to_token(special[0]) == "<|bos|>"


def test_a_text_may_be_longer_than_the_context(served: Served) -> None:
    assert tokenize(served, prompt="7 " * 300)["count"] > 256


@pytest.mark.parametrize("model", [BYTE, PIECE])
def test_back_to_text(served: Served, model: str) -> None:
    tokens = tokenize(served, model, prompt=TEXT, add_special_tokens=False)["tokens"]
    answer = served.http.post("/detokenize", json={"model": model, "tokens": tokens})
    assert answer.json() == {"prompt": TEXT}


def test_special_tokens_are_shown(served: Served, byte: Tokenizer) -> None:
    tokens = byte.encode("hello").ids
    answer = served.http.post("/detokenize", json={"model": BYTE, "tokens": tokens})
    assert answer.json() == {"prompt": "<|bos|>hello"}
    answer = served.http.post("/detokenize", json={"model": BYTE, "tokens": []})
    assert answer.json() == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/tokenize", {"model": BYTE}, "prompt or messages"),
        ("/tokenize", {"model": BYTE, "prompt": None}, "messages"),
        ("/tokenize", {"model": BYTE, "prompt": "x", "messages": CHAT}, "messages"),
        ("/tokenize", {"model": BYTE, "prompt": 5}, "prompt"),
        ("/tokenize", {"model": BYTE, "prompt": "x", "temperature": 1}, "temperature"),
        ("/tokenize", {"prompt": "x"}, "model"),
        ("/tokenize", {"model": BYTE, "messages": [{"role": "robot", "content": "x"}]}, "role"),
        ("/tokenize", {"model": BYTE, "messages": [{"role": "tool", "content": "x"}]}, "unknown"),
        ("/detokenize", {"model": BYTE, "tokens": "x"}, "tokens"),
        ("/detokenize", {"model": BYTE, "tokens": [400]}, "400"),
        ("/detokenize", {"model": BYTE, "tokens": [-1]}, "tokens"),
        ("/detokenize", {"model": BYTE}, "tokens"),
    ],
)
def test_wrong_requests(served: Served, path: str, body: dict[str, Any], named: str) -> None:
    answer = served.http.post(path, json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert named in (error["param"] or "") + error["message"]


def test_unknown_and_broken_models(served: Served, tmp_path: Path) -> None:
    files = replace(served.gateway.files[BYTE], id="broken", path=str(tmp_path))
    served.gateway.files["broken"] = files
    for path, more in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [1]})):
        answer = served.http.post(path, json={"model": "byte", **more})
        assert answer.status_code == 404
        assert f"did you mean {BYTE!r}" in answer.text
        assert served.http.post(path, json={"model": "broken", **more}).status_code == 503
    assert served.gateway.jobs == []


def test_limits_and_keys(limited: Served) -> None:
    def post(path: str, **body: Any) -> httpx.Response:
        headers = {"authorization": "Bearer k"}
        return limited.http.post(path, json={"model": BYTE, **body}, headers=headers)

    for path, body, field in (
        ("/tokenize", {"prompt": "x" * 51}, "prompt"),
        ("/tokenize", {"messages": CHAT * 3}, "messages"),
        ("/tokenize", {"messages": [{"role": "user", "content": "x" * 49}]}, "messages"),
        ("/detokenize", {"tokens": [50] * 21}, "tokens"),
    ):
        answer = post(path, **body)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == field
    assert post("/tokenize", prompt="x").status_code == 200
    for path in ("/tokenize", "/detokenize"):
        assert limited.http.post(path, json={"model": BYTE}).status_code == 401
