"""The project's Markdown pages: lines with and without code, links, anchors, code spans."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from documents import ROOT

_COMMENT = re.compile(r"<!--(.*?)-->")
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_TARGET = re.compile(r"\]\(([^)\s]+)\)")
"""A link's text may begin on the line before."""
_SPAN = re.compile(r"`([^`\n]+)`")


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a page. `text` is what a reader sees of it, without `comments`."""

    number: int
    text: str
    comments: tuple[str, ...]
    language: str | None
    """Of the fenced block that the line is in; "" where the fence names none, None outside."""

    @property
    def prose(self) -> str:
        """The text without code spans and without the targets of links."""
        return _SPAN.sub(" ", _LINK.sub(lambda link: _words_of(link[0]), self.text))


@dataclass(frozen=True)
class Page:
    path: Path

    def __str__(self) -> str:
        return str(self.path.relative_to(ROOT) if self.path.is_relative_to(ROOT) else self.path)

    @cached_property
    def lines(self) -> list[Line]:
        found: list[Line] = []
        language: str | None = None
        for number, text in enumerate(self.path.read_text().splitlines(), 1):
            if text.lstrip().startswith("```"):
                language = text.strip().removeprefix("```") if language is None else None
                continue
            comments = tuple(_COMMENT.findall(text)) if language is None else ()
            shown = _COMMENT.sub("", text) if language is None else text
            if language is None:
                assert "<!--" not in shown, f"{self}:{number}: a comment must end on its line"
            found.append(Line(number, shown, comments, language))
        return found

    @cached_property
    def anchors(self) -> set[str]:
        """Fragments that GitHub gives to the headings."""
        seen: Counter[str] = Counter()
        anchors: set[str] = set()
        for line in self.lines:
            if line.language is None and (heading := re.match(r"#{1,6} +(.*)", line.text)):
                words = re.sub(r"[^\w\- ]", "", heading[1].strip().lower()).replace(" ", "-")
                anchors.add(words if not seen[words] else f"{words}-{seen[words]}")
                seen[words] += 1
        return anchors

    def links(self) -> Iterator[tuple[Line, str]]:
        for line in self.lines:
            if line.language is None:
                for target in _TARGET.findall(_SPAN.sub("", line.text)):
                    yield line, target

    def spans(self) -> Iterator[tuple[Line, str]]:
        for line in self.lines:
            if line.language is None:
                for text in _SPAN.findall(line.text):
                    yield line, text


def _words_of(link: str) -> str:
    return link.partition("](")[0].lstrip("![")


def pages() -> list[Page]:
    paths = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
    return [Page(path) for path in [*paths, *sorted((ROOT / "examples").rglob("*.md"))]]
