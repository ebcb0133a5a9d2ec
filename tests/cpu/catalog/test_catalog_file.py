"""The catalogue file: what it means, and that every mistake is one line that says what to do."""

import json
from pathlib import Path

import pytest

from c2cserve.catalog.entry import CatalogError
from c2cserve.catalog.file import load_catalog
from c2cserve.catalog.parse import parse_entry
from c2cserve.core.request import Slo


def checkpoint(directory: Path, name: str = "m") -> Path:
    path = directory / name
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"")
    return path


def write(directory: Path, text: str) -> Path:
    path = directory / "catalog.toml"
    path.write_text(text)
    return path


def mistake(directory: Path, text: str) -> str:
    path = write(directory, text)
    with pytest.raises(CatalogError) as caught:
        load_catalog(path)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    assert message.startswith(str(path))
    return message.removeprefix(str(path))


def test_every_key(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    catalog = load_catalog(
        write(
            tmp_path,
            """
            [[models]]
            id = "sorter"
            aliases = ["s", "Org/Sorter-1B"]
            path = "m"
            dtype = "bfloat16"
            ttft_s = 2
            tpot_s = 0.05
            priority = -1
            pinned = true
            max_context = 4096
            keep_warm_s = 600
            """,
        )
    )
    (entry,) = catalog
    assert entry.path == tmp_path / "m"
    assert entry.slo == Slo(ttft_s=2.0, tpot_s=0.05)
    assert (entry.dtype, entry.priority, entry.pinned) == ("bfloat16", -1, True)
    assert (entry.max_context, entry.keep_warm_s) == (4096, 600.0)
    assert catalog.find("s") is entry
    assert catalog.find("Org/Sorter-1B") is entry
    assert catalog.find("m") is None


def test_defaults_fill_what_a_model_leaves_out(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    catalog = load_catalog(
        write(
            tmp_path,
            """
            [defaults]
            ttft_s = 3.0
            pinned = true
            [[models]]
            id = "a"
            path = "m"
            [[models]]
            id = "b"
            hub = "org/b"
            revision = "v2"
            ttft_s = 1.5
            pinned = false
            """,
        )
    )
    a, b = catalog.entries
    assert (a.slo.ttft_s, a.pinned, a.hub) == (3.0, True, None)
    assert (b.slo.ttft_s, b.pinned, b.hub, b.revision) == (1.5, False, "org/b", "v2")
    again = [parse_entry(values, catalog.base_dir) for values in catalog.raw]
    assert again == [a, b], "the raw entries must mean the same when read again"


def test_absolute_and_home_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = checkpoint(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    elsewhere = Path("/nowhere")
    assert parse_entry({"id": "a", "path": str(here)}, elsewhere).path == here
    assert parse_entry({"id": "a", "path": "~/m"}, elsewhere).path == here


A = '[[models]]\nid = "a"\npath = "m"\n'


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", ["no models", "[[models]]"]),
        ("models = 3", ["[[models]]"]),
        ('[[model]]\nid = "a"', ["'model'", "did you mean models?"]),
        ("[[models]]\nid=1", [":2:", "models[0]", "id = 1"]),
        ('\n[[models]]\nid = "a"\npth = "m"', [":4:", "model 'a'", "'pth'", "did you mean path?"]),
        (A + "tttf_s = 1", [":4:", "did you mean ttft_s?"]),
        (A + "zzz = 1", ["'zzz'", "known keys are aliases, dtype"]),
        ('[[models]]\npath = "m"', [":1:", "models[0]", "id is missing"]),
        ('[[models]]\nid = "a"', ["set path", "or hub"]),
        (A + 'hub = "org/m"', [":4:", "path and hub", "keep one"]),
        (A + 'revision = "main"', [":4:", "without hub"]),
        (A + 'dtype = "int8"', [":4:", "'int8'", "'bfloat16'"]),
        (A + "ttft_s = -1.0", [":4:", "-1.0", "greater than 0"]),
        (A + "tpot_s = nan", [":4:", "finite"]),
        (A + 'ttft_s = "fast"', [":4:", "'fast'", "number"]),
        (A + "pinned = 1", [":4:", "boolean"]),
        (A + "priority = true", [":4:", "true", "integer"]),
        (A + "max_context = 0", [":4:", "greater than or equal to 1"]),
        (A + 'aliases = "b"', [":4:", "list"]),
        (A + 'aliases = ["b", 3]', [":4:", "aliases.1 = 3", "string"]),
        (A + 'aliases = ["b", "a"]', [":4:", "'a'", "twice"]),
        ('[[models]]\nid = "a b"\npath = "m"', [":2:", "'a b'", "letters"]),
        ('[[models]]\nid = "a"\nhub = "a/b/c"', [":3:", "repository id"]),
        (A + A, [":5:", "'a'", "already used by model 'a'"]),
        (A + '[[models]]\nid = "b"\naliases = ["a"]\npath = "m"', [":6:", "already used by"]),
        ('[defaults]\nid = "x"\n' + A, ["[defaults]", "'id'"]),
        ("[defaults]\nttft_s = 0\n" + A, ["[defaults]", "ttft_s = 0"]),
        ("defaults = 1\n" + A, ["[defaults]"]),
        ("[[models]]\nid = ", [":2:", "not valid TOML"]),
        ("a = " + "[" * 100_000, ["not valid TOML", "nested"]),
        (A + "priority = " + "9" * 5000, ["not valid TOML", "digits"]),
        ('[[models]]\nid = "a', ["not valid TOML"]),
        ('[[models]]\nid = "a"\npath = "none"', [":3:", "none does not exist", "checkpoint"]),
        ('[[models]]\nid = "a"\npath = "m/config.json"', [":3:", "is a file"]),
        ('[[models]]\nid = "a"\npath = "empty"', [":3:", "no config.json"]),
        ('[[models]]\nid = "a"\npath = "noweights"', [":3:", ".safetensors", "incomplete"]),
        ('[[models]]\nid = "a"\npath = "pickled"', [":3:", ".safetensors", "convert"]),
        ('[[models]]\nid = "a"\npath = "gguf"', [":3:", "GGUF", "converted from"]),
        ('[[models]]\nid = "a"\npath = "gguf/m.gguf"', [":3:", "is a GGUF file", "converted"]),
        ('[[models]]\nid = "a"\npath = "lora"', [":3:", "LoRA adapter", "merge"]),
        ('[[models]]\nid = "a"\npath = "gptq"', [":3:", "quantized by GPTQ", "bfloat16"]),
        ('[[models]]\nid = "a"\npath = "sharded"', [":3:", "1 of 2", "b.safetensors"]),
    ],
)
def test_mistakes(tmp_path: Path, text: str, says: list[str]) -> None:
    checkpoint(tmp_path)
    (tmp_path / "empty").mkdir()
    for name in ("noweights", "pickled"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    (tmp_path / "pickled" / "pytorch_model.bin").write_bytes(b"")
    (tmp_path / "gguf").mkdir()
    (tmp_path / "gguf" / "m.gguf").write_bytes(b"GGUF")
    (tmp_path / "lora").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / "lora" / name).write_text("{}")
    (checkpoint(tmp_path, "gptq") / "quantize_config.json").write_text("{}")
    (tmp_path / "m" / "adapter_config.json").write_text("{}")  # merged: it is a model
    sharded = checkpoint(tmp_path, "sharded")
    (sharded / "model.safetensors").rename(sharded / "a.safetensors")
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    message = mistake(tmp_path, text)
    for part in says:
        assert part in message


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(CatalogError, match=r"none\.toml: no such file"):
        load_catalog(tmp_path / "none.toml")


def test_unreadable_text(tmp_path: Path) -> None:
    path = tmp_path / "catalog.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(CatalogError, match="cannot be read"):
        load_catalog(path)


def test_no_line_number_is_better_than_a_wrong_one(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    hidden = 'models = [{id = "a", path = "m", pinned = 3}]'
    assert mistake(tmp_path, hidden).startswith(": model 'a': pinned")


def test_a_byte_order_mark_is_no_part_of_the_file(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    path = tmp_path / "catalog.toml"
    path.write_text(A.replace("\n", "\r\n"), encoding="utf-8-sig")
    assert [entry.id for entry in load_catalog(path)] == ["a"]
