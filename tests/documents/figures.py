"""Figures in prose and the results that they are read from.

A figure is followed, on its line, by a comment that says where it comes from:

    A switch takes 0.56 ms. <!-- 0.56 = engine/first GEMM, p50/seconds ms -->

Left of `=` is the figure as shown; right of it a key, and a unit if the file has another. A ratio
is `key over key`; several figures are separated by `;`. A key is a path into a file of
benchmarks/results: `FILE.json results/limits/hbm_bytes_per_s`, or, after

    <!-- file engine = gpu_engine_h200x2.json results/shapes/llama-8b/figures -->

anywhere above, `engine/...`. A part of a path is a name; in a list it is `name=value,name=value`,
or the text, or a piece of the text, that one element alone has. `\\/` is a slash in a name or
text. The figure must be the value rounded to the digits that are shown.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import ROUND_HALF_EVEN, Decimal
from functools import cache
from typing import Any

from documents import RESULTS
from documents.pages import Line, Page

_NUMBER = re.compile(r"(?<![\w.,])[-+]?\d+(?:,\d{3})*(?:\.\d+)?")
_UNITS = {"": 1.0, "ms": 1e3, "us to ms": 1e-3, "s to min": 1 / 60, "GB": 1e-9, "%": 1e2}
"""What a value (seconds, bytes, a share) is multiplied with to be shown."""
_MARK = re.compile(
    r"^(?P<shown>[-+]?[\d,.]+) = (?P<key>.+?)(?: (?P<unit>ms|us to ms|s to min|GB|%))?$"
)


class FigureError(AssertionError):
    """A figure without a result, or another than its result."""


@dataclass(frozen=True, slots=True)
class Mark:
    shown: str
    value: float

    def check(self) -> None:
        """Raise FigureError if the result is not what is shown."""
        shown = Decimal(self.shown.replace(",", ""))
        value = Decimal(repr(self.value))
        half = Decimal(1).scaleb(int(shown.as_tuple().exponent)) / 2
        if abs(value - shown) > half * Decimal("1.000001"):
            rounded = value.quantize(shown, ROUND_HALF_EVEN)
            raise FigureError(f"{self.shown} is shown, the result is {rounded} ({self.value!r})")


def marks(page: Page) -> Iterator[tuple[Line, list[Mark]]]:
    """Yield every line of the page outside of code blocks with its marks. Raises FigureError."""
    files: dict[str, str] = {}
    for line in page.lines:
        if line.language is not None:
            continue
        found: list[Mark] = []
        for comment in map(str.strip, line.comments):
            if named := re.match(r"file (\w+) = (\S+\.json)(?: (\S+))?$", comment):
                files[named[1]] = f"{named[2]} {named[3] or ''}".strip()
                continue
            for part in comment.split(";"):
                try:
                    found.append(_mark(part.strip(), files))
                except (KeyError, FigureError) as error:
                    raise FigureError(f"{page}:{line.number}: {part.strip()}: {error}") from error
        yield line, found


def numbers(text: str) -> list[str]:
    """Return the numbers of a line of prose, as they are shown."""
    return _NUMBER.findall(text)


def _mark(text: str, files: dict[str, str]) -> Mark:
    mark = _MARK.match(text)
    if mark is None:
        raise FigureError("not `FIGURE = KEY`")
    key, _, divisor = mark["key"].partition(" over ")
    value = _value(key, files) / (_value(divisor, files) if divisor else 1.0)
    return Mark(mark["shown"], value * _UNITS[mark["unit"] or ""])


def _value(key: str, files: dict[str, str]) -> float:
    alias = key.partition("/")[0]
    if alias in files:
        key = files[alias] + ("/" if " " in files[alias] else " ") + key.removeprefix(f"{alias}/")
    name, _, path = key.partition(" ")
    found: Any = _load(name)
    for part in re.split(r"(?<!\\)/", path):
        found = _element(found, part.replace("\\/", "/"))
    if isinstance(found, bool) or not isinstance(found, int | float):
        raise FigureError(f"not a number: {str(found)[:60]}")
    return float(found)


def _element(found: Any, part: str) -> Any:
    if isinstance(found, dict):
        if part not in found:
            raise FigureError(f"no {part!r} among {', '.join(map(repr, list(found)[:8]))}")
        return found[part]
    if not isinstance(found, list):
        raise FigureError(f"nothing is below {part!r}")
    if "=" in part:
        wanted = [condition.partition("=") for condition in part.split(",")]
        fit = [one for one in found if all(str(one.get(name)) == v for name, _, v in wanted)]
    else:
        texts = [[text for text in one.values() if isinstance(text, str)] for one in found]
        fit = [one for one, own in zip(found, texts, strict=True) if part in own]
        if not fit:
            own_texts = zip(found, texts, strict=True)
            fit = [one for one, own in own_texts if any(part in text for text in own)]
    if len(fit) != 1:
        raise FigureError(f"{len(fit)} elements are {part!r}, not one")
    return fit[0]


@cache
def _load(name: str) -> Any:
    path = RESULTS / name
    if not path.is_file():
        raise FigureError(f"no file benchmarks/results/{name}")
    return json.loads(path.read_text())
