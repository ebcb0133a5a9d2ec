"""What the programs of the client matrix share: features, and how they are reported."""

import json
import os
from collections.abc import Callable
from typing import Any

URL = os.environ.get("C2CSERVE_URL", "http://127.0.0.1:8000")
KEY = os.environ.get("C2CSERVE_KEY", "none")
MODEL = "adder-qwen"
QUESTION, ANSWER = "347+86=", "433"
MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]
CALLER = "caller"
"""A model whose template takes tools."""
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "description": "The weather.", "parameters": WEATHER},
}
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def feature(name: str, check: Callable[[], object]) -> None:
    """Run one check, and print a line of JSON: its name, and what went wrong, if anything did."""
    try:
        check()
    except BaseException as error:  # whatever a client raises is its outcome
        text = " ".join(f"{type(error).__name__}: {error}".split())
        print(json.dumps({"feature": name, "error": text[:300]}), flush=True)
    else:
        print(json.dumps({"feature": name, "error": ""}), flush=True)


def same(found: object, expected: object) -> None:
    """Raise AssertionError unless the two are equal."""
    assert found == expected, f"{found!r}, not {expected!r}"


def check_person(value: Any) -> None:
    """Raise AssertionError unless the value is an instance of `PERSON`."""
    fields = value if isinstance(value, dict) else value.model_dump()
    assert set(fields) == {"name", "age"}, fields
    assert isinstance(fields["name"], str) and 0 <= fields["age"] <= 120, fields


def check_city(arguments: Any) -> None:
    """Raise AssertionError unless the arguments, an object or its text, are those of `TOOL`."""
    fields = json.loads(arguments) if isinstance(arguments, str) else arguments
    assert fields["city"] in ("Paris", "Rome"), fields
