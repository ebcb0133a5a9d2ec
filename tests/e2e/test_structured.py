"""Structured outputs and forced calls of a live server, asked for with OpenAI's client."""

import asyncio
import json
import os
import re
import shutil
import signal
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import openai
import pytest
from child_processes import children_of
from pydantic import BaseModel, Field
from server_process import CATALOG, ServerProcess

MESSAGES: list[Any] = [{"role": "user", "content": "what is your name?"}]
TOOLS: list[Any] = [
    {"type": "function", "function": {
        "name": name, "strict": True,
        "parameters": {
            "type": "object", "properties": {"level": {"enum": ["low", "high"]}},
            "required": ["level"], "additionalProperties": False,
        },
    }}
    for name in ("heat", "cool")
]  # fmt: skip
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|user|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if tools %}%s{% endif %}<|assistant|>"
)
FORMATS = {
    "hermes": "<tool_call>{...}</tool_call>", "llama": '"parameters"', "mistral": "[TOOL_CALLS]",
}  # fmt: skip


class Person(BaseModel):
    name: Annotated[str, Field(max_length=8)]
    age: Annotated[int, Field(ge=0, le=120)]
    colors: Annotated[list[Literal["red", "blue"]], Field(max_length=3)]


@pytest.fixture(scope="module")
def calling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of one slice, with a model for each format of calls. Its processes are killed and
    replaced."""
    folder = tmp_path_factory.mktemp("calling")
    entries: list[str] = []
    for name, form in FORMATS.items():
        path = shutil.copytree(CATALOG.parent / "chatter-qwen2", folder / name)
        (path / "chat_template.jinja").write_text(TEMPLATE.replace("%s", "{# " + form + " #}"))
        entries.append(f'[[models]]\nid = "{name}"\npath = "{name}"\n')
    (folder / "catalog.toml").write_text("\n".join(entries))
    with ServerProcess(
        catalog=folder / "catalog.toml", directory=folder / "pool", slices=1
    ) as server:
        yield server
    assert not server.leftovers()


def client_of(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=200)


@pytest.mark.parametrize("heat", [0.0, 1.0])
def test_a_pydantic_model_is_parsed(server: ServerProcess, heat: float) -> None:
    with client_of(server) as client:
        for model in ("chat", "sort", "reverse"):
            answer = client.chat.completions.parse(
                model=model, messages=MESSAGES, response_format=Person, max_tokens=300,
                temperature=heat, seed=5, n=2, logprobs=True, top_logprobs=2,
            )  # fmt: skip
            for choice in answer.choices:
                assert choice.message.parsed is not None
                assert choice.finish_reason == "stop"
                assert choice.logprobs is not None


def test_streams_say_the_same_and_stops_still_end_them(server: ServerProcess) -> None:
    with client_of(server) as client:
        for given in (
            {"json": Person.model_json_schema()}, {"regex": "[a-c]{3,9}!"},
            {"choice": ["yes", "no"]}, {"grammar": 'root ::= "a" [0-9]{3} "!"'},
            {"json_object": True},
        ):  # fmt: skip
            body: dict[str, Any] = {
                "model": "chat", "messages": MESSAGES, "max_tokens": 120, "seed": 3,
                "extra_body": {"structured_outputs": given},
            }  # fmt: skip
            whole = client.chat.completions.create(**body).choices[0].message.content
            pieces = [
                chunk.choices[0].delta.content or ""
                for chunk in client.chat.completions.create(stream=True, **body)
            ]
            assert "".join(pieces) == whole
            stopped = client.chat.completions.create(stop="!", **body).choices[0]
            assert stopped.message.content == str(whole).split("!")[0]
        choices = client.completions.create(
            model="chat", prompt="x", n=8, seed=1, extra_body={"structured_outputs": given}
        )
        assert len(choices.choices) == 8


def test_a_cut_answer_is_the_beginning_of_a_whole_one(server: ServerProcess) -> None:
    body: dict[str, Any] = {
        "model": "chat", "messages": MESSAGES, "seed": 11, "temperature": 1.0,
        "extra_body": {"structured_outputs": {"regex": "[äöü]{6,20}"}},
    }  # fmt: skip
    with client_of(server) as client:
        whole = client.chat.completions.create(max_tokens=60, **body).choices[0].message.content
        assert whole is not None
        assert re.fullmatch("[äöü]{6,20}", whole)
        for tokens in range(1, 8):
            cut = client.chat.completions.create(max_tokens=tokens, **body).choices[0]
            assert cut.finish_reason == "length"
            assert cut.message.content == whole[: tokens // 2], "no half characters"


@pytest.mark.parametrize("model", list(FORMATS))
@pytest.mark.parametrize("parallel", [True, False])
def test_required_calls(calling: ServerProcess, model: str, parallel: bool) -> None:
    with client_of(calling) as client:
        for seed in range(1):
            body: dict[str, Any] = {
                "model": model, "messages": MESSAGES, "tools": TOOLS, "tool_choice": "required",
                "parallel_tool_calls": parallel, "seed": seed, "max_tokens": 300,
            }  # fmt: skip
            choice = client.chat.completions.create(**body).choices[0]
            calls = choice.message.tool_calls or []
            assert calls
            assert parallel or (len(calls) == 1 and choice.finish_reason == "tool_calls")
            for call in calls if choice.finish_reason != "length" else calls[:-1]:
                assert call.type == "function"
                assert call.function.name in ("heat", "cool")
                assert json.loads(call.function.arguments)["level"] in ("low", "high")
            streamed: dict[int, str] = {}
            for chunk in client.chat.completions.create(stream=True, **body):
                for piece in chunk.choices[0].delta.tool_calls or ():
                    assert piece.function is not None
                    added = piece.function.arguments or ""
                    streamed[piece.index] = streamed.get(piece.index, "") + added
            assert list(streamed.values()) == [one.function.arguments for one in calls]  # pyright: ignore


@pytest.mark.parametrize("model", list(FORMATS))
def test_a_named_call(calling: ServerProcess, model: str) -> None:
    named: Any = {"type": "function", "function": {"name": "cool"}}
    with client_of(calling) as client:
        choice = client.chat.completions.create(
            model=model, messages=MESSAGES, tools=TOOLS, tool_choice=named, max_tokens=300
        ).choices[0]
    (call,) = choice.message.tool_calls or ()
    assert call.type == "function"
    assert call.function.name == "cool"
    assert set(json.loads(call.function.arguments)) == {"level"}


def test_a_killed_worker_changes_no_answer(calling: ServerProcess) -> None:
    """Its requests go on elsewhere, with the grammar where it was."""

    async def answers(kill: bool) -> list[str]:
        begun = asyncio.Event()

        async def one(index: int) -> str:
            async with openai.AsyncOpenAI(
                base_url=f"{calling.url}/v1", api_key="none", max_retries=0, timeout=200
            ) as client:
                pattern = "([a-f]{2}[0-9]{3}-){50}"
                chunks = await client.completions.create(
                    model="hermes", prompt=f"say {index}", max_tokens=240, seed=index,
                    temperature=1.0, stream=True,
                    extra_body={"structured_outputs": {"regex": pattern}},
                )  # fmt: skip
                parts: list[str] = []
                async for chunk in chunks:
                    parts += [choice.text for choice in chunk.choices]
                    if len(parts) > 20:
                        begun.set()
            text = "".join(parts)
            assert re.fullmatch("([a-f]{2}[0-9]{3}-)*", text[: len(text) // 6 * 6])
            return text

        streams = asyncio.gather(*(one(index) for index in range(8)))
        await begun.wait()
        if kill:
            os.kill((await asyncio.to_thread(calling.worker_pids))[0], signal.SIGKILL)
        return await streams

    undisturbed = asyncio.run(answers(kill=False))
    assert asyncio.run(answers(kill=True)) == undisturbed
    assert calling.state()["counters"]["resumed_requests"] > 0, "the kill hit nothing in flight"
    assert [name for name in os.listdir(calling.directory) if name.endswith(".tokens")]


@pytest.mark.parametrize("harm", [signal.SIGSTOP, signal.SIGKILL])
def test_a_grammar_process_in_trouble_holds_up_its_own_requests_only(
    calling: ServerProcess, harm: signal.Signals
) -> None:
    """They go on where they were when it answers again, or with another one."""
    body: dict[str, Any] = {
        "model": "hermes", "prompt": "x", "max_tokens": 240, "seed": 5,
        "extra_body": {"structured_outputs": {"regex": "([a-f]{2}[0-9]{3}-){30}"}},
    }  # fmt: skip
    with client_of(calling) as client:
        whole = client.completions.create(**body).choices[0].text
        chunks = client.completions.create(stream=True, **body)
        parts = [next(chunks).choices[0].text for _ in range(20)]
        (pid,) = children_of(calling.worker_pids()[0], "c2cserve.grammars.process")
        os.kill(pid, harm)
        try:
            for model in ("hermes", "llama"):
                client.completions.create(model=model, prompt="y", max_tokens=30)
        finally:
            if harm == signal.SIGSTOP:
                os.kill(pid, signal.SIGCONT)
        parts += [chunk.choices[0].text for chunk in chunks]
        assert "".join(parts) == whole
        assert calling.metric(r"c2cserve:slice_grammars_failed_total\{.*\}") == 0
