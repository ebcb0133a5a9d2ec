"""OpenAI's client for Python."""

from typing import Any, Literal

import openai
from checks import (
    ANSWER,
    CALLER,
    KEY,
    MESSAGES,
    MODEL,
    QUESTION,
    TOOL,
    URL,
    check_city,
    feature,
    same,
)  # fmt: skip
from pydantic import BaseModel, Field

api = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)


class Person(BaseModel):
    name: str = Field(max_length=8)
    age: int = Field(ge=0, le=120)
    color: Literal["red", "blue"]


def models() -> None:
    assert MODEL in {one.id for one in api.models.list()}
    same(api.models.retrieve(MODEL).id, MODEL)


def chat() -> None:
    answer = api.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0)
    same(answer.choices[0].message.content, ANSWER)
    assert answer.usage and answer.usage.completion_tokens


def stream() -> None:
    chunks = list(
        api.chat.completions.create(
            model=MODEL, messages=MESSAGES, temperature=0, stream=True,
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    same("".join(c.choices[0].delta.content or "" for c in chunks if c.choices), ANSWER)
    assert chunks[-1].usage and chunks[-1].usage.prompt_tokens


def text() -> None:
    answer = api.completions.create(
        model="sorter-llama", prompt="sort: dcba =>", temperature=0, max_tokens=8, logprobs=2
    )
    same(answer.choices[0].text.strip(), "abcd")
    assert answer.choices[0].logprobs and answer.choices[0].logprobs.top_logprobs


def tools() -> None:
    asked: list[Any] = [{"role": "user", "content": "How is the weather?"}]
    common: dict[str, Any] = {"model": CALLER, "tools": [TOOL], "max_tokens": 300, "seed": 1}
    message = (
        api.chat.completions.create(
            messages=asked, tool_choice="required", parallel_tool_calls=False, **common
        )
        .choices[0]
        .message
    )
    (call,) = message.tool_calls or ()
    check_city(call.function.arguments)
    with api.chat.completions.stream(
        messages=asked, tool_choice="required", parallel_tool_calls=False, **common
    ) as events:
        for _ in events:
            pass
        final = events.get_final_completion().choices[0].message
    same(final.tool_calls[0].function.arguments, call.function.arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    asked += [message.model_dump(exclude_none=True), result]
    assert api.chat.completions.create(messages=asked, **common).choices[0].message


def structured() -> None:
    parsed = api.chat.completions.parse(
        model="chat", messages=MESSAGES, response_format=Person, max_tokens=400, seed=3
    )
    assert parsed.choices[0].message.parsed
    answer = api.responses.parse(
        model="chat", input=QUESTION, text_format=Person, max_output_tokens=400
    )
    assert answer.output_parsed


def responses() -> None:
    answer = api.responses.create(model=MODEL, input=QUESTION, temperature=0)
    same(answer.output_text, ANSWER)
    with api.responses.stream(model=MODEL, input=QUESTION, temperature=0) as events:
        events.until_done()
        same(events.get_final_response().output_text, ANSWER)


def errors() -> None:
    try:
        api.chat.completions.create(model="adder-qwem", messages=MESSAGES)
    except openai.NotFoundError as error:
        assert MODEL in str(error), error
    try:
        api.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=9)
    except openai.BadRequestError as error:
        same(error.param, "temperature")
    else:
        raise AssertionError("no error")


for check in (models, chat, stream, text, tools, structured, responses, errors):
    feature(check.__name__, check)
