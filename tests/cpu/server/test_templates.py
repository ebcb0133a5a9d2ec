"""Chat templates render as transformers renders them."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from served import BYTE, Served
from transformers import PreTrainedTokenizerFast

from c2cserve.server.text.tokenizer import Tokenizer
from c2cserve.server.text.vocabulary import TokenizerError

CHAT = [
    {"role": "system", "content": "be <brief> & kind"},
    {"role": "user", "content": " 你好\n"},
    {"role": "assistant", "content": "yes?"},
    {"role": "user", "content": "x"},
]
TEMPLATES = [
    "{{ bos_token }}{% for m in messages %}\n    {% if m.role == 'system' %}\n{% continue %}\n"
    "    {% endif %}\n[{{ m.role }}] {{ m.content | trim }}{{ eos_token }}\n{% endfor %}",
    "{%- set ns = namespace(last=0) %}{%- for m in messages %}{%- set ns.last = loop.index0 %}"
    "{%- if loop.index0 == 2 %}{%- break %}{%- endif %}{{ m | tojson }}{%- endfor %}{{ ns.last }}",
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}",
    "{{ messages[0] | tojson(indent=2) }}{{ messages | tojson(separators=(',', ':')) }}"
    "{{ messages[1] | tojson(ensure_ascii=true) }}",
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    "{{ messages[-1]['content'].split('x')[-1].strip() }}{{ add_generation_prompt }}",
]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("extra", [{}, {"enable_thinking": False}])
def test_like_transformers(
    byte_dir: Path, tmp_path: Path, template: str, extra: dict[str, Any]
) -> None:
    (tmp_path / "tokenizer.json").write_bytes((byte_dir / "tokenizer.json").read_bytes())
    config = {"bos_token": "<|bos|>", "eos_token": {"content": "<|eos|>", "special": True}}
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({**config, "chat_template": template})
    )
    theirs = PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json"), bos_token="<|bos|>", eos_token="<|eos|>"
    )
    expected = theirs.apply_chat_template(
        CHAT, chat_template=template, tokenize=False, add_generation_prompt=True, **extra
    )
    assert Tokenizer(tmp_path).render(CHAT, extra) == expected


@pytest.mark.parametrize(
    "written", [5, ["x"], [{"name": "default"}], [{"name": 1, "template": "x"}], "{% if"]
)
def test_templates_of_the_wrong_kind(byte_dir: Path, tmp_path: Path, written: object) -> None:
    (tmp_path / "tokenizer.json").write_bytes((byte_dir / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": written}))
    with pytest.raises(TokenizerError, match="template cannot be read"):
        Tokenizer(tmp_path)


def test_chats_with_tools_may_have_a_template_of_their_own(byte_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((byte_dir / "tokenizer.json").read_bytes())
    written = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "{{ tools }}<tool_call>"},
    ]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": written}))
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.call_format == "hermes"
    assert tokenizer.render(CHAT, {}) == "plain"
    assert tokenizer.render(CHAT, {"tools": [1]}) == "[1]<tool_call>"


def test_refusals_are_logged(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "c2cserve.server"):
        answer = served.http.post("/v1/completions", json={"model": BYTE, "prompt": 5})
    (line,) = [vars(record) for record in caplog.records if "status" in vars(record)]
    assert (line["status"], line["route"]) == (400, "/v1/completions")
    assert line["request_id"] == answer.headers["x-request-id"]
