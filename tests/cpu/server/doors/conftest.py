"""The served fake engine, with a model that calls tools and thinks."""

import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from door_clients import CALLER
from served import BYTE, Served

TEMPLATE = (
    "{% if tools %}TOOLS{{ tools | tojson }}\n{% endif %}"
    "{% if enable_thinking is defined %}THINK={{ enable_thinking }}\n{% endif %}"
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }}"
    "{% if m.tool_call_id %}#{{ m.tool_call_id }}{% endif %}"
    "{% for call in m.tool_calls or [] %}[{{ call.function.name }}:"
    "{{ call.function.arguments.city }}]{% endfor %}\n{% endfor %}"
    "{# answer with <tool_call>{...}</tool_call> #}"
)


@pytest.fixture
def caller(served: Served, byte_dir: Path, tmp_path: Path) -> Iterator[Served]:
    path = Path(shutil.copytree(byte_dir, tmp_path / CALLER))
    (path / "chat_template.jinja").write_text(TEMPLATE)
    (path / "config.json").write_text('{"model_type": "llama"}')
    served.gateway.files[CALLER] = replace(
        served.gateway.files[BYTE], id=CALLER, path=str(path), max_context=2048,
        # Each test has a version of its own, since text processes keep tokenizers by version.
        version=f"{CALLER}#{id(tmp_path)}",
    )  # fmt: skip
    yield served
    served.gateway.files.pop(CALLER)
