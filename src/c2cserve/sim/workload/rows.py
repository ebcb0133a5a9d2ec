"""Traces as they are in their files: rows of time, source and lengths."""

import csv
import gzip
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import IO

PREFIX_BLOCK_TOKENS = 512
"""Block size of Mooncake's traces."""
_SURPLUS = "\0"
"""The key of fields without a column. An empty name may be that of an index."""
_NAMED = 6
"""Columns that an error names."""
_TIME_MOST_S = 1e9
"""Thirty years: later times are those of a calendar, or a mistake."""


@dataclass(frozen=True, slots=True)
class Row:
    """One request. `source`: the function, tenant or model it belongs to, "" where the trace does
    not say; lengths are 0 where it does not. `seen`: prompt tokens that an earlier prompt began
    with."""

    t_s: float
    source: str
    prompt: int = 0
    output: int = 0
    seen: int = 0


class TraceError(ValueError):
    """The file is not a trace that can be read; one line that says why."""


Fields = Mapping[str, str]


def _open(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    return path.open(encoding="utf-8-sig", newline="")


def fields(path: Path) -> Iterator[Fields]:
    """Yield the rows of a CSV file, plain or gzip. Raises OSError, TraceError."""
    with _open(path) as file:
        try:
            for number, line in enumerate(csv.DictReader(file, restkey=_SURPLUS), 2):
                if _SURPLUS in line:
                    raise TraceError(f"{path.name}:{number} has more fields than columns")
                yield line
        except (gzip.BadGzipFile, UnicodeDecodeError, csv.Error, EOFError) as error:
            raise TraceError(f"{path.name} is not CSV: {error}") from error


def columns(path: Path) -> frozenset[str]:
    """Return the columns of a CSV file. Raises OSError, TraceError."""
    with _open(path) as file:
        try:
            return frozenset(csv.DictReader(file).fieldnames or ())
        except (gzip.BadGzipFile, UnicodeDecodeError, csv.Error, EOFError) as error:
            raise TraceError(f"{path.name} is not CSV: {error}") from error


def _function(row: Fields) -> Row:
    return Row(_time(row, "t_s"), row["func"], *_lengths(row))


def _single(row: Fields) -> Row:
    return Row(_time(row, "t_s"), "", *_lengths(row))


def _model(row: Fields) -> Row:
    return Row(_time(row, "t_s"), row["model"])


def _blocks(row: Fields) -> Row:
    seen = _count(row, "prefix_blocks_seen", 0) * PREFIX_BLOCK_TOKENS
    prompt, output = _lengths(row)
    return Row(_time(row, "t_ms") / 1e3, "", prompt, output, min(seen, prompt - 1))


def _lengths(row: Fields) -> tuple[int, int]:
    return _count(row, "input_tokens", 1), _count(row, "output_tokens", 0)


def _count(row: Fields, column: str, least: int) -> int:
    """Raises ValueError with one line that says what is wrong."""
    try:
        value = int(row[column])
    except (ValueError, TypeError):
        raise ValueError(f"{column} is no whole number: {row[column] or ''!r}") from None
    if value < least:
        raise ValueError(f"{column} is {value}, and at least {least} is needed")
    return value


def _time(row: Fields, column: str) -> float:
    """Raises ValueError with one line that says what is wrong."""
    try:
        value = float(row[column])
    except (ValueError, TypeError):
        raise ValueError(f"{column} is no number: {row[column] or ''!r}") from None
    if not isfinite(value):
        raise ValueError(f"{value} is not a finite time")
    if not 0.0 <= value <= _TIME_MOST_S * (1e3 if column == "t_ms" else 1.0):
        raise ValueError(f"{column} is {row[column]}: times count from the trace's begin")
    return value


READERS: tuple[tuple[frozenset[str], Callable[[Fields], Row]], ...] = (
    (frozenset({"t_s", "func", "input_tokens", "output_tokens"}), _function),
    (frozenset({"t_s", "input_tokens", "output_tokens"}), _single),
    (frozenset({"t_s", "model"}), _model),
    (frozenset({"t_ms", "input_tokens", "output_tokens", "prefix_blocks_seen"}), _blocks),
)
"""Columns that a file must have, and its reader. The first that fits reads it."""


def read(path: Path, where: Mapping[str, str] | None = None) -> list[Row]:
    """Read a trace with one line per request, and return its requests by time.

    `where`: keep only lines with these values. Raises OSError, TraceError."""
    rows: list[Row] = []
    reader: Callable[[Fields], Row] | None = None
    wanted = dict(where or {})
    for number, line in enumerate(fields(path), 2):
        if reader is None:
            reader = _reader(path, line, wanted)
        if any(line[column] != value for column, value in wanted.items()):
            continue
        try:
            row = reader(line)
        except ValueError as error:
            raise TraceError(f"{path.name}:{number}: {error}") from error
        rows.append(row)
    if not rows:
        raise TraceError(f"{path.name} has no requests" + (" like these" if wanted else ""))
    return sorted(rows, key=lambda row: row.t_s)


def _reader(path: Path, line: Fields, where: Iterable[str]) -> Callable[[Fields], Row]:
    for column in where:
        if column not in line:
            raise TraceError(f"{path.name} has no column {column!r}; it has {_some(line)}")
    for columns, reader in READERS:
        if columns <= line.keys():
            return reader
    if {"input_tokens", "output_tokens"} <= line.keys() or {"q", "value"} <= line.keys():
        raise TraceError(f"{path.name} has lengths and no times: use it with --lengths")
    raise unknown_columns(path, line)


def unknown_columns(path: Path, found: Iterable[str]) -> TraceError:
    """Return the error for a file that is no trace; it names the first few columns."""
    return TraceError(f"{path.name} has columns that no trace has: {_some(found)}")


def _some(columns: Iterable[str]) -> str:
    """Return the first few of the names, and how many there are besides."""
    names = list(columns)
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
