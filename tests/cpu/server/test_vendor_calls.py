"""Outputs of vendors' models with calls, as their documents and other servers' tests have them.

Their special tokens are special in the vocabulary here too, so they are no part of a plain text.
"""

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from served import BYTE, Served
from small_tokenizers import EOS
from tokenizers import Tokenizer

RECORDED: list[dict[str, Any]] = json.loads(
    (Path(__file__).parent / "vendor_calls.json").read_text()
)
MARKS = [
    "<|python_tag|>", "<|eom_id|>", "<|eot_id|>", "</s>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]",
]  # fmt: skip
TAGS = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
SHOW = "{% for m in messages %}{{ m.content }}{% for call in m.tool_calls or [] %}"
CHECKED = (
    SHOW + "{% if call.id | length != 9 %}{{ raise_exception('ids have 9 letters') }}{% endif %}"
    "[{{ call.id }}]{% endfor %}{% if m.role == 'tool' %}<{{ m.tool_call_id }}>{% endif %}"
    "{% endfor %}{% if tools %}{% endif %}"
)
"""As all templates of Mistral's models do."""
ASKS = {
    "hermes": "<tool_call>", "llama3": '{"parameters": ...}', "mistral": "[TOOL_CALLS]",
    "mistral_args": "[TOOL_CALLS] [ARGS]",
}  # fmt: skip

Vendors = tuple[Served, Tokenizer]


@pytest.fixture(params=["tags are plain", "tags are special"])
def vendors(
    served: Served, byte_dir: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Vendors]:
    """A server with a model for each format, with the vendors' special tokens."""
    tokenizer = Tokenizer.from_file(str(byte_dir / "tokenizer.json"))
    tokenizer.add_special_tokens(MARKS)
    add = tokenizer.add_special_tokens if "special" in request.param else tokenizer.add_tokens
    add(TAGS)
    files = served.gateway.files[BYTE]
    for name, asks in ASKS.items():
        for open_thought in ("", "<think>"):
            path = Path(shutil.copytree(byte_dir, tmp_path / f"{name}{bool(open_thought)}"))
            tokenizer.save(str(path / "tokenizer.json"))
            template = f"{CHECKED}{{# {asks} #}}{open_thought}"
            (path / "chat_template.jinja").write_text(template)
            model = name + open_thought
            served.gateway.files[model] = replace(
                files, id=model, path=str(path), max_context=2048, version=f"{name}#{path}",
                vocab_size=tokenizer.get_vocab_size(),
            )  # fmt: skip
    yield served, tokenizer
    for name in ASKS:
        served.gateway.files.pop(name)
        served.gateway.files.pop(f"{name}<think>")


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda one: one["source"])
def test_a_recorded_output_is_read(vendors: Vendors, recorded: dict[str, Any]) -> None:
    served, tokenizer = vendors
    served.says([*tokenizer.encode(recorded["output"], add_special_tokens=False).ids, EOS])
    thinking = "<think>" if recorded.get("thinking") else ""
    body: dict[str, Any] = {
        "model": recorded["format"] + thinking, "max_tokens": 900,
        "messages": [{"role": "user", "content": "x"}],
        "tools": [
            {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
            for name in {name for name, _ in recorded["calls"]}
        ],
        "extra_body": {"separate_reasoning": True},
    }  # fmt: skip
    create = served.client.chat.completions.create
    message = create(**body).choices[0].message
    calls = [(one.function.name, json.loads(one.function.arguments)) for one in message.tool_calls]
    assert calls == [(name, arguments) for name, arguments in recorded["calls"]]
    assert message.content == recorded.get("content")
    assert getattr(message, "reasoning_content", None) == recorded.get("reasoning")

    deltas = [chunk.choices[0].delta for chunk in create(stream=True, **body)]
    streamed = [call.function for delta in deltas for call in delta.tool_calls or ()]
    assert [(one.name, json.loads(one.arguments)) for one in streamed] == calls
    assert "".join(delta.content or "" for delta in deltas).strip() == (
        recorded.get("content", "").strip()
    )


@pytest.mark.parametrize("model", ["mistral", "mistral_args"])
def test_ids_of_calls_have_the_length_that_templates_of_mistral_demand(
    vendors: Vendors, model: str
) -> None:
    """Whatever server they are of. Ids that have it stay as they are."""
    served, tokenizer = vendors
    served.says([*tokenizer.encode("fine", add_special_tokens=False).ids, EOS])
    function = {"name": "add", "arguments": "{}"}
    ids = ["call_0123456789abcdef", "toolu_1", "VvvODy9mT"]
    calls = [{"id": one, "type": "function", "function": function} for one in ids]
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        *({"role": "tool", "tool_call_id": one, "content": ""} for one in ids),
    ]
    body = {"model": model, "messages": messages}
    assert served.http.post("/v1/chat/completions", json=body).status_code == 200
    prompt = tokenizer.decode(list(served.job.tokens))
    called, answered = re.findall(r"\[(\w{9})\]", prompt), re.findall(r"<(\w{9})>", prompt)
    assert called == answered
    assert len(set(called)) == 3
    assert called[2] == "VvvODy9mT"


def test_marks_are_no_text_where_nothing_is_read(vendors: Vendors) -> None:
    served, tokenizer = vendors
    served.says([*tokenizer.encode("a[TOOL_CALLS]b", add_special_tokens=False).ids, EOS])
    body = {"model": "mistral", "messages": [{"role": "user", "content": "x"}]}
    answer = served.http.post("/v1/chat/completions", json=body).json()
    assert answer["choices"][0]["message"]["content"] == "ab"
