"""Random JSON schemas, and whether a value is an instance of one."""

import random
import re
from typing import Any

WORDS = ("red", "blue", "name", "age", "ok", "größe", 'a"b', "x y", "10")
PATTERNS = ("^[a-z]{2,4}$", "^[0-9]{3}-[0-9]{2}$", "^(yes|no)$")


def random_schema(draw: random.Random) -> dict[str, Any]:
    """Return the schema of an object. Its values are bounded, so that a small model ends them."""
    return _object(draw, 2)


def _object(draw: random.Random, depth: int) -> dict[str, Any]:
    names = draw.sample(WORDS, draw.randint(1, 3))
    return {
        "type": "object",
        "properties": {name: _value(draw, depth - 1) for name in names},
        "required": [name for name in names if draw.random() < 0.7],
        "additionalProperties": False,
    }


def _value(draw: random.Random, depth: int) -> dict[str, Any]:
    kinds = ["boolean", "null", "integer", "string", "pattern", "enum", "const"]
    if depth > 0:
        kinds += ["object", "array", "anyOf"]
    match draw.choice(kinds):
        case "integer":
            low = draw.randint(-50, 50)
            return {"type": "integer", "minimum": low, "maximum": low + draw.randint(0, 500)}
        case "string":
            least = draw.randint(0, 3)
            return {"type": "string", "minLength": least, "maxLength": least + draw.randint(0, 6)}
        case "pattern":
            return {"type": "string", "pattern": draw.choice(PATTERNS)}
        case "enum":
            return {"enum": draw.sample([*WORDS, 1, None, True], 3)}
        case "const":
            return {"const": draw.choice([*WORDS, 7, False])}
        case "object":
            return _object(draw, depth)
        case "array":
            least = draw.randint(0, 2)
            return {
                "type": "array", "items": _value(draw, 0), "minItems": least,
                "maxItems": least + draw.randint(0, 2),
            }  # fmt: skip
        case "anyOf":
            return {"anyOf": [_value(draw, 0), _value(draw, 0)]}
        case kind:
            return {"type": kind}


def conforms(schema: dict[str, Any], value: Any) -> bool:
    """Return whether a value is an instance of a schema that `random_schema` made."""
    if "anyOf" in schema:
        return any(conforms(one, value) for one in schema["anyOf"])
    if "const" in schema or "enum" in schema:
        allowed = schema.get("enum", [schema.get("const")])
        return any(type(one) is type(value) and one == value for one in allowed)
    match schema["type"]:
        case "object":
            known = schema["properties"]
            return (
                isinstance(value, dict)
                and set(schema["required"]) <= set(value) <= set(known)
                and all(conforms(known[name], one) for name, one in value.items())
            )
        case "array":
            return (
                isinstance(value, list)
                and schema["minItems"] <= len(value) <= schema["maxItems"]
                and all(conforms(schema["items"], one) for one in value)
            )
        case "integer":
            return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
        case "string":
            if not isinstance(value, str):
                return False
            if "pattern" in schema:
                return re.fullmatch(schema["pattern"], value) is not None
            return schema["minLength"] <= len(value) <= schema["maxLength"]
        case "boolean":
            return isinstance(value, bool)
        case _:
            return value is None
