"""Ollama's client."""

import json
from typing import Any

import ollama
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

api = ollama.Client(host=URL, headers={"authorization": f"Bearer {KEY}"})
GREEDY: Any = {"temperature": 0, "num_predict": 24}


def models() -> None:
    assert f"{MODEL}:latest" in {one.model for one in api.list().models}
    assert api.show(MODEL).capabilities
    api.ps()


def chat() -> None:
    answer = api.chat(model=MODEL, messages=MESSAGES, options=GREEDY, keep_alive="5m")
    same(answer.message.content, ANSWER)


def stream() -> None:
    lines = list(api.chat(model=MODEL, messages=MESSAGES, options=GREEDY, stream=True))
    same("".join(line.message.content or "" for line in lines), ANSWER)
    assert lines[-1].eval_count


def text() -> None:
    same(api.generate(model=MODEL, prompt=QUESTION, options=GREEDY).response, ANSWER)


def tools() -> None:
    """The template of this model has tools; the model calls none by itself."""
    asked = [{"role": "user", "content": "How is the weather?"}]
    assert "tools" in (api.show(CALLER).capabilities or ())
    assert api.chat(model=CALLER, messages=asked, tools=[TOOL], options=GREEDY).message
    call = {"function": {"name": "weather", "arguments": {"city": "Paris"}}}
    check_city(call["function"]["arguments"])
    result = {"role": "tool", "tool_name": "weather", "content": "sunny"}
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    assert api.chat(model=CALLER, messages=[*asked, turn, result], options=GREEDY).message


def structured() -> None:
    answer = api.chat(model="chat", messages=MESSAGES, format=PERSON, options={"seed": 3})
    check_person(json.loads(answer.message.content or ""))


def errors() -> None:
    try:
        api.chat(model="adder-qwem", messages=MESSAGES)
    except ollama.ResponseError as error:
        same(error.status_code, 404)
        assert MODEL in str(error), error
    else:
        raise AssertionError("no error")


for check in (models, chat, stream, text, tools, structured, errors):
    feature(check.__name__, check)
