"""Grammars of answers, in the dialect of Lark that llguidance reads.

    %llguidance {"no_forcing": true}        any tokens that spell the text, not only the tokenizer's
    start: thought? answer
    answer: %json {"type": "object", ...}

A schema whose keywords the library does not know is refused: an answer would not be held to them.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

_HEAD = '%llguidance {"no_forcing": true}\n'
_WHITESPACE = r"( |\n[ \t]{0,32})"
"""Between the tokens of JSON. A model that could write any number of spaces might never stop."""
_OBJECT: dict[str, Any] = {"type": "object"}
_LINE = re.compile(r"^at \d+\(\d+\): ")


class GrammarError(ValueError):
    """The grammar is wrong, or uses what the library does not know; the message is one line."""


def json_schema(schema: object) -> str:
    """Return a rule's right side that matches the instances of a JSON schema (an object or a
    boolean). Raises GrammarError."""
    if isinstance(schema, bool):
        if not schema:
            raise GrammarError("no value matches the schema")
        schema = {}
    if not isinstance(schema, dict):
        raise GrammarError("a JSON schema is an object")
    if "x-guidance" in schema:
        raise GrammarError('"x-guidance" is the server\'s own')
    fields: dict[str, Any] = {**schema, "x-guidance": {"whitespace_pattern": _WHITESPACE}}
    return f"%json {json.dumps(fields, ensure_ascii=False)}"


def json_object() -> str:
    """Return a right side that matches any JSON object."""
    return json_schema(_OBJECT)


def regex(pattern: str) -> str:
    """Return a right side that matches what all of a regular expression matches."""
    return "/" + re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", pattern).replace("\n", r"\n") + "/"


def literal(text: str) -> str:
    """Return a right side that matches this text alone."""
    return json.dumps(text, ensure_ascii=False)


def choice(texts: Sequence[str]) -> str:
    """Return a right side that matches one of the texts."""
    return " | ".join(map(literal, texts))


def grammar_of(answer: str, *, thought: str = "", rules: Sequence[str] = ()) -> str:
    """Return the grammar of an answer, which a right side describes.

    `thought`: "" if none comes before it, `open` if the prompt ends inside a thought, `free` if the
    output may begin with one. `rules`: further rules that the right side names. Raises
    GrammarError.
    """
    start = {"": "answer", "open": "thought answer", "free": "thought? answer"}[thought]
    lines = [f"start: {start}", f"answer: {answer}", *rules]
    if thought:
        opening = "<think>" if thought == "free" else ""
        lines += ["thought: hidden /\\n{1,2}/?", rf"hidden[lazy]: /{opening}(.|\n)*<\/think>/"]
    return checked(_HEAD + "\n".join(lines) + "\n")


def written(grammar: str) -> str:
    """Return a client's own grammar, in Lark's language or GBNF. Raises GrammarError."""
    if "%llguidance" in grammar:
        raise GrammarError("%llguidance is the server's own")
    try:
        lark = any_to_lark(grammar)
    except Exception as error:  # the converter raises what it meets
        raise GrammarError(f"neither Lark nor GBNF: {_one_line(str(error))}") from error
    return checked(_HEAD + lark.removeprefix("%llguidance {}"))


def checked(grammar: str) -> str:
    """Return a grammar that the library takes. Raises GrammarError."""
    problem = LLMatcher.validate_grammar_with_warnings(grammar)
    if problem[0]:
        raise GrammarError(_one_line(_LINE.sub("", problem[1][0])))
    return grammar


def _one_line(text: str) -> str:
    lines = text.split("\n   1 |")[0].strip().splitlines()
    return " ".join(line.strip() for line in lines)[:300]
