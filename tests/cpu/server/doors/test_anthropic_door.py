"""/v1/messages as Anthropic's official client sees it, over a real socket."""

from typing import Any

import anthropic
import pytest
from door_clients import CALL, CALLER, SCHEMA, anthropic_client, prompt, says
from fake_gateway import Play
from served import BYTE, Served
from tokenizers import Tokenizer

from c2cserve.runtime.gateway import Refused

TOOL: Any = {"name": "weather", "description": "Tell the weather", "input_schema": SCHEMA}
HELLO: Any = [{"role": "user", "content": "hello"}]


def ask(served: Served, **fields: Any) -> Any:
    """The message, checked to be the same streamed."""
    fields = {"model": CALLER, "max_tokens": 500, "messages": HELLO, **fields}
    with anthropic_client(served) as client:
        whole = client.messages.create(**fields)
        with client.messages.stream(**fields) as stream:
            streamed = stream.get_final_message()

    def plain(message: Any) -> Any:
        shown = message.model_dump(exclude_none=True)
        for block in shown["content"]:
            block.pop("parsed_output", None)
            if block["type"] == "tool_use":
                block.pop("id")
        return {key: one for key, one in shown.items() if key != "id"}

    assert plain(whole) == plain(streamed)
    return whole


def test_a_message(served: Served, byte: Tokenizer) -> None:
    count = says(served, byte, "hello world", cached_tokens=3)
    message = ask(served, model=BYTE, system="be brief", max_tokens=99)
    assert message.id.startswith("msg_")
    assert (message.type, message.role, message.model) == ("message", "assistant", BYTE)
    assert [(one.type, one.text) for one in message.content] == [("text", "hello world")]
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    usage = message.usage
    assert (usage.output_tokens, usage.cache_read_input_tokens) == (count, 3)
    assert usage.input_tokens + 3 == len(served.job.tokens)
    assert prompt(served, byte).startswith("<|im_start|>system\nbe brief<|im_end|>")


def test_events_are_anthropics(served: Served, byte: Tokenizer) -> None:
    says(served, byte, "hello world", per_delta=2)
    body = {"model": BYTE, "max_tokens": 50, "messages": HELLO, "stream": True}
    answer = served.http.post("/v1/messages", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    kinds = [line[7:] for line in answer.text.splitlines() if line.startswith("event: ")]
    assert kinds[:3] == ["message_start", "ping", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[3:-3]) == {"content_block_delta"}


@pytest.mark.parametrize(
    ("fields", "reason", "stopped_by"),
    [
        ({"stop_sequences": ["never", " wor"]}, "stop_sequence", " wor"),
        ({"max_tokens": 1}, "max_tokens", None),
    ],
)
def test_reasons_to_stop(
    caller: Served, byte: Tokenizer, fields: dict[str, Any], reason: str, stopped_by: str | None
) -> None:
    says(caller, byte, "hello world")
    message = ask(caller, **fields)
    assert (message.stop_reason, message.stop_sequence) == (reason, stopped_by)
    assert "hello world".startswith(message.content[0].text)


def test_sampling_reaches_the_engine(served: Served, byte: Tokenizer) -> None:
    says(served, byte, "hello")
    body = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "seed": 5, "priority": 2}
    served.http.post(
        "/v1/messages", json={"model": BYTE, "max_tokens": 9, "messages": HELLO, **body}
    ).raise_for_status()
    job = served.job
    assert (job.sampling.temperature, job.sampling.top_p, job.sampling.top_k) == (0.5, 0.9, 7)
    assert (job.sampling.seed, job.request.priority, job.request.max_new_tokens) == (5, 2, 9)


def test_tools_and_their_results(caller: Served, byte: Tokenizer) -> None:
    says(caller, byte, f"I will look.\n{CALL}")
    message = ask(caller, tools=[TOOL], tool_choice={"type": "auto"})
    assert message.stop_reason == "tool_use"
    text, call = message.content
    assert (text.type, text.text) == ("text", "I will look.\n")
    assert (call.type, call.name, call.input) == ("tool_use", "weather", {"city": "Köln"})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
    says(caller, byte, "it rains")
    turns = [*HELLO, {"role": "assistant", "content": message.content}]
    ask(caller, tools=[TOOL], messages=[*turns, {"role": "user", "content": [result]}])
    assert f"[weather:Köln]<tool>rain#{call.id}" in prompt(caller, byte)
    one = {"type": "auto", "disable_parallel_tool_use": True}
    says(caller, byte, f"{CALL}\n{CALL}")
    assert len(ask(caller, tools=[TOOL]).content) == 2
    assert len(ask(caller, tools=[TOOL], tool_choice=one).content) == 1
    says(caller, byte, CALL)
    message = ask(caller, tools=[TOOL], tool_choice={"type": "none"})
    assert message.content[0].text == CALL


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_forced_calls(caller: Served, byte: Tokenizer, choice: dict[str, Any]) -> None:
    says(caller, byte, CALL)
    asked: Any = {"model": CALLER, "messages": HELLO, "max_tokens": 99, "tools": [TOOL]}
    with anthropic_client(caller) as client:
        whole = client.messages.create(**asked, tool_choice=choice)
        with client.messages.stream(**asked, tool_choice=choice) as stream:
            streamed = stream.get_final_message()
    for message in (whole, streamed):
        assert message.stop_reason == "tool_use"
        (block,) = message.content
        assert block.type == "tool_use"
        assert (block.name, block.input) == ("weather", {"city": "Köln"})
    grammar = caller.job.sampling.grammar
    assert grammar is not None
    assert "tagged" in grammar.text


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_forced_calls_are_as_those_of_chats(
    caller: Served, byte: Tokenizer, choice: dict[str, Any]
) -> None:
    says(caller, byte, CALL)
    body = {"model": CALLER, "max_tokens": 99, "messages": HELLO, "tools": [TOOL]}
    answer = caller.http.post("/v1/messages", json={**body, "tool_choice": choice})
    function = {"name": "weather", "parameters": SCHEMA}
    named = {"type": "function", "function": {"name": "weather"}}
    asked = {"tool_choice": named if choice["type"] == "tool" else "required"}
    tools = [{"type": "function", "function": function}]
    same = caller.http.post("/v1/chat/completions", json={**body, "tools": tools, **asked})
    assert answer.status_code == same.status_code
    if answer.status_code == 400:
        assert "tool_choice" in answer.json()["error"]["message"]


def test_thoughts(caller: Served, byte: Tokenizer) -> None:
    says(caller, byte, "<think>hm</think>\n\nyes")
    message = ask(caller, thinking={"type": "enabled", "budget_tokens": 1024})
    thought, text = message.content
    assert (thought.type, thought.thinking, text.text) == ("thinking", "hm", "yes")
    assert prompt(caller, byte).startswith("THINK=True")
    more = [*HELLO, {"role": "assistant", "content": message.content}, *HELLO]
    ask(caller, messages=more)
    assert prompt(caller, byte).startswith("THINK=False")
    assert "<assistant>(hm)yes" in prompt(caller, byte)


def test_tokens_are_counted(caller: Served, byte: Tokenizer) -> None:
    says(caller, byte, "fine")
    asked: dict[str, Any] = {"model": CALLER, "messages": HELLO, "system": "x", "tools": [TOOL]}
    with anthropic_client(caller) as client:
        counted = client.messages.count_tokens(**asked).input_tokens
    message = ask(caller, **asked)
    assert counted == message.usage.input_tokens == len(caller.job.tokens)


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages.0.content.0.type"),
        (
            {"messages": [{"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "x", "content": [IMAGE]}
            ]}]},
            "messages.0.content.0.content.0.type",
        ),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
        ({"messages": [*HELLO, {"role": "assistant", "content": "x"}]}, "messages"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": 2}, "temperature"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"max_tokens": 5000}, "messages"),
        ({"made_up": 1}, "made_up"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools.0.name"),
        ({"tool_choice": {"type": "auto"}}, "tool_choice"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type"),
        ({"system": [IMAGE]}, "system.0.type"),
        ({"mcp_servers": []}, "mcp_servers"),
    ],
)  # fmt: skip
def test_wrong_fields_are_named(caller: Served, change: dict[str, Any], named: str) -> None:
    body = {"model": CALLER, "max_tokens": 9, "messages": HELLO, **change}
    answer = caller.http.post("/v1/messages", json=body)
    assert answer.status_code == 400, answer.text
    shape = answer.json()
    assert (shape["type"], shape["error"]["type"]) == ("error", "invalid_request_error")
    assert named in shape["error"]["message"], shape


def test_errors_are_anthropics(served: Served, byte: Tokenizer) -> None:
    with anthropic_client(served) as client:
        with pytest.raises(anthropic.NotFoundError, match="does not exist"):
            client.messages.create(model="none", max_tokens=9, messages=HELLO)
        served.plays(lambda job: Play(refuse=Refused(429, "too much to do", 7.2)))
        for stream in (False, True):
            with pytest.raises(anthropic.RateLimitError) as refused:
                client.messages.create(model=BYTE, max_tokens=9, messages=HELLO, stream=stream)  # pyright: ignore
            assert refused.value.response.headers["retry-after"] == "8"
            assert refused.value.request_id == refused.value.response.headers["x-request-id"]
            assert refused.value.body == {
                "type": "error", "error": {"type": "rate_limit_error", "message": "too much to do"}
            }  # fmt: skip
        says(served, byte, "hello world", fail_after=2)
        with pytest.raises(anthropic.InternalServerError, match="the weights are gone"):
            client.messages.create(model=BYTE, max_tokens=9, messages=HELLO)
        with (
            pytest.raises(anthropic.APIStatusError, match="the weights are gone"),
            client.messages.stream(model=BYTE, max_tokens=9, messages=HELLO) as events,
        ):
            events.until_done()
    for method, path in (("GET", "/v1/messages"), ("POST", "/v1/messages/batches")):
        assert served.http.request(method, path).json()["type"] == "error"
