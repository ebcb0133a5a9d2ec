"""LiteLLM's SDK, in front of the APIs of OpenAI, Anthropic and Ollama."""

import json
from typing import Any

import litellm
from checks import (
    ANSWER,
    CALLER,
    KEY,
    MESSAGES,
    MODEL,
    PERSON,
    QUESTION,
    TOOL,
    URL,
    check_city,
    check_person,
    feature,
    same,
)  # fmt: skip

OPENAI: dict[str, Any] = {"api_base": f"{URL}/v1", "api_key": KEY}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON}}


def chat() -> None:
    for model, where in (
        (f"openai/{MODEL}", OPENAI),
        (f"hosted_vllm/{MODEL}", OPENAI),
        (f"anthropic/{MODEL}", {"api_base": URL, "api_key": KEY}),
        (f"ollama_chat/{MODEL}", {"api_base": URL, "api_key": KEY}),
    ):
        answer: Any = litellm.completion(
            model=model, messages=MESSAGES, temperature=0, max_tokens=24, **where
        )
        same((model, answer.choices[0].message.content), (model, ANSWER))


def stream() -> None:
    for model, where in ((f"openai/{MODEL}", OPENAI), (f"hosted_vllm/{MODEL}", OPENAI)):
        chunks: Any = list(
            litellm.completion(
                model=model, messages=MESSAGES, temperature=0, stream=True, max_tokens=24,
                stream_options={"include_usage": True}, **where,
            )
        )  # fmt: skip
        same("".join(c.choices[0].delta.content or "" for c in chunks if c.choices), ANSWER)
        assert any(getattr(c, "usage", None) for c in chunks)


def text() -> None:
    answer: Any = litellm.text_completion(
        model="text-completion-openai/sorter-llama", prompt="sort: dcba =>", temperature=0,
        max_tokens=8, **OPENAI,
    )  # fmt: skip
    same(answer.choices[0].text.strip(), "abcd")


def tools() -> None:
    asked: list[Any] = [{"role": "user", "content": "How is the weather?"}]
    common: dict[str, Any] = {
        "model": f"openai/{CALLER}", "tools": [TOOL], "max_tokens": 300,
        "parallel_tool_calls": False, **OPENAI,
    }  # fmt: skip
    answer: Any = litellm.completion(messages=asked, tool_choice="required", **common)
    message = answer.choices[0].message
    for call in message.tool_calls:
        check_city(call.function.arguments)
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in message.tool_calls
    ]
    litellm.completion(messages=[*asked, message, *results], **common)


def structured() -> None:
    answer: Any = litellm.completion(
        model="openai/chat", messages=MESSAGES, response_format=FORMAT, max_tokens=400, **OPENAI
    )
    check_person(json.loads(answer.choices[0].message.content))


def responses() -> None:
    answer: Any = litellm.responses(
        model=f"openai/{MODEL}", input=QUESTION, temperature=0, **OPENAI
    )
    same(answer.output_text, ANSWER)


def errors() -> None:
    try:
        litellm.completion(model="openai/adder-qwem", messages=MESSAGES, max_retries=0, **OPENAI)
    except litellm.exceptions.NotFoundError as error:
        assert MODEL in str(error), error
    else:
        raise AssertionError("no error")


for check in (chat, stream, text, tools, structured, responses, errors):
    feature(check.__name__, check)
