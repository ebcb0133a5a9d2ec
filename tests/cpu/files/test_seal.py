"""Noticing that files are not what they were."""

import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from c2cserve.files.reading import FileProblem, is_file, one_line, read_object
from c2cserve.files.seal import seal_files


def rewrite(path: Path) -> None:
    """Other bytes of the same length, in the same file, at the same time."""
    before = path.stat()
    path.write_bytes(path.read_bytes().replace(b"a", b"b"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


CHANGES: list[tuple[str, Callable[[Path], object]]] = [
    ("digest", rewrite),
    ("size", lambda path: path.write_bytes(path.read_bytes() + b" ")),
    ("mtime_ns", lambda path: os.utime(path, ns=(1, 1))),
    ("inode", lambda path: path.write_bytes(path.rename(path.with_suffix(".old")).read_bytes())),
    ("gone", lambda path: path.unlink()),
    ("not a regular file", lambda path: (path.unlink(), path.mkdir())),
]


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize(("what", "change"), CHANGES, ids=[what for what, _ in CHANGES])
def test_each_change_is_named(
    tmp_path: Path, name: str, what: str, change: Callable[[Path], object]
) -> None:
    header = b'{"a": 1}'
    path = tmp_path / name
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"weights")
    seal = seal_files([path, tmp_path / "absent"])
    assert seal.changed() is None
    change(path)
    reason = seal.changed()
    assert reason is not None
    assert reason.startswith(name)
    assert what in reason


def weights(path: Path, value: bytes) -> None:
    """A safetensors file of some 256 KiB, all of one value."""
    header = b'{"a": 1}'
    path.write_bytes(struct.pack("<Q", len(header)) + header + value * (256 << 10))


def test_weights_rewritten_in_place_are_a_change(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    weights(path, b"a")
    seal, before = seal_files([path]), path.stat()
    weights(path, b"b")  # of the same size and header, in the same file
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert seal.changed() == "model.safetensors (other samples)"


def test_other_permissions_are_no_change(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    weights(path, b"a")
    seal = seal_files([path])
    path.chmod(0o600)
    os.link(path, tmp_path / "backup")
    assert seal.changed() is None


def test_a_file_that_appears_is_a_change(tmp_path: Path) -> None:
    seal = seal_files([tmp_path / "chat_template.jinja"])
    (tmp_path / "chat_template.jinja").touch()
    assert seal.changed() == "chat_template.jinja (is new)"


def test_reading_ends_whatever_lies_there(tmp_path: Path) -> None:
    path = tmp_path / "file"
    assert read_object(path, 100) is None
    os.mkfifo(path)
    with pytest.raises(FileProblem, match="not a regular file"):
        read_object(path, 100)
    path.unlink()
    path.write_text('{"a": "' + "x" * 100 + '"}')
    with pytest.raises(FileProblem, match="more than the 100 bytes"):
        read_object(path, 100)
    assert not is_file(tmp_path / ("x" * 5000))
    assert not is_file(tmp_path / "a\0b")
    assert one_line("a\nb\x1b" + "c" * 1000, 20) == "a\\nb\\x1b" + "c" * 9 + "..."
