"""Small readers of `/proc` and `/sys` text. Roots are arguments, so that tests use recordings."""

from collections.abc import Iterator
from pathlib import Path


def read_text(path: Path) -> str | None:
    """Return the file's text without surrounding white space. Return None if it is missing or must
    not be read: kernels and containers differ in what they show."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return None


def read_int(path: Path) -> int | None:
    """Return the integer in a file; None if it is missing or holds something else ("max")."""
    text = read_text(path)
    return int(text) if text is not None and text.lstrip("-").isdigit() else None


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """Parse a list: `0-3,8` -> (0, 1, 2, 3, 8)."""
    cpus: list[int] = []
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if first:
            cpus.extend(range(int(first), int(last or first) + 1))
    return tuple(cpus)


def format_cpu_list(cpus: tuple[int, ...]) -> str:
    """Format a list: (0, 1, 2, 3, 8) -> `0-3,8`."""
    return ",".join(
        str(first) if first == last else f"{first}-{last}" for first, last in _runs(sorted(cpus))
    )


def _runs(cpus: list[int]) -> Iterator[tuple[int, int]]:
    start = 0
    for index in range(1, len(cpus) + 1):
        if index == len(cpus) or cpus[index] != cpus[index - 1] + 1:
            yield cpus[start], cpus[index - 1]
            start = index


def parse_fields(text: str) -> dict[str, str]:
    """Parse lines `key : value` of `/proc/cpuinfo` (one block) or `/proc/meminfo`. The first line
    of a key counts."""
    fields: dict[str, str] = {}
    for line in text.splitlines():
        key, colon, value = line.partition(":")
        if colon:
            fields.setdefault(key.strip(), value.strip())
    return fields
