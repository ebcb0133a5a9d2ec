"""Grammars of outputs that call tools, in the format that a model's template asks for."""

import json
from collections.abc import Sequence
from typing import Any

from c2cserve.grammars import write
from c2cserve.server.tools.fields import Tool
from c2cserve.server.tools.reading import CallFormat

_ANY: dict[str, Any] = {"type": "object"}
_KEYS: dict[CallFormat, str] = {
    "hermes": "arguments", "llama3": "parameters", "mistral": "arguments",
}  # fmt: skip


def called(
    tools: Sequence[Tool], form: CallFormat, mark: int | None, *, single: bool
) -> tuple[str, list[str]]:
    """Return the right side and the rules of an output that is one call of the tools or more.

    `mark`: the special token that begins calls, if the format has one. `single`: exactly one call.
    Raises GrammarError.
    """
    rules = [f"call: {_either(tools)}", *_objects(tools, form, every=True)]
    more = "" if single else {"hermes": '("\\n" tagged)*', "llama3": '("; " call)*',
                              "mistral": '(", " call)*'}[form]  # fmt: skip
    if form == "hermes":
        rules.append('tagged: "<tool_call>\\n" call "\\n</tool_call>"')
        return f"tagged {more}", rules
    if form == "llama3":
        return f"call {more}", rules
    begin = "" if mark is None else f"<[{mark}]> "
    return f'{begin}"[" call {more} "]"', rules


def mixed(tools: Sequence[Tool], form: CallFormat) -> tuple[str, list[str]]:
    """Return the right side and the rules of an output that may have calls. Calls of strict tools
    are held to their schemas. Raises GrammarError."""
    if form != "hermes":
        raise write.GrammarError(
            "with tool_choice auto, strict needs a model that writes calls between tags"
        )
    rules = [
        f"call: {_either(tools)}", *_objects(tools, form, every=False),
        r"begin[lazy]: /(.|\n)*<tool_call>/", r"rest: /(.|\n)*/",
        r'tagged: begin /\n?/ call /\n?/ "</tool_call>"',
    ]  # fmt: skip
    return "tagged* rest", rules


def _either(tools: Sequence[Tool]) -> str:
    return " | ".join(f"call_{number}" for number in range(len(tools)))


def _objects(tools: Sequence[Tool], form: CallFormat, *, every: bool) -> list[str]:
    """Return a rule for the object of each tool's call. `every`: strict or not."""
    rules: list[str] = []
    for number, tool in enumerate(tools):
        function = tool.function
        held = every or function.strict
        schema = function.parameters if held and function.parameters is not None else _ANY
        if "type" not in schema:
            schema = {**_ANY, **schema}  # arguments are an object
        head = write.literal(f'{{"name": {json.dumps(function.name)}, "{_KEYS[form]}": ')
        rules.append(f'call_{number}: {head} {write.json_schema(schema)} "}}"')
    return rules
