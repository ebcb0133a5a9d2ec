"""Tools: what reaches a template, and what of an output is a call, reasoning or content."""

import itertools
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from served import BYTE, Served
from small_tokenizers import EOS
from tokenizers import Tokenizer

from c2cserve.server.tools.reading import OutputReader, Parts, ReadingPlan

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather", "description": "Tell the weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}  # fmt: skip
SHOW = (
    "{% if tools %}TOOLS{{ tools | tojson }}\n{% endif %}{% for m in messages %}<{{ m.role }}>"
    "{{ m.content }}{% if m.tool_call_id %}#{{ m.tool_call_id }}{% endif %}"
    "{% for call in m.tool_calls or [] %}[{{ call.function.name }}:"
    "{{ call.function.arguments.city }}]{% endfor %}\n{% endfor %}"
)
HERMES = SHOW + "{# answer with <tool_call>{...}</tool_call> #}"
THINKING = HERMES + "<assistant><think>\n"
LLAMA = SHOW + '{# answer with {"name": ..., "parameters": ...} #}'
MISTRAL = SHOW + '{# answer with [TOOL_CALLS] [{"name": ..., "arguments": ...}] #}'
NAMED = {
    name: {"type": "function", "function": {"name": name}} for name in ("weather", "other")
}  # fmt: skip
WRONG: dict[str, Any] = {
    "type": "function", "function": {"name": "w", "parameters": {"type": "text"}},
}  # fmt: skip
STRICT: dict[str, Any] = {"type": "function", "function": {**TOOL["function"], "strict": True}}
MESSAGES: list[Any] = [{"role": "user", "content": "how is it in Köln?"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
MISTRAL_CALL = '{"name": "weather", "arguments": {"city": "Köln"}}'
ARGS = SHOW + "{# answer with [TOOL_CALLS]name[ARGS]{...} #}"
ARGS_CALL = 'weather{"city": "Köln"}'
LLAMA_CALL = '{"name": "weather", "parameters": {"city": "Köln"}}'


TEMPLATES = {"hermes": HERMES, "thinking": THINKING, "llama": LLAMA, "mistral": MISTRAL,
             "args": ARGS, "sometimes": THINKING + "</think>"}  # fmt: skip


_versions = itertools.count(2)


@pytest.fixture
def calling(served: Served, byte_dir: Path, tmp_path: Path) -> Iterator[Served]:
    """A server with a model for each format of calls."""
    files = served.gateway.files[BYTE]
    for name, template in TEMPLATES.items():
        path = Path(shutil.copytree(byte_dir, tmp_path / name))
        (path / "chat_template.jinja").write_text(template)
        # Each test has a version of its own, since text processes keep tokenizers by version.
        served.gateway.files[name] = replace(
            files, id=name, path=str(path), max_context=2048, version=f"{name}#{next(_versions)}"
        )
    yield served
    for name in TEMPLATES:
        served.gateway.files.pop(name)


def says(served: Served, byte: Tokenizer, text: str) -> None:
    served.says([*byte.encode(text, add_special_tokens=False).ids, EOS])


def prompt(served: Served, byte: Tokenizer) -> str:
    return byte.decode(list(served.job.tokens), skip_special_tokens=False)


def ask(served: Served, model: str, **fields: Any) -> Any:
    """The message and why it ended, checked to be the same streamed."""
    body = {"model": model, "messages": MESSAGES, "max_tokens": 500, **fields}
    whole = served.client.chat.completions.create(**body).choices[0]
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "calls": []}
    finish = None
    for chunk in served.client.chat.completions.create(stream=True, **body):
        choice = chunk.choices[0]
        delta = choice.delta.model_dump(exclude_none=True)
        assert delta or choice.finish_reason, "no chunk is empty"
        for key in ("content", "reasoning_content"):
            message[key] += delta.get(key, "")
        for call in delta.get("tool_calls", ()):
            assert call["index"] == len(message["calls"])
            message["calls"].append(call["function"])
        finish = choice.finish_reason or finish
    calls = [call.function.model_dump() for call in whole.message.tool_calls or ()]  # pyright: ignore
    assert message["calls"] == calls
    assert message["content"].strip() == (whole.message.content or "").strip()
    reasoning = getattr(whole.message, "reasoning_content", "")
    assert (message["reasoning_content"], finish) == (reasoning, whole.finish_reason)
    return whole


# ---- into the template --------------------------------------------------------------------------


def test_tools_reach_the_template(calling: Served, byte: Tokenizer) -> None:
    says(calling, byte, "fine")
    for choice in ({}, {"tool_choice": "auto"}):
        ask(calling, "hermes", tools=[TOOL], **choice)
        assert prompt(calling, byte).startswith(f"TOOLS{json.dumps([TOOL])}\n")
    for without in ({"tools": [TOOL], "tool_choice": "none"}, {"tools": []}, {}):
        ask(calling, "hermes", **without)
        assert "TOOLS" not in prompt(calling, byte)


def test_calls_and_their_results_are_sent_back(calling: Served, byte: Tokenizer) -> None:
    says(calling, byte, CALL)
    message = ask(calling, "hermes", tools=[TOOL]).message
    (call,) = message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    says(calling, byte, "it rains")
    for answer in (message, message.model_dump(), message.model_dump(exclude_none=True)):
        calling.client.chat.completions.create(
            model="hermes", messages=[*MESSAGES, answer, result], tools=[TOOL]
        )  # pyright: ignore
        assert f"<assistant>[weather:Köln]<tool>rain#{call.id}" in prompt(calling, byte)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": NAMED["other"]}, "tool_choice"),
        ({"tool_choice": NAMED["weather"]}, "tool_choice"),
        ({"tools": [TOOL, WRONG], "tool_choice": "required"}, "tools.1.function.parameters"),
        ({"tools": [STRICT], "model": "llama"}, "tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tools": [{"type": "function"}]}, "tools.0.function"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools.0"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"model": BYTE, "tools": [TOOL]}, "tools"),
        ({"messages": [{"role": "user", "content": "x", "tool_call_id": "1"}]}, "messages.0"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": []}]}, "messages.0"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "a", "arguments": "[]"}}
            ]}]},
            "messages.0.tool_calls.0.function.arguments",
        ),
    ],
)  # fmt: skip
def test_wrong_tools_are_named(calling: Served, change: dict[str, Any], param: str) -> None:
    body = {"model": "hermes", "messages": MESSAGES, **change}
    answer = calling.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].startswith(param)


def test_tokenize_takes_tools(calling: Served, byte: Tokenizer) -> None:
    says(calling, byte, "fine")
    ask(calling, "hermes", tools=[TOOL])
    body = {"model": "hermes", "messages": MESSAGES, "tools": [TOOL]}
    tokens = calling.http.post("/tokenize", json=body).json()["tokens"]
    assert tokens == list(calling.job.tokens)


# ---- out of the output --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ("hermes", CALL),
        ("hermes", f"I will look.\n{CALL}"),
        ("hermes", f"{CALL}\n{CALL}"),
        ("llama", LLAMA_CALL),
        ("llama", f"{LLAMA_CALL}; {LLAMA_CALL}"),
        ("mistral", f"[{MISTRAL_CALL}]"),
        ("mistral", f" [{MISTRAL_CALL}, {MISTRAL_CALL}]"),
        ("args", ARGS_CALL),
        ("args", f"{ARGS_CALL}{ARGS_CALL}"),
        ("args", '[TOOL_CALLS]weather[ARGS]{"city": "Köln"}'),
    ],
)
def test_calls(calling: Served, byte: Tokenizer, model: str, text: str) -> None:
    says(calling, byte, text)
    choice = ask(calling, model, tools=[TOOL])
    assert choice.finish_reason == "tool_calls"
    calls = choice.message.tool_calls
    assert len(calls) == text.count("weather")
    assert len({call.id for call in calls}) == len(calls)
    for call in calls:
        assert (call.type, call.function.name) == ("function", "weather")
        assert json.loads(call.function.arguments) == {"city": "Köln"}
    assert choice.message.content == ("I will look.\n" if text.startswith("I") else None)
    one = ask(calling, model, tools=[TOOL], parallel_tool_calls=False)
    assert len(one.message.tool_calls) == 1


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ("hermes", "no call <tool"),
        ("hermes", "<tool_call>weather</tool_call>"),
        ("hermes", '<tool_call>{"name": "other", "arguments": {}}</tool_call> and more'),
        ("hermes", '<tool_call>{"name": "weather", "arg'),
        ("llama", '{"name": "other", "parameters": {}}'),
        ("llama", '{"name": "weather", "parameters": {}} and more'),
        ("llama", f"it is {LLAMA_CALL}"),
        ("llama", "[1]"),
        ("mistral", "[1]"),
        ("mistral", "[TOOL"),
        ("mistral", f"[{MISTRAL_CALL}"),
        ("mistral", f"see [{MISTRAL_CALL}]"),
        ("args", "weat"),
        ("args", "weather is fine"),
        ("args", 'weather{"city":'),
        ("args", f"{ARGS_CALL} and more"),
        ("args", "other{}"),
        ("args", "[TOOL_CALLS]"),
    ],
)
def test_what_is_no_call_is_content(
    calling: Served, byte: Tokenizer, model: str, text: str
) -> None:
    says(calling, byte, text)
    choice = ask(calling, model, tools=[TOOL])
    assert (choice.message.content, choice.message.tool_calls) == (text, None)
    assert choice.finish_reason == "stop"


def streamed_calls(served: Served, **body: Any) -> list[list[str]]:
    """The name of each call of a stream, and the pieces of its arguments."""
    calls: list[list[str]] = []
    for chunk in served.client.chat.completions.create(stream=True, **body):
        for call in chunk.choices[0].delta.tool_calls or ():
            if call.id is not None:
                assert call.index == len(calls)
                calls.append([call.function.name])
            calls[call.index].append(call.function.arguments)
    return calls


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ("hermes", f"{CALL}\n{CALL}"),
        ("llama", f"{LLAMA_CALL}; {LLAMA_CALL}"),
        ("mistral", f"[{MISTRAL_CALL}, {MISTRAL_CALL}]"),
        ("args", f"{ARGS_CALL}{ARGS_CALL}"),
        ("args", '[TOOL_CALLS]weather[ARGS]{"city": "Köln"}' * 2),
    ],
)
@pytest.mark.parametrize("choice", ["required", NAMED["weather"]], ids=str)
def test_forced_calls_are_sent_in_pieces(
    calling: Served, byte: Tokenizer, model: str, text: str, choice: Any
) -> None:
    says(calling, byte, text)
    body = {"model": model, "messages": MESSAGES, "tools": [TOOL], "tool_choice": choice}
    whole = calling.client.chat.completions.create(max_tokens=500, **body).choices[0]
    # As OpenAI says where the request names the function.
    assert whole.finish_reason == ("tool_calls" if choice == "required" else "stop")
    assert whole.message.content is None
    assert [one.function.arguments for one in whole.message.tool_calls] == ['{"city": "Köln"}'] * 2
    calls = streamed_calls(calling, max_tokens=500, **body)
    assert [one[0] for one in calls] == ["weather"] * 2
    assert ["".join(one[1:]) for one in calls] == ['{"city": "Köln"}'] * 2
    assert max(len(one) for one in calls) > 4, "the arguments come as they are made"


def test_a_call_that_is_cut_is_sent_as_far_as_it_came(calling: Served, byte: Tokenizer) -> None:
    says(calling, byte, CALL[:-20])
    body = {"model": "hermes", "messages": MESSAGES, "tools": [TOOL], "tool_choice": "required"}
    whole = calling.client.chat.completions.create(max_tokens=500, **body).choices[0]
    (call,) = whole.message.tool_calls
    assert '{"city": "Köln"}'.startswith(call.function.arguments)


def test_a_forced_call_after_a_thought(calling: Served, byte: Tokenizer) -> None:
    says(calling, byte, f"call {CALL}?</think>\n\n{CALL}")
    body = {"model": "thinking", "messages": MESSAGES, "tools": [TOOL], "tool_choice": "required"}
    more = {"separate_reasoning": True}
    message = calling.client.chat.completions.create(**body, extra_body=more).choices[0].message
    assert len(message.tool_calls) == 1
    assert message.reasoning_content == f"call {CALL}?"


@pytest.mark.parametrize(
    ("model", "start"),
    [("hermes", "answer"), ("thinking", "thought answer"), ("sometimes", "thought? answer")],
)
def test_a_thought_may_come_first_if_the_model_knows_the_tag(
    calling: Served, byte: Tokenizer, model: str, start: str
) -> None:
    """Any other model would spend its tokens on a thought that it never ends."""
    says(calling, byte, "fine")
    calling.client.chat.completions.create(
        model=model, messages=MESSAGES, response_format={"type": "json_object"},
        extra_body={"separate_reasoning": True},
    )  # fmt: skip
    grammar = calling.job.sampling.grammar
    assert grammar is not None
    assert f"start: {start}\n" in grammar.text


def test_what_a_grammar_says_of_calls(calling: Served, byte: Tokenizer) -> None:
    says(calling, byte, "fine")
    for model, fields, forms in (
        ("hermes", {"tool_choice": "required"}, ['("\\n" tagged)*', "tool_call"]),
        (
            "hermes",
            {"tool_choice": "required", "parallel_tool_calls": False},
            ["answer: tagged \n"],
        ),
        ("hermes", {"tool_choice": NAMED["weather"]}, ["answer: tagged \n"]),
        ("llama", {"tool_choice": "required"}, ["parameters", "; "]),
        ("mistral", {"tool_choice": "required"}, ["[", "arguments"]),
        ("args", {"tool_choice": "required"}, ["call*", '"[TOOL_CALLS]" "weather" "[ARGS]" %json']),
        ("hermes", {"tools": [STRICT]}, ["begin[lazy]"]),
    ):
        tools = {"tools": [TOOL], **fields}
        calling.client.chat.completions.create(model=model, messages=MESSAGES, **tools)
        grammar = calling.job.sampling.grammar
        assert grammar is not None
        for form in forms:
            assert form in grammar.text
    calling.client.chat.completions.create(model="hermes", messages=MESSAGES, tools=[TOOL])
    assert calling.job.sampling.grammar is None


def test_nothing_is_read_unasked(calling: Served, byte: Tokenizer) -> None:
    text = f"<think>hm</think>{CALL}"
    says(calling, byte, text)
    for fields in ({}, {"tools": [TOOL], "tool_choice": "none"}):
        assert ask(calling, "hermes", **fields).message.content == text


def test_models_that_know_the_tag_have_their_thoughts_split_off_unasked(
    calling: Served, byte: Tokenizer
) -> None:
    says(calling, byte, "hm</think>yes")
    message = ask(calling, "thinking").message
    assert (message.content, message.reasoning_content) == ("yes", "hm")
    whole = ask(calling, "thinking", extra_body={"separate_reasoning": False}).message
    assert whole.content == "hm</think>yes"


def test_a_grammar_of_the_request_s_own_holds_all_of_the_output(
    calling: Served, byte: Tokenizer
) -> None:
    says(calling, byte, "a")
    more = {"structured_outputs": {"grammar": 'start: "a"'}}
    assert ask(calling, "thinking", extra_body=more).message.content == "a"
    body = {"model": "thinking", "messages": MESSAGES, **more, "separate_reasoning": True}
    assert calling.http.post("/v1/chat/completions", json=body).status_code == 400


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_thoughts_are_sent_back_by_either_name(
    calling: Served, byte: Tokenizer, tmp_path: Path, field: str
) -> None:
    """Servers have it under one of two names, and clients send back what they got."""
    says(calling, byte, "fine")
    path = Path(calling.gateway.files["hermes"].path) / "chat_template.jinja"
    path.write_text("{% for m in messages %}{{ m.content }}{{ m.reasoning_content }}{% endfor %}")
    messages = [*MESSAGES, {"role": "assistant", "content": "yes", field: "hm"}, *MESSAGES]
    calling.http.post("/v1/chat/completions", json={"model": "hermes", "messages": messages})
    assert "yeshm" in prompt(calling, byte)
    wrong = [{"role": "user", "content": "x", field: "hm"}]
    body = {"model": "hermes", "messages": wrong}
    answer = calling.http.post("/v1/chat/completions", json=body)
    assert answer.json()["error"]["param"] == f"messages.0.{field}"


@pytest.mark.parametrize("tools", [{}, {"tools": [TOOL]}])
@pytest.mark.parametrize(
    ("model", "text", "reasoning", "content"),
    [
        ("hermes", "<think>\nhm, hm\n</think>\n\nyes", "\nhm, hm\n", "yes"),
        ("hermes", "yes <think>no</think>", "", "yes <think>no</think>"),
        ("hermes", "<think>never ends", "never ends", ""),
        ("thinking", "hm\n</think>\n\nyes", "hm\n", "yes"),
    ],
)
def test_reasoning(
    calling: Served, byte: Tokenizer, model: str, text: str, reasoning: str, content: str,
    tools: dict[str, Any],
) -> None:  # fmt: skip
    says(calling, byte, text)
    message = ask(calling, model, extra_body={"separate_reasoning": True}, **tools).message
    assert (message.content, getattr(message, "reasoning_content", "")) == (content, reasoning)


def test_a_call_after_a_thought(calling: Served, byte: Tokenizer) -> None:
    says(calling, byte, f"<think>call {CALL}?</think>\n{CALL}")
    message = ask(calling, "hermes", extra_body={"separate_reasoning": True}, tools=[TOOL]).message
    assert len(message.tool_calls) == 1
    assert message.reasoning_content == f"call {CALL}?"


def test_a_call_that_never_ends_costs_a_constant_time_per_token() -> None:
    reader = OutputReader(ReadingPlan("hermes", ("weather",)))
    reader.add("<tool_call>")
    for _ in range(50):
        assert reader.add("x" * 100) == Parts()
    assert len(reader.held) < 20, "a text that is copied and searched again for every token"
    assert reader.finish().content == "<tool_call>" + "x" * 5000


PIECES = st.sampled_from(
    [
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "<",
        "{",
        LLAMA_CALL,
        CALL,
        " \n",
        "a;",
        "[",
        "[TOOL_CALLS]",
        f"[{MISTRAL_CALL}]",
    ]
)
PLANS = st.builds(
    ReadingPlan, st.sampled_from(["hermes", "llama3", "mistral", None]), st.just(("weather",)),
    st.booleans(), st.booleans(), st.booleans(),
)  # fmt: skip


def read(plan: ReadingPlan, texts: list[str]) -> tuple[str, str, list[Any]]:
    reader = OutputReader(plan)
    found: list[Parts] = [*map(reader.add, texts), reader.finish()]
    calls = [call["function"] for parts in found for call in parts.calls]
    content, reasoning = ("".join(getattr(p, k) for p in found) for k in ("content", "reasoning"))
    return content, reasoning, calls


@given(PLANS, st.lists(PIECES, max_size=8).map("".join), st.data())
def test_the_result_does_not_depend_on_the_pieces(
    plan: ReadingPlan, text: str, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    texts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(plan, texts) == read(plan, [text])
