"""What a checkpoint recommends for sampling is read within bounds, or the mistake is named."""

import json
from pathlib import Path

import pytest

from c2cserve.catalog.entry import CatalogError
from c2cserve.catalog.generation import chosen_defaults, read_defaults
from c2cserve.core.request import SamplingDefaults

# As published with Qwen3.
PUBLISHED = {
    "bos_token_id": 151643, "do_sample": True, "eos_token_id": [151645, 151643],
    "pad_token_id": 151643, "temperature": 0.6, "top_k": 20, "top_p": 0.95,
    "transformers_version": "4.51.0",
}  # fmt: skip


def write(directory: Path, content: object) -> Path:
    (directory / "generation_config.json").write_text(json.dumps(content))
    return directory


def test_a_published_file(tmp_path: Path) -> None:
    found = read_defaults(write(tmp_path, PUBLISHED))
    assert found == SamplingDefaults(temperature=0.6, top_p=0.95, top_k=20)
    assert str(found) == "temperature 0.6, top_p 0.95, top_k 20"


def test_all_fields(tmp_path: Path) -> None:
    fields = {
        "temperature": 1, "top_p": 0.5, "top_k": 50.0, "min_p": 0.05, "repetition_penalty": 1.1,
        "max_new_tokens": 2048,
    }  # fmt: skip
    assert read_defaults(write(tmp_path, fields)) == SamplingDefaults(1.0, 0.5, 50, 0.05, 1.1, 2048)


def test_nothing_is_said(tmp_path: Path) -> None:
    assert read_defaults(tmp_path) == SamplingDefaults()
    assert read_defaults(write(tmp_path, {"temperature": None})) == SamplingDefaults()
    assert str(SamplingDefaults()) == ""


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "hot"), ("temperature", -1), ("temperature", True), ("top_p", 0),
        ("top_p", 1.5), ("top_k", 1.5), ("top_k", -2), ("min_p", 2), ("repetition_penalty", 0),
        ("max_new_tokens", 0), ("max_new_tokens", [1]), ("temperature", 1e999),
        ("top_k", 10**400),
    ],
)  # fmt: skip
def test_a_mistake_is_named(tmp_path: Path, field: str, value: object) -> None:
    with pytest.raises(CatalogError, match=field) as caught:
        read_defaults(write(tmp_path, {field: value}))
    assert "generation_config.json" in str(caught.value)
    assert "--generation-config none" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_option(tmp_path: Path) -> None:
    assert chosen_defaults("auto") is None
    assert chosen_defaults("none") == chosen_defaults("vllm") == SamplingDefaults()
    assert chosen_defaults(str(write(tmp_path, PUBLISHED))) == read_defaults(tmp_path)
    with pytest.raises(CatalogError, match=r"generation_config\.json: no such file"):
        chosen_defaults(str(tmp_path / "none"))
