"""/api as Ollama's official client sees it, over a real socket."""

import json
from typing import Any

import ollama
import pytest
from door_clients import CALL, CALLER, SCHEMA, ollama_client, prompt, says
from fake_gateway import TIMING, Play
from served import BYTE, Served
from tokenizers import Tokenizer

from c2cserve import __version__
from c2cserve.runtime.gateway import Refused

HELLO: Any = [{"role": "user", "content": "hello"}]
TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
COUNTED = ("done", "done_reason", "prompt_eval_count", "eval_count")


def chat(served: Served, **fields: Any) -> Any:
    """The answer, checked to be the same streamed."""
    fields = {"model": CALLER, "messages": HELLO, **fields}
    with ollama_client(served) as client:
        whole = client.chat(**fields)
        lines = list(client.chat(stream=True, **fields))
    assert [line.done for line in lines] == [False] * (len(lines) - 1) + [True]
    for key in ("content", "thinking"):
        parts = [getattr(line.message, key) or "" for line in lines]
        assert "".join(parts) == (getattr(whole.message, key) or "")
    calls = [call for line in lines for call in line.message.tool_calls or ()]
    assert calls == list(whole.message.tool_calls or ())
    assert [getattr(lines[-1], key) for key in COUNTED] == [getattr(whole, key) for key in COUNTED]
    return whole


def test_a_chat(served: Served, byte: Tokenizer) -> None:
    count = says(served, byte, "hello world", delay_s=0.001)
    answer = chat(served, model=BYTE, messages=[{"role": "system", "content": "brief"}, *HELLO])
    assert (answer.model, answer.message.role) == (BYTE, "assistant")
    assert answer.message.content == "hello world"
    assert (answer.done, answer.done_reason) == (True, "stop")
    assert answer.prompt_eval_count == len(served.job.tokens)
    assert answer.eval_count == count
    load_s = TIMING.wait_weights_s + TIMING.switch_s
    assert answer.load_duration == pytest.approx(load_s * 1e9, abs=2)
    assert answer.prompt_eval_duration == TIMING.prefill_s * 1e9
    assert answer.total_duration >= answer.eval_duration >= (count - 1) * 1_000_000
    assert answer.created_at.endswith("Z")


def test_streams_are_lines(served: Served, byte: Tokenizer) -> None:
    says(served, byte, "hello world")
    answer = served.http.post("/api/chat", json={"model": BYTE, "messages": HELLO})
    assert answer.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert "".join(line["message"]["content"] for line in lines) == "hello world"
    assert "total_duration" not in lines[0]


def test_generate(served: Served, byte: Tokenizer) -> None:
    says(served, byte, "hello world")
    with ollama_client(served) as client:
        answer = client.generate(model=BYTE, prompt="hi", system="brief")
        assert answer.response == "hello world"
        assert "system\nbrief<|im_end|>" in prompt(served, byte)
        lines = list(client.generate(model=BYTE, prompt="the answer", raw=True, stream=True))
    assert "".join(line.response for line in lines) == "hello world"  # pyright: ignore
    assert served.job.tokens == tuple(byte.encode("the answer").ids)
    assert served.job.request.max_new_tokens == 256 - len(served.job.tokens)


def test_options_reach_the_engine(served: Served, byte: Tokenizer) -> None:
    says(served, byte, "hello STOP world")
    options: Any = {
        "num_predict": 40, "temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.1, "seed": 5,
        "stop": ["STOP"], "repeat_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.25,
        "num_ctx": 4096, "num_gpu": 99, "mirostat": 0, "repeat_last_n": -1,
    }  # fmt: skip
    answer = chat(served, model=f"{BYTE}:latest", options=options, keep_alive="5m")
    assert (answer.message.content, answer.model) == ("hello ", f"{BYTE}:latest")
    sampling = served.job.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.5, 7, 0.9)
    assert (sampling.min_p, sampling.seed, sampling.repetition_penalty) == (0.1, 5, 1.5)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, 0.25)
    assert served.job.request.max_new_tokens == 40
    assert chat(served, model=BYTE, options={"num_predict": 1}).done_reason == "length"
    assert chat(served, model=BYTE, options={"num_predict": -1}).done_reason == "stop"
    assert chat(served, model="nick").model == "nick"


def test_tools_and_thoughts(caller: Served, byte: Tokenizer) -> None:
    says(caller, byte, f"<think>hm</think>\n{CALL}\n{CALL}")
    answer = chat(caller, tools=[TOOL], think=True)
    assert (answer.message.thinking, answer.message.content.strip()) == ("hm", "")
    called = [call.function for call in answer.message.tool_calls]
    assert [(one.name, one.arguments) for one in called] == [("weather", {"city": "Köln"})] * 2
    assert "THINK=True" in prompt(caller, byte)
    result = {"role": "tool", "tool_name": "weather", "content": "rain"}
    says(caller, byte, "it rains")
    chat(caller, messages=[*HELLO, answer.message, result], tools=[TOOL], think=False)
    assert "<assistant>(hm)" in prompt(caller, byte)
    assert "[weather:Köln][weather:Köln]<tool>rain" in prompt(caller, byte)
    assert "THINK=False" in prompt(caller, byte)


def test_models(caller: Served) -> None:
    with ollama_client(caller) as client:
        listed = {one.model: one for one in client.list().models}
        loaded = {one.model: one for one in client.ps().models}
        shown = client.show(f"{CALLER}:latest")
        assert {f"{BYTE}:latest", "nick:latest", f"{CALLER}:latest"} <= set(listed)
    assert listed[f"{BYTE}:latest"].size == 1000
    assert loaded[f"{BYTE}:latest"].context_length == 256
    assert shown.capabilities == ["completion", "tools", "thinking"]
    assert shown.modelinfo is not None
    assert shown.modelinfo["llama.context_length"] == 2048
    assert "<tool_call>" in (shown.template or "")
    assert caller.http.get("/api/version").json() == {"version": __version__}


@pytest.mark.parametrize("form", ["json", {"type": "object", "properties": {"a": {}}}])
def test_a_form_holds_the_output(served: Served, byte: Tokenizer, form: Any) -> None:
    says(served, byte, '{"a": 1}')
    with ollama_client(served) as client:
        assert client.chat(BYTE, HELLO, format=form).message.content == '{"a": 1}'
        held = served.job.sampling.grammar
        assert client.generate(BYTE, "x", format=form).response == '{"a": 1}'
        streamed = client.chat(BYTE, HELLO, format=form, stream=True)
        assert "".join(line.message.content or "" for line in streamed) == '{"a": 1}'
    assert held is not None
    assert "%json" in held.text
    wrong = {"model": BYTE, "messages": HELLO, "format": {"type": "text"}}
    answer = served.http.post("/api/chat", json=wrong)
    assert answer.status_code == 400
    assert answer.json()["error"].startswith("format: ")


@pytest.mark.parametrize("form", ["json", {"type": "object"}])
def test_a_form_is_as_that_of_chats(served: Served, byte: Tokenizer, form: Any) -> None:
    says(served, byte, "{}")
    body = {"model": BYTE, "messages": HELLO, "stream": False}
    answer = served.http.post("/api/chat", json={**body, "format": form})
    asked: Any = {"type": "json_object"}
    if form != "json":
        asked = {"type": "json_schema", "json_schema": {"name": "output", "schema": form}}
    same = served.http.post("/v1/chat/completions", json={**body, "response_format": asked})
    assert answer.status_code == same.status_code
    if answer.status_code == 400:
        assert answer.json()["error"].startswith("format")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"options": {"num_predict": 0}}, "options.num_predict"),
        ({"options": {"mirostat": 1}}, "options.mirostat"),
        ({"options": {"repeat_last_n": 64}}, "options.repeat_last_n"),
        ({"options": {"stop": ["x"] * 17}}, "options.stop"),
        ({"options": {"num_predict": 5000}}, "maximum context length"),
        ({"options": {"made_up": 1}}, "options.made_up"),
        ({"made_up": 1}, "made_up"),
        ({"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, "messages.0.images"),
        ({"messages": [*HELLO, {"role": "assistant", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"truncate": True}, "truncate"),
    ],
)
def test_wrong_fields_are_named(caller: Served, change: dict[str, Any], named: str) -> None:
    answer = caller.http.post("/api/chat", json={"model": CALLER, "messages": HELLO, **change})
    assert answer.status_code == 400, answer.text
    assert named in answer.json()["error"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"prompt": None}, "prompt"),
        ({"images": ["aGk="]}, "images"),
        ({"suffix": "x"}, "suffix"),
        ({"template": "x"}, "template"),
        ({"context": [1]}, "context"),
        ({"raw": True, "system": "x"}, "raw"),
    ],
)
def test_wrong_fields_of_generate(served: Served, change: dict[str, Any], named: str) -> None:
    answer = served.http.post("/api/generate", json={"model": BYTE, "prompt": "x", **change})
    assert answer.status_code == 400, answer.text
    assert named in answer.json()["error"]


def test_errors_are_ollamas(served: Served, byte: Tokenizer) -> None:
    with ollama_client(served) as client:
        with pytest.raises(ollama.ResponseError, match="does not exist") as missing:
            client.chat(model="none", messages=HELLO)
        assert missing.value.status_code == 404
        served.plays(lambda job: Play(refuse=Refused(429, "too much to do", 7.2)))
        for stream in (False, True):
            with pytest.raises(ollama.ResponseError, match="too much to do") as refused:
                list(client.generate(model=BYTE, prompt="x", stream=stream))  # pyright: ignore
            assert refused.value.status_code == 429
        answer = served.http.post("/api/chat", json={"model": BYTE, "messages": HELLO})
        assert answer.headers["retry-after"] == "8"
        says(served, byte, "hello world", fail_after=2)
        with pytest.raises(ollama.ResponseError, match="the weights are gone"):
            list(client.chat(model=BYTE, messages=HELLO, stream=True))
        assert set(served.http.post("/api/pull", json={}).json()) == {"error"}


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
@pytest.mark.parametrize("stream", [True, False])
def test_an_empty_request_loads_the_model(served: Served, path: str, stream: bool) -> None:
    """As Ollama's command sends it before a session; it shows what the model says to it."""
    body = {"model": BYTE, "stream": stream, "keep_alive": "5m"}
    empty = {
        "prompt": "",
        "images": [],
        "suffix": "",
        "system": "",
        "template": "",
        "options": None,
    }
    answer = served.http.post(path, json=body if path == "/api/chat" else {**body, **empty})
    assert answer.status_code == 200, answer.text
    (line,) = map(json.loads, answer.text.splitlines())
    assert (line["done"], line["done_reason"]) == (True, "load")
    assert (line["message"]["content"] if path == "/api/chat" else line["response"]) == ""
    assert served.job.request.model == BYTE


def test_ollamas_command_finds_the_server(served: Served) -> None:
    assert served.http.head("/").status_code == 200
    assert "running" in served.http.get("/").text
    shown = {"system": "", "template": "", "verbose": False, "options": None, "name": ""}
    assert served.http.post("/api/show", json={"model": BYTE, **shown}).status_code == 200
