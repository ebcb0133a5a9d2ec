"""Anthropic's client."""

import json
from typing import Any

import anthropic
from checks import (
    ANSWER,
    CALLER,
    KEY,
    MESSAGES,
    MODEL,
    PERSON,
    URL,
    WEATHER,
    check_city,
    check_person,
    feature,
    same,
)  # fmt: skip

api = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0)
GREEDY: Any = {"extra_body": {"temperature": 0}}
TOOLS: Any = [{"name": "weather", "input_schema": WEATHER}]


def models() -> None:
    assert MODEL in {one.id for one in api.models.list()}


def chat() -> None:
    answer = api.messages.create(model=MODEL, messages=MESSAGES, max_tokens=24, **GREEDY)
    same("".join(getattr(block, "text", "") for block in answer.content), ANSWER)


def stream() -> None:
    with api.messages.stream(model=MODEL, messages=MESSAGES, max_tokens=24, **GREEDY) as events:
        same("".join(events.text_stream), ANSWER)
        assert events.get_final_message().usage.output_tokens


def tools() -> None:
    asked: list[Any] = [{"role": "user", "content": "How is the weather?"}]
    common: Any = {"model": CALLER, "tools": TOOLS, "max_tokens": 300, "extra_body": {"seed": 1}}
    answer = api.messages.create(messages=asked, tool_choice={"type": "any"}, **common)
    call: Any = next(block for block in answer.content if block.type == "tool_use")
    check_city(call.input)
    with api.messages.stream(messages=asked, tool_choice={"type": "any"}, **common) as events:
        streamed: Any = events.get_final_message().content[-1]
    same(streamed.type, "tool_use")
    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    asked += [
        {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}
    ]  # fmt: skip
    assert api.messages.create(messages=asked, **common).content is not None


def structured() -> None:
    answer = api.messages.create(
        model="chat", messages=MESSAGES, max_tokens=400,
        output_config={"format": {"type": "json_schema", "schema": PERSON}},
    )  # fmt: skip
    check_person(json.loads("".join(getattr(block, "text", "") for block in answer.content)))


def tokens() -> None:
    assert api.messages.count_tokens(model=MODEL, messages=MESSAGES).input_tokens > 7


def errors() -> None:
    try:
        api.messages.create(model="adder-qwem", messages=MESSAGES, max_tokens=9)
    except anthropic.NotFoundError as error:
        assert MODEL in str(error), error
    else:
        raise AssertionError("no error")


for check in (models, chat, stream, tools, structured, tokens, errors):
    feature(check.__name__, check)
