"""Contents in parts reach a template in the form that it takes, found by trying it."""

import json
from pathlib import Path
from typing import Any

import pytest

from c2cserve.server.text.tokenizer import Tokenizer

LOOP = "{% for m in messages %}[{{ m.role }}] "
# As templates of text models, of models that know images, of those that take either, and as
# Qwen3's, which asks before it calls a method of strings.
TEXT = LOOP + "{{ m.content | trim }}{% endfor %}"
PARTS = LOOP + (
    "{% for part in m.content %}{% if part.type == 'text' %}<{{ part['text'] }}>{% endif %}"
    "{% endfor %}{% endfor %}"
)
EITHER = (
    "{% macro show(content) %}{% if content is string %}{{ content }}{% else %}"
    "{% for part in content %}{{ part.text }}|{% endfor %}{% endif %}{% endmacro %}"
    + LOOP
    + "{{ show(m.content) }}{% endfor %}"
)
PARTS_OF_USERS = (
    "{% for m in messages %}{% if m.role == 'user' %}{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for part in m.content %}{{ part.text }}+{% endfor %}{% endif %}"
    "{% else %}{{ m.content | trim }};{% endif %}{% endfor %}"
)
AS_JSON = LOOP + "{{ m.content | tojson }}{# text #}{% endfor %}"
ENDLESS = LOOP + "{% for i in range(99999) %}{{ m.content }} text {% endfor %}{% endfor %}"


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


@pytest.fixture
def render(byte_dir: Path, tmp_path: Path) -> Any:
    def render(template: str, *messages: dict[str, Any]) -> str:
        (tmp_path / "tokenizer.json").write_bytes((byte_dir / "tokenizer.json").read_bytes())
        config = tmp_path / "tokenizer_config.json"
        config.write_text(json.dumps({"chat_template": template}))
        return Tokenizer(tmp_path).render([*messages], {}, 1 << 16)

    return render


@pytest.mark.parametrize(
    ("template", "of_text", "of_parts"),
    [
        (TEXT, "[user] a", "[user] b\nc"),
        (PARTS, "[user] <a>", "[user] <b><c>"),
        (EITHER, "[user] a", "[user] b|c|"),
        (PARTS_OF_USERS, "a", "b+c+"),
        (AS_JSON, '[user] "a"', '[user] "b\\nc"'),
    ],
)
def test_forms(render: Any, template: str, of_text: str, of_parts: str) -> None:
    assert render(template, {"role": "user", "content": "a"}) == of_text
    assert render(template, {"role": "user", "content": parts("b", "c")}) == of_parts


def test_each_role_has_its_form(render: Any) -> None:
    written = render(
        PARTS_OF_USERS,
        {"role": "system", "content": parts("s", "t")},
        {"role": "user", "content": parts("b", "c")},
    )
    assert written == "s\nt;b+c+"


def test_nothing_is_no_part(render: Any) -> None:
    assert render(PARTS, {"role": "assistant", "content": ""}) == "[assistant] "
    assert render(TEXT, {"role": "user", "content": parts("a")}) == "[user] a"


def test_a_trial_has_bounds(render: Any) -> None:
    with pytest.raises(ValueError, match="more than 65536 characters"):
        render(ENDLESS, {"role": "user", "content": parts("a")})
