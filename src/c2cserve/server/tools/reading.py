"""Reading an output: which of its text is reasoning, content or a call of a tool.

    <think> reasoning </think> content <tool_call> {"name": ..., "arguments": {...}} </tool_call>

Formats of calls: `hermes` (Hermes, Qwen) writes each call between tags. `llama3` writes nothing but
JSON objects with `parameters`. `mistral` ends with a JSON list, after a mark. Newer models of
Mistral (`mistral_args`) write `[TOOL_CALLS]name[ARGS]{...}` for each call. Marks and tags may be
special tokens, which are no part of other texts: `ReadingPlan.marks` are to be shown. A text is
held while it could still become a tag or a call. What turns out to be no call is content, so no
text is lost. Outputs that a grammar holds to calls need no such care (`tools.forced`).
"""

import json
import secrets
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import msgspec

from c2cserve.server.tools.forced import CALL_HEAD, ForcedCalls

CallFormat = Literal["hermes", "llama3", "mistral", "mistral_args"]
CALLS_MARK, ARGUMENTS_MARK, ID_MARK = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_THINK, _THOUGHT = "<think>", "</think>"
_CALL, _CALLED = "<tool_call>", "</tool_call>"
_SEPARATORS = " \t\r\n;"
_MARKS: dict[CallFormat | None, tuple[str, ...]] = {
    "hermes": (_CALL, _CALLED), "mistral": (CALLS_MARK,),
    "mistral_args": (CALLS_MARK, ARGUMENTS_MARK, ID_MARK),
}  # fmt: skip


class ReadingPlan(msgspec.Struct, frozen=True):
    """What to look for in the outputs of a request."""

    calls: CallFormat | None = None
    names: tuple[str, ...] = ()
    """The tools that may be called."""
    single: bool = False
    """Only the first call counts."""
    reasoning: bool = False
    """Text between the tags of thoughts is split off."""
    thinking: bool = False
    """The prompt ends inside a thought."""
    forced: bool = False
    """The output is nothing but calls, by its grammar."""
    named: bool = False
    """The request names the tool. Then OpenAI's reason to end is `stop`."""

    @property
    def marks(self) -> frozenset[str]:
        """What must be part of the text, even if it is a special token."""
        thoughts = (_THINK, _THOUGHT) if self.reasoning else ()
        return frozenset((*_MARKS.get(self.calls, ()), *thoughts))


@dataclass(slots=True)
class Parts:
    """What new text turned out to be."""

    reasoning: str = ""
    content: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """Calls in OpenAI's shape."""
    pieces: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """Pieces of calls that are forced, in the shape of a delta's `tool_calls`."""


class OutputReader:
    """Reads one growing output. It takes text up to the next tag as what its state says it is."""

    def __init__(self, plan: ReadingPlan) -> None:
        self._plan = plan
        self._names = frozenset(plan.names)
        self.held = ""
        """Text that is searched for the next tag."""
        self._written: list[str] = []
        """The call so far, before `held`. It may be long, so it is not searched again."""
        self._state = "thought" if plan.reasoning and plan.thinking else "start"
        self.called = False
        """Whether there was a call."""
        self._forced = ForcedCalls(headed=plan.calls == "mistral_args")

    def add(self, text: str) -> Parts:
        self.held += text
        parts = Parts()
        while self._step(parts):
            pass
        return parts

    def finish(self) -> Parts:
        """Return what was held back."""
        parts = Parts()
        held, self.held = "".join([*self._written, self.held]), ""
        if self._state == "thought":
            parts.reasoning = held
        elif self._state == "objects":
            calls = self._objects(held)
            self._add_calls(parts, calls, held)
        elif self._state == "call":
            self._add_calls(parts, self._calls_in(held), _CALL + held)
        elif self._state == "forced":
            pass  # the end of the last call
        else:
            parts.content = held
        return parts

    def _step(self, parts: Parts) -> bool:
        """Take the text up to the next tag. Return whether there may be more to take."""
        if self._state == "start":
            return self._begin()
        if self._state == "thought":
            text, found = self._until(_THOUGHT)
            parts.reasoning += text
            if found:
                self._state = "start-content"
            return found
        if self._state == "start-content":
            self.held = self.held.lstrip()  # the line breaks between a thought and its answer
            if self.held:
                start = self._plan.forced or self._plan.calls not in (None, "hermes")
                self._state = "start" if start else "content"
                self._plan = _without_reasoning(self._plan)
            return bool(self.held)
        if self._state == "content":
            begin = next(iter(_MARKS.get(self._plan.calls, ())), None)
            if begin is None:
                parts.content, self.held = parts.content + self.held, ""
                return False
            text, found = self._until(begin)
            parts.content += text
            if found:
                self._state = "call" if begin == _CALL else "objects"
                self._written += [begin] if begin != _CALL else []
            return found
        if self._state == "call":
            text, found = self._until(_CALLED)
            self._written.append(text)
            if not found:
                return False
            written = "".join(self._written)
            self._written.clear()
            self._add_calls(parts, self._calls_in(written), f"{_CALL}{written}{_CALLED}")
            self._state = "content"
            return True
        if self._state == "forced":
            parts.pieces += self._forced.add(self.held)
            self.held = ""
            self.called = self._forced.count > 0
            return False
        # Objects are read at the end.
        self._written.append(self.held)
        self.held = ""
        return False

    def _begin(self) -> bool:
        """Choose the state by the first characters that are no spaces."""
        begun = self.held.lstrip()
        if not begun:
            return False
        if self._plan.reasoning:
            if begun.startswith(_THINK):
                self.held, self._state = begun[len(_THINK) :], "thought"
                return True
            if _THINK.startswith(begun):
                return False
        if self._plan.forced:
            self._state = "forced"
            return True
        opens = self._openings()
        if not begun.startswith(opens) and any(one.startswith(begun) for one in opens):
            return False
        self._state = "objects" if begun.startswith(opens) else "content"
        return True

    def _openings(self) -> tuple[str, ...]:
        """Return how an output of nothing but calls may begin."""
        if self._plan.calls == "mistral_args":
            return (CALLS_MARK, *self._plan.names)
        return {"llama3": ("{",), "mistral": ("[",)}.get(self._plan.calls or "", ())

    def _until(self, tag: str) -> tuple[str, bool]:
        """Take the text before a tag, and the tag. Return the text, and whether the tag was there.
        The end of the text is held if it could be the beginning of the tag."""
        before, found, after = self.held.partition(tag)
        if found:
            self.held = after
            return before, True
        keep = next((size for size in range(len(tag) - 1, 0, -1) if before.endswith(tag[:size])), 0)
        cut = len(before) - keep
        self.held = before[cut:]
        return before[:cut], False

    # ---- calls ----------------------------------------------------------------------------------

    def _add_calls(self, parts: Parts, calls: list[dict[str, Any]] | None, written: str) -> None:
        """Add calls; what is none stays content."""
        if not calls:
            parts.content += written
            return
        for call in calls:
            if not (self._plan.single and self.called):
                parts.calls.append(call)
                self.called = True

    def _calls_in(self, text: str) -> list[dict[str, Any]] | None:
        call = self._call(_loaded(text), "arguments")
        return None if call is None else [call]

    def _objects(self, text: str) -> list[dict[str, Any]] | None:
        """Return the calls of a text that is nothing but objects, None for any other text."""
        if self._plan.calls == "mistral":
            return self._listed(text)
        if self._plan.calls == "mistral_args":
            return self._headed(text)
        decoder, at, calls = json.JSONDecoder(), 0, list[dict[str, Any]]()
        text = text.strip(_SEPARATORS)
        while at < len(text):
            try:
                value, end = decoder.raw_decode(text, at)
            except (ValueError, RecursionError):
                return None
            call = self._call(value, "parameters")
            if call is None:
                return None
            calls.append(call)
            at = end + len(text[end:]) - len(text[end:].lstrip(_SEPARATORS))
        return calls

    def _listed(self, text: str) -> list[dict[str, Any]] | None:
        """Return the calls of a text that is nothing but a list of them, None for any other."""
        values = _loaded(text.strip().removeprefix(CALLS_MARK))
        if not isinstance(values, list):
            return None
        calls = [self._call(value, "arguments") for value in cast("list[object]", values)]
        return None if None in calls else cast("list[dict[str, Any]]", calls)

    def _headed(self, text: str) -> list[dict[str, Any]] | None:
        """Return the calls of a text that is nothing but names, each with an object."""
        decoder, at, calls = json.JSONDecoder(), 0, list[dict[str, Any]]()
        text = text.rstrip()
        while at < len(text):
            head = CALL_HEAD.match(text, at)
            if head is None:
                return None
            try:
                arguments, at = decoder.raw_decode(text, head.end())
            except (ValueError, RecursionError):
                return None
            call = self._call({"name": head[1], "arguments": arguments}, "arguments")
            if call is None:
                return None
            calls.append(call)
        return calls

    def _call(self, value: object, key: str) -> dict[str, Any] | None:
        """Return an object as a call in OpenAI's shape, None if it calls no tool of the request."""
        if not isinstance(value, dict):
            return None
        fields = cast("dict[str, Any]", value)
        name, arguments = fields.get("name"), fields.get(key, fields.get("arguments", {}))
        if isinstance(arguments, str):
            arguments = _loaded(arguments)  # some models write them as the API has them
        if not (isinstance(name, str) and name in self._names and isinstance(arguments, dict)):
            return None
        function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
        return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}


def _without_reasoning(plan: ReadingPlan) -> ReadingPlan:
    return msgspec.structs.replace(plan, reasoning=False, thinking=False)


def _loaded(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
