"""Grammars of outputs that call tools, in the format that a model's template asks for."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from c2cserve.grammars import write
from c2cserve.server.tools.fields import Tool
from c2cserve.server.tools.reading import ARGUMENTS_MARK, CALLS_MARK, CallFormat

_ANY: dict[str, Any] = {"type": "object"}
_KEYS: dict[CallFormat, str] = {
    "hermes": "arguments", "llama3": "parameters", "mistral": "arguments",
}  # fmt: skip
_MORE: dict[CallFormat, str] = {
    "hermes": '("\\n" tagged)*', "llama3": '("; " call)*', "mistral": '(", " call)*',
    "mistral_args": "call*",
}  # fmt: skip


def called(
    tools: Sequence[Tool], form: CallFormat, marks: Mapping[str, int], *, single: bool
) -> tuple[str, list[str]]:
    """Return the right side and the rules of an output that is one call of the tools or more.

    `marks`: the special tokens of the format. `single`: exactly one call. Raises GrammarError.
    """
    more = "" if single else _MORE[form]
    if form == "mistral_args":
        return f"call {more}", [f"call: {_either(tools)}", *_headed(tools, marks)]
    rules = [f"call: {_either(tools)}", *_objects(tools, form, every=True)]
    if form == "hermes":
        rules.append('tagged: "<tool_call>\\n" call "\\n</tool_call>"')
        return f"tagged {more}", rules
    if form == "llama3":
        return f"call {more}", rules
    begin = f"<[{marks[CALLS_MARK]}]> " if CALLS_MARK in marks else ""
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
        name = json.dumps(tool.function.name)
        head = write.literal(f'{{"name": {name}, "{_KEYS[form]}": ')
        rules.append(f'call_{number}: {head} {_arguments(tool, every=every)} "}}"')
    return rules


def _headed(tools: Sequence[Tool], marks: Mapping[str, int]) -> list[str]:
    """Return a rule for each tool's call as a name and its arguments, each after its mark."""
    begin, then = (
        f"<[{marks[mark]}]>" if mark in marks else write.literal(mark)
        for mark in (CALLS_MARK, ARGUMENTS_MARK)
    )
    return [
        f"call_{number}: {begin} {write.literal(tool.function.name)} {then}"
        f" {_arguments(tool, every=True)}"
        for number, tool in enumerate(tools)
    ]


def _arguments(tool: Tool, *, every: bool) -> str:
    """Return the right side of a call's arguments."""
    function = tool.function
    held = every or function.strict
    schema = function.parameters if held and function.parameters is not None else _ANY
    if "type" not in schema:
        schema = {**_ANY, **schema}  # arguments are an object
    return write.json_schema(schema)
