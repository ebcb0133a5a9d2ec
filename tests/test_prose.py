"""English and names as CONTRIBUTING.md asks for them, as far as a program can tell.

The rules hold for docstrings, comments and names in `src`, and for the Markdown pages. Print the
hits of a folder with `python tests/test_prose.py src/c2cserve/policy`.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Literal

import pytest
from documents import ROOT
from documents.pages import Page

SRC = ROOT / "src" / "c2cserve"

SENTENCE_WORDS_MAX = 25
Kind = Literal["docstring", "comment", "page", "name"]


def _words(*words: str) -> re.Pattern[str]:
    return re.compile(rf"\b(?:{'|'.join(words)})\b", re.IGNORECASE)


PERSONS = _words(
    "whoever", "whomever", "nobody", "somebody", "everybody", "anybody", "everyone", "someone",
    "no one", "he", "his", "him", "she",
)  # fmt: skip
CAN_NOT = _words(r"can\s+not")
FRAGMENT = re.compile(
    r"(?:Of|For|In|On|By|From|With|Without|At|To|As|Under|Over|After|Before|Beside|Out|Until)\b"
)
METAPHORS = _words(
    "houses?", "lodges?", "lodgers?", "lodging", "bells?", "flights", "seats?", "seated",
    "stand-ins?", "fixed rows", "residences?", "relief",
)  # fmt: skip
"""Words with a standard term, which prose has no other use for."""

STANDARD_TERM = {
    "house": "shared GPU process", "lodge": "join", "lodger": "member", "lodgers": "members",
    "fall": "abort together", "rotary": "kv_rotation", "residence": "pool residency",
    "shifts": "weight swapping", "flights": "in flight",
    "bell": "completion notifier", "seat": "bind", "seats": "bindings", "seated": "bound",
    "stand": "placeholder weights", "draw": "sample", "drawn": "sampled", "turned": "rotated",
    "early": "programmatic dependent launch", "kept": "weight cache", "relief": "bottleneck",
    "leaving": "disconnect, victim", "told": "notified", "look": "refresh", "looks": "refreshes",
    "settle": "copy in", "nobody": "a name of the thing", "whoever": "a name of the thing",
}  # fmt: skip
"""A word in a name, and what to say for it."""
STANDARD_NAME = {"met": "seen", "known": "profiled", "ahead": "lookahead", "shift": "swap"}
"""The same of words that are wrong only as a whole name."""
ONE_CLASS_EACH = {"Job", "Turn", "Choice", "Move", "World", "Lane"}

NAMES_THAT_STAY = {
    "ahead": "what stands before a request in a queue",
    "kept": "a field of an action, which records hold",
    "drawn": "a field of an outcome, which records hold",
    "refused_early": "a name in /metrics",
    "weights_kept_bytes": "a name in /metrics",
    "WEIGHTS_KEPT_BYTES": "a name in /metrics",
}
ONLY_IN = {
    "known": ("kernels", "policy", "profiling"),
    "met": ("core", "policy"),  # elsewhere targets are met
    "settle": ("engine", "kernels"),  # elsewhere accounts are settled
    "shift": ("policy",),  # elsewhere bits are shifted
}
"""Folders of `src/c2cserve` that a word is wrong in; the others mean something else by it."""
PHRASES_THAT_STAY: dict[str, str] = {}
"""Quotations and names of others, as regular expressions, with why."""


@dataclass(frozen=True, slots=True)
class Passage:
    """A paragraph, a list's item, a table's cell or a comment, with its lines as they are."""

    path: Path
    line: int
    text: str
    kind: Kind
    first: bool = False
    """Whether it begins a docstring."""


@dataclass(frozen=True, slots=True)
class Hit:
    path: Path
    line: int
    text: str
    rule: str

    def __str__(self) -> str:
        path = self.path.relative_to(ROOT) if self.path.is_relative_to(ROOT) else self.path
        return f"{path}:{self.line}: {self.rule}\n    {self.text}"


# ---- What there is to read ----------------------------------------------------------------------

_ITEM = re.compile(r"\s*(?:[-*]|\d+\.)\s+")
_ROW = re.compile(r"\S {3,}\S")


def passages_of(path: Path) -> Iterator[Passage]:
    if path.suffix == ".md":
        lines = Page(path).lines
        shown = [(line.number, line.text if line.language is None else "") for line in lines]
        yield from _passages(path, shown, "page")
        return
    source = path.read_text()
    yield from _docstrings(path, ast.parse(source))
    yield from _comments(path, source)


def _docstrings(path: Path, tree: ast.Module) -> Iterator[Passage]:
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                lines = _dedented(text, node.lineno, node.col_offset)
                for number, passage in enumerate(_passages(path, lines, "docstring")):
                    first = number == 0 and passage.line == node.lineno
                    yield Passage(path, passage.line, passage.text, "docstring", first)
            case _:
                pass


def _dedented(text: str, number: int, column: int) -> list[tuple[int, str]]:
    head, *tail = text.splitlines() or [""]
    lines = [head.strip(), *(line.removeprefix(" " * column) for line in tail)]
    fenced, shown = False, list[tuple[int, str]]()
    for offset, line in enumerate(lines):
        fence = line.lstrip().startswith("```")
        shown.append((number + offset, "" if fence or fenced else line))
        fenced ^= fence
    return shown


def _comments(path: Path, source: str) -> Iterator[Passage]:
    last: Passage | None = None
    column, end = -1, -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        text = token.string.lstrip("#").strip()
        row, at = token.start
        if last and (row, at) == (end + 1, column):
            last = Passage(path, last.line, f"{last.text}\n{text}", "comment")
        else:
            if last:
                yield last
            last = Passage(path, row, text, "comment")
        column, end = at, row
    if last:
        yield last


def _passages(path: Path, lines: Sequence[tuple[int, str]], kind: Kind) -> Iterator[Passage]:
    """Yield the paragraphs, items and cells. What is indented, or set in columns, is code."""
    block: list[tuple[int, str]] = []
    in_item = False

    def flush() -> Iterator[Passage]:
        if block:
            yield Passage(path, block[0][0], "\n".join(text for _, text in block), kind)
            block.clear()

    for number, text in lines:
        item = _ITEM.match(text)
        if not text.strip() or text.startswith(("|", "#")) or item:
            yield from flush()
            in_item = bool(item) or (in_item and not text.strip())
        if text.startswith("|"):
            ends = [bar.start() for bar in re.finditer(r"(?<!\\)\|", _masked(text))]
            for start, end in pairwise([*ends, len(text)]):
                yield Passage(path, number, text[start + 1 : end].strip(), kind)
        elif text.startswith("#"):
            yield Passage(path, number, text.lstrip("# "), kind)
        elif item:
            block.append((number, text[item.end() :]))
        elif (text.startswith(" ") and not in_item) or (kind == "docstring" and _ROW.search(text)):
            yield from flush()
        elif text.strip():
            block.append((number, text.strip()))
    yield from flush()


def _masked(text: str) -> str:
    """Return the text with a word as long for each code span and each target of a link."""
    text = re.sub(r"(`+)(?!`)(.+?)(?<!`)\1(?!`)", _one_word, text, flags=re.DOTALL)
    return re.sub(r"(?<=\]\()[^)\s]+(?=\))", _one_word, text)


def _one_word(span: re.Match[str]) -> str:
    return re.sub(r"[^`\n]", "x", span[0])


# ---- Rules --------------------------------------------------------------------------------------

_END = re.compile(
    r"(?<!e\.g)(?<!i\.e)(?<!vs)(?<!cf)[.!?]+[\"')\]*_]*\s+(?=[\"'(\[*_]*(?:[A-Z0-9`]|c2cserve\b))"
)


def sentences(passage: Passage) -> Iterator[tuple[int, str, str]]:
    """Yield line, sentence, and the sentence with its code masked."""
    masked = _masked(passage.text)
    start = 0
    for end in [*(found.end() for found in _END.finditer(masked)), len(masked)]:
        if passage.text[start:end].strip():
            line = passage.line + masked[:start].count("\n")
            yield line, " ".join(passage.text[start:end].split()), masked[start:end].strip()
        start = end


def words_of(sentence: str) -> list[str]:
    return [word for word in sentence.split() if any(c.isalnum() for c in word)]


def hits_in(passage: Passage) -> Iterator[Hit]:
    for number, (line, sentence, read) in enumerate(sentences(passage)):
        for phrase in PHRASES_THAT_STAY:
            read = re.sub(phrase, "", read)
        for rule in _broken(read, passage, begins=passage.first and number == 0):
            yield Hit(passage.path, line, sentence, rule)


def _broken(sentence: str, passage: Passage, *, begins: bool) -> Iterator[str]:
    if found := PERSONS.search(sentence):
        yield f'"{found[0]}": name the thing (the request, the model)'
    if CAN_NOT.search(sentence):
        yield 'write "cannot"'
    if found := METAPHORS.search(sentence):
        yield f'"{found[0]}": use the standard term (CONTRIBUTING.md, "Words")'
    if begins and (found := FRAGMENT.match(sentence)):
        yield f'"{found[0]} ...": a docstring begins with a subject or an imperative'
    if passage.kind != "comment" and (count := len(words_of(sentence))) > SENTENCE_WORDS_MAX:
        yield f"{count} words: a sentence has at most {SENTENCE_WORDS_MAX}"


def hits_in_names(path: Path) -> Iterator[Hit]:
    seen: set[str] = set()
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        name = token.string
        if token.type != tokenize.NAME or name in seen or name in NAMES_THAT_STAY:
            continue
        seen.add(name)
        if instead := _standard_for(name, path):
            yield Hit(path, token.start[0], name, f"name: use the standard term ({instead})")
    for name, line in _classes(path):
        others = [other for other in class_places(_source(path)).get(name, ()) if other != path]
        if name in ONE_CLASS_EACH and others:
            yield Hit(path, line, name, f"name: {_package(others[0])} has a class {name}")


def _standard_for(name: str, path: Path) -> str | None:
    parts = [part.lower() for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]
    wrong = {part: STANDARD_TERM[part] for part in parts if part in STANDARD_TERM}
    if len(parts) == 1 and parts[0] in STANDARD_NAME:
        wrong[parts[0]] = STANDARD_NAME[parts[0]]
    if "fixed" in parts and "rows" in parts:
        wrong["fixed"] = "graph inputs"
    if "stand" in wrong and not {"in", "ins"} & set(parts):
        del wrong["stand"]
    for part, instead in wrong.items():
        if part not in ONLY_IN or _package(path).parts[0] in ONLY_IN[part]:
            return instead
    return None


def _classes(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef):
            yield node.name, node.lineno


def _source(path: Path) -> Path:
    """Return the package's folder that the file is in: a checkout may read another one."""
    return next((above for above in path.parents if above.match("src/c2cserve")), SRC)


def _package(path: Path) -> Path:
    return path.relative_to(_source(path))


@cache
def class_places(source: Path) -> dict[str, list[Path]]:
    places: dict[str, list[Path]] = {}
    for path in sorted(source.rglob("*.py")):
        for name, _ in _classes(path):
            places.setdefault(name, []).append(path)
    return places


def hits_of(path: Path) -> list[Hit]:
    hits = [hit for passage in passages_of(path) for hit in hits_in(passage)]
    if path.suffix == ".py":
        hits += hits_in_names(path)
    return sorted(hits, key=lambda hit: hit.line)


# ---- Tests --------------------------------------------------------------------------------------


def everything() -> dict[Path, list[Path]]:
    """By folder: hundreds of tests, one of each file, would cost more than what they check."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
    folders: dict[Path, list[Path]] = {}
    for path in sorted([*SRC.rglob("*.py"), *pages]):
        folders.setdefault(path.parent, []).append(path)
    return folders


FOLDERS = everything()


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: str(path.relative_to(ROOT)))
def test_prose(folder: Path) -> None:
    hits = [hit for path in FOLDERS[folder] for hit in hits_of(path)]
    assert not hits, "\n" + "\n".join(map(str, hits))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("Who it is, nobody says.", '"nobody"'),
        ("It can\nnot end.", "cannot"),
        ("A first sentence.\n\nThe bell rings.", '"bell"'),
        ("Of each of them.", '"Of ..."'),
        (f"A sentence{' on' * 24}.", "26 words"),
        (f"- A sentence{' on' * 24}.", "26 words"),
    ],
)
def test_wrong_prose_is_found(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "src" / "c2cserve" / "core" / "module.py"
    path.parent.mkdir(parents=True)
    path.write_text(f'"""{text}"""\n')
    [hit] = hits_of(path)
    assert says in str(hit)


@pytest.mark.parametrize(
    "text",
    [
        f"A sentence{' on' * 23}. c2cserve begins another.",
        "Return `what nobody says. It can not end`, e.g. A and i.e. B.",
        f"The formula:\n\n    a{' + b' * 30}",
        "The picture:\n\nnobody     he\n```\nsomebody\n```",
        "Ofttimes it begins so.",
    ],
)
def test_right_prose_stays(tmp_path: Path, text: str) -> None:
    path = tmp_path / "src" / "c2cserve" / "core" / "module.py"
    path.parent.mkdir(parents=True)
    path.write_text(f'"""{text}"""\n')
    assert not hits_of(path)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("ring_bell = 1", "completion notifier"),
        ("class Flights: ...", "in flight"),
        ("def stand_ins(): ...", "placeholder weights"),
        ("fixed_rows = 1", "graph inputs"),
    ],
)
def test_wrong_names_are_found(tmp_path: Path, source: str, says: str) -> None:
    path = tmp_path / "src" / "c2cserve" / "core" / "module.py"
    path.parent.mkdir(parents=True)
    path.write_text(f"{source}\nshift = known_models = fixed_s = standing = fallback = 1\n")
    [hit] = hits_of(path)
    assert says in str(hit)


def main(arguments: Sequence[str]) -> None:
    """Print the hits below the paths given."""
    count = 0
    for argument in arguments or ["."]:
        start = Path(argument).resolve()
        below = [*start.rglob("*.py"), *start.rglob("*.md")] if start.is_dir() else [start]
        for hit in (hit for path in sorted(below) for hit in hits_of(path)):
            count += 1
            sys.stdout.write(f"{hit}\n")
    sys.stdout.write(f"{count} hits\n")


if __name__ == "__main__":
    main(sys.argv[1:])
