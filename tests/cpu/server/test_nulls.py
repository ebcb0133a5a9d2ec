"""What asks for nothing is not refused, and what is refused says what is allowed."""

from typing import Any

import pytest
from fake_gateway import Play
from served import BYTE, Served
from small_tokenizers import EOS
from tokenizers import Tokenizer

from c2cserve.runtime.gateway import Refused

CHAT: dict[str, Any] = {"model": BYTE, "messages": [{"role": "user", "content": "hello"}]}


def test_an_answer_can_be_sent_back(served: Served, byte: Tokenizer) -> None:
    served.says([*byte.encode("yes?").ids[1:], EOS])
    first = served.client.chat.completions.create(**CHAT)
    said = first.choices[0].message
    of_litellm = {**said.model_dump(), "provider_specific_fields": {"refusal": None}}
    for message in (said, said.model_dump(), of_litellm):
        served.client.chat.completions.create(
            model=BYTE,
            messages=[*CHAT["messages"], message, {"role": "user", "content": "and?"}],
        )
        text = byte.decode(list(served.job.tokens), skip_special_tokens=False)
        assert "<|im_start|>assistant\nyes?<|im_end|>\n" in text


@pytest.mark.parametrize("field", ["tools", "tool_choice", "functions", "audio", "prediction"])
def test_null_asks_for_nothing(served: Served, field: str) -> None:
    assert served.http.post("/v1/chat/completions", json={**CHAT, field: None}).status_code == 200


def test_developer_is_system(served: Served, byte: Tokenizer) -> None:
    messages = [{"role": "developer", "content": "be brief"}, *CHAT["messages"]]
    served.client.chat.completions.create(model=BYTE, messages=messages)
    text = byte.decode(list(served.job.tokens), skip_special_tokens=False)
    assert text.startswith("<|im_start|>system\nbe brief")


def test_refusals_say_what_is_allowed(served: Served) -> None:
    def message(path: str, body: dict[str, Any]) -> str:
        answer = served.http.post(path, json=body)
        assert answer.status_code == 400
        return answer.json()["error"]["message"]

    assert "list of strings" in message("/v1/completions", {"model": BYTE, "prompt": 5})
    assert "list of strings" in message("/v1/chat/completions", {**CHAT, "stop": 5})
    image = [{"type": "image_url", "image_url": {"url": "x"}}]
    said = message(
        "/v1/chat/completions", {**CHAT, "messages": [{"role": "user", "content": image}]}
    )
    assert "image_url" in said
    assert "'text'" in said


def test_headers_of_refusals(served: Served) -> None:
    served.plays(lambda job: Play(refuse=Refused(429, "full", retry_after_s=2.1)))
    answer = served.http.post("/v1/chat/completions", json=CHAT)
    assert answer.headers["retry-after"] == "3", "never sooner than asked for"
    assert served.http.get("/v1/completions").headers["allow"] == "POST"
