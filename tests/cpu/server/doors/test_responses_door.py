"""/v1/responses as OpenAI's official client sees it, over a real socket."""

import json
from typing import Any

import openai
import pytest
from door_clients import CALL, CALLER, SCHEMA, prompt, says
from fake_gateway import Play
from pydantic import BaseModel
from served import BYTE, Served
from tokenizers import Tokenizer

from c2cserve.runtime.gateway import Refused

TOOL: Any = {"type": "function", "name": "weather", "parameters": SCHEMA}
USER: Any = {"role": "user", "content": "how is it?"}


def ask(served: Served, **fields: Any) -> Any:
    """The response, checked to be the same streamed, event by event."""
    fields = {"model": CALLER, "input": "hello", **fields}
    whole = served.client.responses.create(**fields)
    events: list[Any] = list(served.client.responses.create(stream=True, **fields))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [one.type for one in events[:2]] == ["response.created", "response.in_progress"]
    last = events[-1].response
    assert events[-1].type == f"response.{last.status}"
    done = [one.item for one in events if one.type == "response.output_item.done"]
    assert done == last.output
    added = [one.item for one in events if one.type == "response.output_item.added"]
    assert [one.id for one in added] == [one.id for one in done]
    for number, item in enumerate(done):
        own = [one for one in events if getattr(one, "output_index", None) == number]
        deltas = "".join(one.delta for one in own if one.type.endswith(".delta"))
        assert deltas == (item.arguments if item.type == "function_call" else item.content[0].text)
    assert plain(last) == plain(whole)
    return whole


def plain(response: Any) -> Any:
    """The response without what tells it from another one."""
    shown = response.model_dump()
    for item in shown["output"]:
        item.pop("id")
        item.pop("call_id", None)
    return {key: one for key, one in shown.items() if key not in ("id", "created_at")}


def test_a_response(served: Served, byte: Tokenizer) -> None:
    count = says(served, byte, "hello world", cached_tokens=3)
    response = ask(served, model=BYTE, instructions="be brief", metadata={"a": "b"})
    assert (response.status, response.output_text) == ("completed", "hello world")
    (message,) = response.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
    assert response.instructions == "be brief"
    assert response.metadata == {"a": "b"}
    usage = response.usage
    assert (usage.input_tokens, usage.output_tokens) == (len(served.job.tokens), count)
    assert usage.total_tokens == usage.input_tokens + count
    assert usage.input_tokens_details.cached_tokens == 3
    assert prompt(served, byte).startswith("<|im_start|>system\nbe brief<|im_end|>")


def test_events_are_named(served: Served, byte: Tokenizer) -> None:
    says(served, byte, "hello", per_delta=9)
    answer = served.http.post(
        "/v1/responses", json={"model": BYTE, "input": "hello", "stream": True}
    )
    lines = answer.text.splitlines()
    kinds = [line[7:] for line in lines if line.startswith("event: ")]
    assert kinds == [json.loads(line[6:])["type"] for line in lines if line.startswith("data: ")]
    assert kinds == [
        "response.created", "response.in_progress", "response.output_item.added",
        "response.content_part.added", "response.output_text.delta", "response.output_text.done",
        "response.content_part.done", "response.output_item.done", "response.completed",
    ]  # fmt: skip


def test_sampling_reaches_the_engine(served: Served, byte: Tokenizer) -> None:
    says(served, byte, "hello world")
    more = {"seed": 5, "priority": 2}
    response = ask(
        served, model=BYTE, temperature=0.5, top_p=0.9, max_output_tokens=2, store=True,
        service_tier="auto", extra_body=more,
    )  # fmt: skip
    assert (response.temperature, response.top_p, response.max_output_tokens) == (0.5, 0.9, 2)
    assert (response.status, response.incomplete_details.reason) == (
        "incomplete", "max_output_tokens"
    )  # fmt: skip
    assert response.output[0].status == "incomplete"
    assert (response.service_tier, response.to_dict()["store"]) == ("default", False)
    job = served.job
    assert (job.sampling.seed, job.request.priority, job.request.max_new_tokens) == (5, 2, 2)


def test_items_become_a_chat(caller: Served, byte: Tokenizer) -> None:
    says(caller, byte, f"<think>hm</think>\nI look. {CALL}")
    response = ask(caller, input=[USER], tools=[TOOL], reasoning={"effort": "low"})
    thought, text, call = response.output
    assert (thought.type, thought.content[0].text) == ("reasoning", "hm")
    assert (text.type, text.content[0].text) == ("message", "I look. ")
    assert (call.type, call.name) == ("function_call", "weather")
    assert json.loads(call.arguments) == {"city": "Köln"}
    assert 0 < response.usage.output_tokens_details.reasoning_tokens < response.usage.output_tokens
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    says(caller, byte, "it rains")
    for items in (response.output, [one.model_dump(by_alias=True) for one in response.output]):
        ask(caller, input=[USER, *items, result], tools=[TOOL], tool_choice="auto")
        assert (
            f"<user>how is it?<assistant>(hm)I look. [weather:Köln]<tool>rain#{call.call_id}"
        ) in prompt(caller, byte)
    parts = [{"type": "input_text", "text": "one"}, {"type": "input_text", "text": "two"}]
    ask(caller, input=[{"type": "message", "role": "developer", "content": parts}, USER])
    assert "<system>one\ntwo<user>how is it?" in prompt(caller, byte)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
def test_forced_calls(caller: Served, byte: Tokenizer, choice: Any) -> None:
    says(caller, byte, CALL)
    asked: Any = {"model": CALLER, "input": "x", "tools": [TOOL], "tool_choice": choice}
    whole = caller.client.responses.create(**asked)
    with caller.client.responses.stream(**asked) as stream:
        stream.until_done()
        streamed = stream.get_final_response()
    for answer in (whole, streamed):
        assert answer.status == "completed"
        (item,) = answer.output
        assert item.type == "function_call"
        assert (item.name, json.loads(item.arguments)) == ("weather", {"city": "Köln"})
    assert caller.job.sampling.grammar is not None


class City(BaseModel):
    city: str


def test_a_parsed_form(served: Served, byte: Tokenizer) -> None:
    says(served, byte, '{"city": "Köln"}')
    answer = served.client.responses.parse(model=BYTE, input="x", text_format=City)
    assert answer.output_parsed == City(city="Köln")
    assert served.job.sampling.grammar is not None
    wrong = {"format": {"type": "json_schema", "name": "x", "schema": {"type": "text"}}}
    refused = served.http.post("/v1/responses", json={"model": BYTE, "input": "x", "text": wrong})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "text.format.schema"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
def test_forced_calls_are_as_those_of_chats(caller: Served, byte: Tokenizer, choice: Any) -> None:
    says(caller, byte, CALL)
    body = {"model": CALLER, "tools": [TOOL], "tool_choice": choice, "input": "x"}
    answer = caller.http.post("/v1/responses", json=body)
    function = {"name": "weather", "parameters": SCHEMA}
    chat = {
        "model": CALLER, "messages": [USER], "tools": [{"type": "function", "function": function}],
        "tool_choice": choice if isinstance(choice, str) else
        {"type": "function", "function": {"name": "weather"}},
    }  # fmt: skip
    same = caller.http.post("/v1/chat/completions", json=chat)
    assert answer.status_code == same.status_code
    if answer.status_code == 400:
        assert answer.json()["error"]["param"] == "tool_choice"


@pytest.mark.parametrize(
    "form",
    [{"type": "json_object"}, {"type": "json_schema", "name": "x", "schema": {"type": "object"}}],
)
def test_a_form_is_as_that_of_chats(served: Served, byte: Tokenizer, form: dict[str, Any]) -> None:
    says(served, byte, "{}")
    body = {"model": BYTE, "text": {"format": form}, "input": "x"}
    answer = served.http.post("/v1/responses", json=body)
    schema = {key: one for key, one in form.items() if key != "type"}
    asked = {"type": form["type"], **({"json_schema": schema} if schema else {})}
    chat = {"model": BYTE, "messages": [USER], "response_format": asked}
    assert answer.status_code == served.http.post("/v1/chat/completions", json=chat).status_code
    if answer.status_code == 400:
        assert answer.json()["error"]["param"].startswith("text")


IMAGE = {"type": "input_image", "image_url": "https://x/y.png"}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"made_up": 1}, "made_up"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{**USER, "content": [IMAGE]}]}, "input.0.content.0.type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0.type"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input.0.role"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tools": [{**TOOL, "name": "a b"}]}, "tools.0.name"),
        ({"max_output_tokens": 5000}, "input"),
        ({"include": ["message.output_text.logprobs"]}, "include.0"),
        (
            {"input": [
                {"type": "function_call", "call_id": "1", "name": "weather", "arguments": "[]"}
            ]},
            "input",
        ),
    ],
)  # fmt: skip
def test_wrong_fields_are_named(caller: Served, change: dict[str, Any], param: str) -> None:
    answer = caller.http.post("/v1/responses", json={"model": CALLER, "input": "x", **change})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param, answer.text


def test_failures(served: Served, byte: Tokenizer) -> None:
    create = served.client.responses.create
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        create(model="none", input="x")
    served.plays(lambda job: Play(refuse=Refused(429, "too much to do", 7.2)))
    for stream in (False, True):
        with pytest.raises(openai.RateLimitError, match="too much to do") as refused:
            create(model=BYTE, input="x", stream=stream)
        assert refused.value.response.headers["retry-after"] == "8"
    says(served, byte, "hello world", fail_after=2)
    *_, last = create(model=BYTE, input="x", stream=True)
    assert last.type == "response.failed"
    assert last.response.status == "failed"
    assert last.response.error is not None
    assert "the weights are gone" in last.response.error.message
