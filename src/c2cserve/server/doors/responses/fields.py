"""The fields of /v1/responses, and the chat that a request means."""

from typing import Annotated, Any, Literal

import msgspec
from pydantic import Discriminator, Field, Tag

from c2cserve.server.doors.responses.items import (
    CallItem,
    CallOutputItem,
    MessageItem,
    ReasoningItem,
    chat_messages,
)
from c2cserve.server.doors.translation import (
    Extensions,
    Names,
    Strict,
    Translated,
    translated,
    validated,
)
from c2cserve.server.fields import ChatBody, ReasoningEffort

_TAGS = frozenset(
    {"message", "function_call", "function_call_output", "reasoning", "input_text", "output_text"}
    | {"text", "json_object", "json_schema"}
)


def _type_of(item: Any) -> str | None:
    """Return the type of an input item: an object that does not say is a message."""
    kind = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)
    if kind is None and isinstance(item, dict | MessageItem):
        return "message"
    return kind if isinstance(kind, str) else None


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_type_of),
]


class FunctionTool(Strict):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def plain(self) -> dict[str, Any]:
        """Return the tool as chats have it."""
        given = self.model_dump(exclude={"type"}, exclude_none=True)
        return {"type": "function", "function": given}


class NamedTool(Strict):
    type: Literal["function"]
    name: str


class PlainText(Strict):
    type: Literal["text"]


class JsonText(Strict):
    type: Literal["json_object"]


class SchemaText(Strict):
    type: Literal["json_schema"]
    name: str
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    description: str | None = None
    strict: bool | None = None


Format = Annotated[PlainText | JsonText | SchemaText, Field(discriminator="type")]


class TextConfig(Strict):
    format: Format | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(Strict):
    effort: ReasoningEffort | None = None
    summary: Literal["auto"] | None = None
    """Accepted: the reasoning itself is given, and no summary."""


class ResponsesStreamOptions(Strict):
    include_obfuscation: bool | None = None
    """Accepted; events are never padded."""


class ResponsesBody(Extensions):
    """POST /v1/responses"""

    model: str
    input: str | Annotated[list[Item], Field(min_length=1, fail_fast=True)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: int | None = None
    """A field of this server."""
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=128, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextConfig | None = None
    include: list[Literal["reasoning.encrypted_content"]] | None = None
    """Accepted: reasoning is given as text, so nothing of it is encrypted."""
    top_logprobs: Literal[0] | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None

    # Facts for OpenAI's service, which stores them or bills by them. They change nothing here.
    store: bool | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None
    metadata: dict[str, str] | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] | None = None

    # Not supported: only null, which asks for nothing, is accepted.
    previous_response_id: None = None
    conversation: None = None
    prompt: None = None
    max_tool_calls: None = None
    context_management: None = None
    moderation: None = None

    def chat(self) -> dict[str, Any]:
        """Return the fields of the chat."""
        messages = [{"role": "user", "content": self.input}]
        if not isinstance(self.input, str):
            messages = chat_messages(self.input)
        if self.instructions is not None:
            messages.insert(0, {"role": "system", "content": self.instructions})
        return {
            "model": self.model, "messages": messages, "max_tokens": self.max_output_tokens,
            "temperature": self.temperature, "top_p": self.top_p, "seed": self.seed,
            "stream": self.stream, "tools": self.tools and [one.plain() for one in self.tools],
            "tool_choice": self._choice(), "parallel_tool_calls": self.parallel_tool_calls,
            "reasoning_effort": self.reasoning and self.reasoning.effort,
            "response_format": self._format(), "service_tier": self.service_tier,
            "separate_reasoning": True, "priority": self.priority, "cache_salt": self.cache_salt,
        }  # fmt: skip

    def _choice(self) -> Any:
        choice = self.tool_choice
        if isinstance(choice, NamedTool):
            return {"type": "function", "function": {"name": choice.name}}
        # OpenAI's answers say `auto` without tools too, and clients send it back.
        return None if choice == "auto" and not self.tools else choice

    def _format(self) -> dict[str, Any] | None:
        form = self.text and self.text.format
        if isinstance(form, SchemaText):
            schema = form.model_dump(by_alias=True, exclude={"type"}, exclude_none=True)
            return {"type": "json_schema", "json_schema": schema}
        return {"type": "json_object"} if isinstance(form, JsonText) else None

    def repeated(self) -> bytes:
        """Return the fields that answers repeat, as JSON. Nothing is stored, whatever is asked."""
        plain = self.model_dump(mode="json", by_alias=True)
        text = plain["text"] or {}
        return msgspec.json.encode({
            "background": False, "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens, "max_tool_calls": None,
            "metadata": self.metadata or {}, "parallel_tool_calls":
            self.parallel_tool_calls is not False, "previous_response_id": None,
            "prompt_cache_key": self.prompt_cache_key,
            "reasoning": plain["reasoning"] or {"effort": None, "summary": None},
            "safety_identifier": self.safety_identifier, "store": False,
            "text": {"verbosity": "medium", **text, "format": text.get("format") or
                     {"type": "text"}},
            "tool_choice": plain["tool_choice"] or "auto", "tools": plain["tools"] or [],
            "top_logprobs": 0, "truncation": "disabled", "user": self.user,
        })  # fmt: skip


_NAMES = Names(
    {
        "messages": "input", "max_tokens": "max_output_tokens", "response_format": "text",
        "reasoning_effort": "reasoning",
    },
    {"function": "", "json_schema": "format"},
)  # fmt: skip


def read_responses(body: bytes) -> Translated:
    """Return the chat of a request to /v1/responses. Raises ApiError."""
    asked = validated(ResponsesBody, body, _TAGS)
    return Translated(translated(ChatBody, asked.chat(), _NAMES), _NAMES, asked.repeated())
