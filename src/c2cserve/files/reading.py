"""Bounded reads of files from untrusted authors.

A checkpoint directory may hold anything: a pipe in the place of a file, a gigabyte of JSON, JSON a
million levels deep. Every read ends soon, with the content or with a one-line error.
"""

import json
import os
import stat
from pathlib import Path
from typing import Any, cast

CONFIG_BYTES_MAX = 4 << 20
"""config.json, generation_config.json and templates: real ones take some kilobytes."""
INDEX_BYTES_MAX = 64 << 20
TOKENIZER_BYTES_MAX = 256 << 20
_DEPTH_MAX = 64
_SHOWN_CHARS = 400


class FileProblem(ValueError):
    """A file cannot be used; the message is one line that names it and says why."""


def one_line(text: object, most_chars: int = _SHOWN_CHARS) -> str:
    """Return a text, which may come from a file, fit for one line of a log or a terminal."""
    line = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in str(text))
    return line if len(line) <= most_chars else line[: most_chars - 3] + "..."


def open_regular(path: Path) -> int:
    """Return a descriptor to read from. Raises OSError, and FileProblem if it is not a regular
    file."""
    # Without O_NONBLOCK a pipe in the place of a file would wait for its writer.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise FileProblem(f"{path}: not a regular file")
    return fd


def read_bytes(path: Path, most_bytes: int) -> bytes | None:
    """Return all of a file, None if there is no file of that name. Raises FileProblem."""
    try:
        with open(open_regular(path), "rb") as file:
            data = file.read(most_bytes + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise FileProblem(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:  # a NUL byte in its name
        raise error if isinstance(error, FileProblem) else FileProblem(one_line(error)) from error
    if len(data) > most_bytes:
        raise FileProblem(f"{path}: more than the {most_bytes} bytes that such a file may have")
    return data


def read_text(path: Path, most_bytes: int) -> str | None:
    """Return all of a UTF-8 file, None if there is no file of that name. Raises FileProblem."""
    data = read_bytes(path, most_bytes)
    try:
        return None if data is None else data.decode()
    except UnicodeDecodeError as error:
        raise FileProblem(f"{path}: not UTF-8: {error.reason} at byte {error.start}") from error


def read_object(path: Path, most_bytes: int) -> dict[str, Any] | None:
    """Return the object in a JSON file, None if there is no such file. Raises FileProblem."""
    text = read_text(path, most_bytes)
    if text is None:
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FileProblem(f"{path}: not readable as JSON: {one_line(error)}") from error
    if not isinstance(value, dict):
        raise FileProblem(f"{path}: it holds a {type(value).__name__}, not an object")
    if not _shallow(value):
        raise FileProblem(f"{path}: JSON of more than {_DEPTH_MAX} levels")
    return cast("dict[str, Any]", value)


def _shallow(value: object) -> bool:
    level = [value]
    for _ in range(_DEPTH_MAX):
        inner: list[object] = []
        for one in level:
            if isinstance(one, dict):
                inner += cast("dict[str, object]", one).values()
            elif isinstance(one, list):
                inner += cast("list[object]", one)
        if not inner:
            return True
        level = inner
    return False


def is_file(path: Path) -> bool:
    """Return whether there is a regular file of that name. Never raises."""
    try:
        return path.is_file()
    except (OSError, ValueError):  # too long a name, no right to look, a NUL byte
        return False
