"""The form in which a chat template takes contents: a text, a list of parts, or either.

Clients send `"hello"` or `[{"type": "text", "text": "hello"}]`. Templates of text models print the
content; those that know images iterate over parts. The form that a template takes is found by
trying it. It takes a form if it writes the probe's text. It does not if it writes the notation of a
list or of JSON around it.
"""

import re
from collections.abc import Callable
from typing import Any, Literal

from c2cserve.server.text.vocabulary import TokenizerError

Form = Literal["text", "parts"]
Messages = list[dict[str, Any]]

_PROBE = "Zq7probe"
_PARTS_READER = re.compile(r"\btext\b")
"""A template that reads parts names their key."""
_USER, _ANSWER = {"role": "user", "content": "x"}, {"role": "assistant", "content": "x"}
_AROUND: dict[str, tuple[Messages, Messages]] = {
    "system": ([], [_USER]), "assistant": ([_USER], []), "tool": ([_USER, _ANSWER], []),
}  # fmt: skip
"""Role -> messages before and after one of it, without which templates refuse a chat."""
_BETWEEN_PARTS = "\n"
"""Joins the parts for a template that takes texts only, as in vLLM."""


class ContentForms:
    """The forms that one template takes, by role. A form is tried when it is first needed."""

    def __init__(self, source: str, render: Callable[[Messages], str]) -> None:
        """`render` writes a chat by the template. Raises TokenizerError if it refuses the chat."""
        self._reads_parts = _PARTS_READER.search(source) is not None
        self._render = render
        self._taken: dict[tuple[str, Form], bool] = {}

    def shaped(self, messages: Messages) -> Messages:
        """Return the messages with their contents in forms that the template takes."""
        if not self._reads_parts:
            return [_as_text(one) for one in messages]
        return [self._shaped(one) for one in messages]

    def _shaped(self, message: dict[str, Any]) -> dict[str, Any]:
        role, content = message["role"], message["content"]
        if isinstance(content, list):
            return message if self._takes(role, "parts") else _as_text(message)
        if content and not self._takes(role, "text") and self._takes(role, "parts"):
            return {**message, "content": [{"type": "text", "text": content}]}
        return message

    def _takes(self, role: str, form: Form) -> bool:
        taken = self._taken.get((role, form))
        if taken is None:
            taken = self._taken[role, form] = self._try(role, form)
        return taken

    def _try(self, role: str, form: Form) -> bool:
        content = _PROBE if form == "text" else [{"type": "text", "text": _PROBE}]
        before, after = _AROUND.get(role, ([], []))
        try:
            written = self._render([*before, {"role": role, "content": content}, *after])
        except TokenizerError:
            return False
        return _PROBE in written and not any(f"{quote}{_PROBE}" in written for quote in "'\"")


def _as_text(message: dict[str, Any]) -> dict[str, Any]:
    content = message["content"]
    if not isinstance(content, list):
        return message
    return {**message, "content": _BETWEEN_PARTS.join(part["text"] for part in content)}
