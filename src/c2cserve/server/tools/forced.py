"""Reading an output that is nothing but calls, by its grammar, while it grows.

    <tool_call>\\n{"name": "weather", "arguments": {"city": "Rom"}}\\n</tool_call>
                          name                    arguments, in pieces

What is written can be taken at its word, so that a call is sent on before it is complete.
"""

import json
import re
import secrets
from typing import Any, cast

CALL_HEAD = re.compile(
    r"\s*(?:\[TOOL_CALLS\])?\s*([\w.-]+)\s*(?:\[CALL_ID\]\w*\s*)?(?:\[ARGS\])?\s*(?=\{)", re.ASCII
)
"""What comes before the arguments of a call where its name is no part of an object. The server has
ids of its own for calls."""
_HEAD = re.compile(r'\{"name": ("(?:[^"\\]|\\.)*"), "(?:arguments|parameters)": ')


class ForcedCalls:
    """The calls of one growing output."""

    def __init__(self, *, headed: bool = False) -> None:
        """`headed`: a call is a name and an object with its arguments."""
        self._headed = headed
        self._held = ""
        """Text before the next call's arguments."""
        self._depth = 0
        """Brackets that are open in the arguments; 0 outside of them."""
        self._in_call = False
        self._quoted = self._escaped = False
        self.count = 0
        """Calls so far."""

    def add(self, text: str) -> list[dict[str, Any]]:
        """Return what new text adds to calls, in the shape of a delta's `tool_calls`."""
        pieces: list[dict[str, Any]] = []
        while text:
            text = self._arguments(text, pieces) if self._in_call else self._before(text, pieces)
        return pieces

    def _before(self, text: str, pieces: list[dict[str, Any]]) -> str:
        """Look for the next call. Return the text behind its name."""
        self._held += text
        found = (CALL_HEAD if self._headed else _HEAD).search(self._held)
        if found is None:
            return ""
        rest, self._held = self._held[found.end() :], ""
        self._in_call = True
        name = found[1] if self._headed else json.loads(found[1])
        function = {"name": name, "arguments": ""}
        pieces.append({
            "index": self.count, "id": f"call_{secrets.token_hex(12)}", "type": "function",
            "function": function,
        })  # fmt: skip
        self.count += 1
        return rest

    def _arguments(self, text: str, pieces: list[dict[str, Any]]) -> str:
        """Take arguments up to their end. Return the text behind them."""
        end = next((at for at, char in enumerate(text) if self._ends(char)), len(text) - 1) + 1
        piece = {"index": self.count - 1, "function": {"arguments": text[:end]}}
        if pieces and pieces[-1]["index"] == piece["index"]:
            pieces[-1]["function"]["arguments"] += text[:end]
        else:
            pieces.append(piece)
        return text[end:]

    def _ends(self, char: str) -> bool:
        """Go on by a character of the arguments. Return whether it is their last."""
        if self._quoted:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._quoted = False
        elif char == '"':
            self._quoted = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            self._in_call = self._depth > 0
        return not self._in_call


def joined(pieces: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return whole calls from the pieces of a whole output."""
    calls: dict[int, dict[str, Any]] = {}
    for piece in pieces:
        index = cast("int", piece["index"])
        if index in calls:
            calls[index]["function"]["arguments"] += piece["function"]["arguments"]
        else:
            calls[index] = {key: value for key, value in piece.items() if key != "index"}
    return list(calls.values())
