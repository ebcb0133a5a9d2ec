"""Ids of calls in the chats of Mistral's models, whose templates refuse all but nine letters."""

import hashlib
import re
from typing import Any

_SHORT = re.compile(r"[a-zA-Z0-9]{9}")


def shortened(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a chat with every id of a call as nine letters and digits, and so in the answers of
    tools. Equal ids stay equal."""
    return [_shortened(message) for message in messages]


def _shortened(message: dict[str, Any]) -> dict[str, Any]:
    changed = dict(message)
    if "tool_call_id" in message:
        changed["tool_call_id"] = _short(message["tool_call_id"])
    if "tool_calls" in message:
        changed["tool_calls"] = [
            {**call, "id": _short(call["id"])} for call in message["tool_calls"]
        ]
    return changed


def _short(given: str) -> str:
    whole = _SHORT.fullmatch(given)
    return given if whole else hashlib.blake2b(given.encode(), digest_size=8).hexdigest()[:9]
