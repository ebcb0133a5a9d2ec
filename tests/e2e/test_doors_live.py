"""One server, one trained model, four APIs: each official client gets the same answer."""

from typing import Any

import anthropic
import ollama
import openai
import pytest
from server_process import ServerProcess

MODEL = "adder-qwen"
ASKED: Any = [{"role": "user", "content": "add: 12 + 34 ="}]
TOKENS = 24


@pytest.fixture(scope="module")
def expected(server: ServerProcess) -> str:
    """The answer of the chat endpoint, without its end."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as api:
        answer = api.chat.completions.create(
            model=MODEL, messages=ASKED, temperature=0, max_tokens=TOKENS
        )
    text = answer.choices[0].message.content
    assert text
    return text


def test_anthropic(server: ServerProcess, expected: str) -> None:
    # This client knows no temperature, since Anthropic's newest models take none.
    greedy = {"temperature": 0}
    asked: Any = {
        "model": MODEL, "messages": ASKED, "max_tokens": TOKENS, "extra_body": greedy
    }  # fmt: skip
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as api:
        answer = api.messages.create(**asked)
        assert "".join(getattr(block, "text", "") for block in answer.content) == expected
        with api.messages.stream(**asked) as stream:
            assert "".join(stream.text_stream) == expected
        counted = api.messages.count_tokens(model=MODEL, messages=ASKED).input_tokens
    usage = answer.usage
    assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_ollama(server: ServerProcess, expected: str) -> None:
    options: Any = {"temperature": 0, "num_predict": TOKENS}
    with ollama.Client(host=server.url) as api:
        answer = api.chat(model="add:latest", messages=ASKED, options=options)
        assert answer.message.content == expected
        lines = list(api.chat(model="add", messages=ASKED, options=options, stream=True))
        assert "".join(line.message.content or "" for line in lines) == expected
        assert (lines[-1].total_duration or 0) >= (lines[-1].eval_duration or 0)
        said = api.generate(model=MODEL, prompt=ASKED[0]["content"], options=options)
        assert said.response == expected
        raw = api.generate(
            model="sorter-llama", prompt="sort: dcba =>", raw=True, options=options
        ).response  # pyright: ignore
        assert raw == "abcd"
        assert {f"{MODEL}:latest", "add:latest"} <= {one.model for one in api.list().models}
        assert api.show(MODEL).capabilities == ["completion"]
        assert f"{MODEL}:latest" in {one.model for one in api.ps().models}


def test_responses(server: ServerProcess, expected: str) -> None:
    asked: Any = {"model": MODEL, "input": ASKED, "max_output_tokens": TOKENS, "temperature": 0}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as api:
        answer = api.responses.create(**asked)
        assert answer.output_text == expected
        with api.responses.stream(**asked) as stream:
            stream.until_done()
            assert stream.get_final_response().output_text == expected
