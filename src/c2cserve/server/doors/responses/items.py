"""The items of a request's `input`, and the messages of a chat that they mean.

reasoning, message, function_call, function_call  ->  one message of the assistant
function_call_output                              ->  one message of a tool
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from c2cserve.server.doors.translation import Strict

Status = Literal["in_progress", "completed", "incomplete"]
# Clients send the items of an answer back unchanged, so they may have all fields of these.
_Empty = Annotated[list[Any], Field(max_length=0)]


class InputText(Strict):
    type: Literal["input_text"]
    text: str


class OutputText(Strict):
    type: Literal["output_text"]
    text: str
    annotations: _Empty | None = None
    logprobs: _Empty | None = None


Part = Annotated[InputText | OutputText, Field(discriminator="type")]


class MessageItem(Strict):
    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Annotated[list[Part], Field(fail_fast=True)]
    id: str | None = None
    status: Status | None = None
    phase: None = None


class CallItem(Strict):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: Status | None = None
    namespace: None = None
    caller: None = None
    async_: Annotated[None, Field(alias="async")] = None


class CallOutputItem(Strict):
    type: Literal["function_call_output"]
    call_id: str
    output: str | Annotated[list[InputText], Field(fail_fast=True)]
    id: str | None = None
    status: Status | None = None


class SummaryText(Strict):
    type: Literal["summary_text"]
    text: str


class ReasoningText(Strict):
    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(Strict):
    type: Literal["reasoning"]
    id: str | None = None
    summary: Annotated[list[SummaryText], Field(fail_fast=True)] | None = None
    content: Annotated[list[ReasoningText], Field(fail_fast=True)] | None = None
    encrypted_content: None = None
    status: Status | None = None

    @property
    def text(self) -> str:
        return "".join(one.text for one in self.content or self.summary or ())


InputItem = MessageItem | CallItem | CallOutputItem | ReasoningItem


def chat_messages(items: list[InputItem]) -> list[dict[str, Any]]:
    """Return the messages of a chat. Items of one turn of the assistant become one message."""
    messages: list[dict[str, Any]] = []
    for item in items:
        if isinstance(item, CallOutputItem):
            content = _content(item.output)
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
        elif isinstance(item, CallItem):
            function = {"name": item.name, "arguments": item.arguments}
            call = {"id": item.call_id, "type": "function", "function": function}
            _turn(messages, ()).setdefault("tool_calls", []).append(call)
        elif isinstance(item, ReasoningItem):
            turn = _turn(messages, ("content", "tool_calls"))
            turn["reasoning_content"] = turn.get("reasoning_content", "") + item.text
        elif item.role == "assistant":
            _turn(messages, ("content", "tool_calls"))["content"] = _content(item.content)
        else:
            messages.append({"role": item.role, "content": _content(item.content)})
    return messages


def _turn(messages: list[dict[str, Any]], without: tuple[str, ...]) -> dict[str, Any]:
    """Return the last message if it is the assistant's and has none of the fields `without`, else
    a new one."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or any(field in last for field in without):
        last = {"role": "assistant"}
        messages.append(last)
    return last


def _content(content: str | list[Part] | list[InputText]) -> Any:
    if isinstance(content, str):
        return content
    return [{"type": "text", "text": part.text} for part in content]
