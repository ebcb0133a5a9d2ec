"""The catalogue file: TOML with a `[[models]]` table per model and optional `[defaults]`."""

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from c2cserve.catalog.entry import CatalogEntry, CatalogError
from c2cserve.catalog.parse import (
    EntrySettings,
    KeyMistake,
    check_files,
    check_keys,
    parse_entry,
    unknown_key,
)

_HEADER = re.compile(r"^\s*\[\[\s*(?:models|\"models\"|'models')\s*\]\]")
_ANY_HEADER = re.compile(r"^\s*\[")
_SYNTAX_PLACE = re.compile(r"^(?P<what>.*?)\s*\(at (?:line (?P<line>\d+).*|end of document)\)$")
_TOP_LEVEL = ("models", "defaults")


@dataclass(frozen=True, slots=True)
class Catalog:
    """The models of a deployment, in the file's order."""

    entries: tuple[CatalogEntry, ...]
    raw: tuple[dict[str, object], ...]
    """The table of each model with defaults filled in; a reload parses it again."""
    base_dir: Path
    """The directory that relative paths start from."""

    def __iter__(self) -> Iterator[CatalogEntry]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def find(self, name: str) -> CatalogEntry | None:
        """Return the entry that has this id or alias."""
        return next((entry for entry in self.entries if name in entry.names), None)


def load_catalog(path: Path, *, with_files: bool = True) -> Catalog:
    """Read and check a catalogue file; `with_files`: also that each `path` is a checkpoint.

    Raises `CatalogError`: one line that begins with the file, and with the line number if it is
    known.
    """
    text, document = _read(path)
    for key in document:
        if key not in _TOP_LEVEL:
            raise CatalogError(f"{path}: {unknown_key(key, _TOP_LEVEL)}")
    defaults = _defaults(path, document.get("defaults", {}))
    tables = _tables(path, document.get("models", []))
    lines = _EntryLines(text, len(tables))
    raw: list[dict[str, object]] = []
    entries: list[CatalogEntry] = []
    owners: dict[str, str] = {}
    for index, table in enumerate(tables):
        values = {**defaults, **table}
        try:
            entry = parse_entry(values, path.parent)
            if with_files:
                check_files(entry)
            _claim(owners, entry)
        except KeyMistake as mistake:
            place = lines.place(path, index, mistake.key)
            raise CatalogError(f"{place}: {_label(index, table)}: {mistake}") from mistake
        raw.append(values)
        entries.append(entry)
    return Catalog(tuple(entries), tuple(raw), path.parent.resolve())


def _read(path: Path) -> tuple[str, dict[str, object]]:
    try:
        text = path.read_text(encoding="utf-8-sig")  # some editors begin a file with a mark
    except FileNotFoundError as error:
        raise CatalogError(f"{path}: no such file") from error
    except OSError as error:
        raise CatalogError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CatalogError(f"{path}: cannot be read: {error}") from error
    try:
        return text, tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        place = _SYNTAX_PLACE.match(str(error))
        if place is None:
            raise CatalogError(f"{path}: not valid TOML: {error}") from error
        line = place["line"] or str(text.count("\n") + 1)
        raise CatalogError(f"{path}:{line}: not valid TOML: {place['what']}") from error
    except RecursionError as error:
        raise CatalogError(f"{path}: not valid TOML: it is nested too deeply") from error
    except ValueError as error:  # a number of thousands of digits
        raise CatalogError(f"{path}: not valid TOML: {error}") from error


def _defaults(path: Path, table: object) -> dict[str, object]:
    if not isinstance(table, dict):
        raise CatalogError(f"{path}: defaults must be a table: write [defaults]")
    values = cast("dict[str, object]", table)
    try:
        check_keys(EntrySettings, values)
    except KeyMistake as mistake:
        raise CatalogError(f"{path}: [defaults]: {mistake}") from mistake
    return values


def _tables(path: Path, models: object) -> list[dict[str, object]]:
    tables = cast("list[object]", models) if isinstance(models, list) else [models]
    if not isinstance(models, list) or not all(isinstance(table, dict) for table in tables):
        raise CatalogError(f"{path}: models must be tables: write [[models]] above each model")
    if not tables:
        raise CatalogError(f"{path}: it lists no models: add a [[models]] table with id and path")
    return cast("list[dict[str, object]]", tables)


def _claim(owners: dict[str, str], entry: CatalogEntry) -> None:
    for name in entry.names:
        key = "id" if name == entry.id else "aliases"
        if name in owners:
            raise KeyMistake(
                key, f"the name {name!r} is already used by model {owners[name]!r}: rename one"
            )
        owners[name] = entry.id


def _label(index: int, table: Mapping[str, object]) -> str:
    name = table.get("id")
    return f"model {name!r}" if isinstance(name, str) and name else f"models[{index}]"


class _EntryLines:
    """The lines of entries and keys in the text. `tomllib` keeps no positions, so a scan finds the
    headers. It is trusted only if it finds exactly as many as were parsed."""

    def __init__(self, text: str, models: int) -> None:
        self._lines = text.splitlines()
        headers = [number for number, line in enumerate(self._lines) if _HEADER.match(line)]
        self._headers = headers if len(headers) == models else []

    def place(self, path: Path, index: int, key: str) -> str:
        """Return `file:line` of a key of the entry, or of its header if the key is not written
        there."""
        if not self._headers:
            return str(path)
        start = self._headers[index]
        written = re.compile(rf"^\s*[\"']?{re.escape(key)}[\"']?\s*[.=]")
        for number in range(start + 1, len(self._lines)):
            if _ANY_HEADER.match(self._lines[number]):
                break
            if written.match(self._lines[number]):
                return f"{path}:{number + 1}"
        return f"{path}:{start + 1}"
