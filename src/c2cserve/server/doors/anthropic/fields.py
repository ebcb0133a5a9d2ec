"""The fields of /v1/messages, and the chat that a request means."""

import json
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

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
    {"text", "tool_use", "tool_result", "thinking", "user", "assistant", "system"}
    | {"auto", "any", "tool", "none", "enabled", "disabled", "adaptive", "between_tools"}
)
_STOP_CHARS = 1024


class CacheControl(Strict):
    """Accepted: prefixes are reused without it."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class TextBlock(Strict):
    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: None = None


class ToolUseBlock(Strict):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    cache_control: CacheControl | None = None
    caller: None = None


class ToolResultBlock(Strict):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Annotated[list[TextBlock], Field(fail_fast=True)] | None = None
    is_error: bool | None = None
    """Accepted: templates of chats have no word for it, and the content says what went wrong."""
    cache_control: CacheControl | None = None


class ThinkingBlock(Strict):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = None
    """Accepted: thoughts are not signed here."""


UserBlock = Annotated[TextBlock | ToolResultBlock, Field(discriminator="type")]
AssistantBlock = Annotated[TextBlock | ToolUseBlock | ThinkingBlock, Field(discriminator="type")]


class UserTurn(Strict):
    role: Literal["user"]
    content: str | Annotated[list[UserBlock], Field(min_length=1, fail_fast=True)]

    def messages(self) -> list[dict[str, Any]]:
        """Return the messages of a chat: one per result of a tool, and the texts between them."""
        if isinstance(self.content, str):
            return [{"role": "user", "content": self.content}]
        found: list[dict[str, Any]] = []
        for block in self.content:
            if isinstance(block, ToolResultBlock):
                content = _parts(block.content or "")
                found.append(
                    {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
                )
            elif found and found[-1]["role"] == "user":
                found[-1]["content"] += _parts([block])
            else:
                found.append({"role": "user", "content": _parts([block])})
        return found


class AssistantTurn(Strict):
    role: Literal["assistant"]
    content: str | Annotated[list[AssistantBlock], Field(fail_fast=True)]

    def messages(self) -> list[dict[str, Any]]:
        if isinstance(self.content, str):
            return [{"role": "assistant", "content": self.content}]
        texts = [one for one in self.content if isinstance(one, TextBlock)]
        thoughts = [one.thinking for one in self.content if isinstance(one, ThinkingBlock)]
        calls = [_call(one) for one in self.content if isinstance(one, ToolUseBlock)]
        message: dict[str, Any] = {"role": "assistant", "content": _parts(texts)}
        if thoughts:
            message["reasoning_content"] = "".join(thoughts)
        if calls:
            message["tool_calls"] = calls
        return [message]


class SystemTurn(Strict):
    role: Literal["system"]
    content: str | Annotated[list[TextBlock], Field(fail_fast=True)]

    def messages(self) -> list[dict[str, Any]]:
        return [{"role": "system", "content": _parts(self.content)}]


Turn = Annotated[UserTurn | AssistantTurn | SystemTurn, Field(discriminator="role")]


class ClientTool(Strict):
    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: CacheControl | None = None

    def plain(self) -> dict[str, Any]:
        function: dict[str, Any] = {"name": self.name, "parameters": self.input_schema}
        if self.description is not None:
            function["description"] = self.description
        if self.strict is not None:
            function["strict"] = self.strict
        return {"type": "function", "function": function}


class FreeChoice(Strict):
    type: Literal["auto", "any"]
    disable_parallel_tool_use: bool | None = None


class ToolChoice(Strict):
    type: Literal["tool"]
    name: str
    disable_parallel_tool_use: bool | None = None


class NoChoice(Strict):
    type: Literal["none"]


Choice = Annotated[FreeChoice | ToolChoice | NoChoice, Field(discriminator="type")]


class Thinking(Strict):
    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None
    """Accepted: `max_tokens` bounds thoughts and answer together."""
    display: Literal["summarized"] | None = None


class SchemaFormat(Strict):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Strict):
    effort: ReasoningEffort | None = None
    format: SchemaFormat | None = None


class Metadata(Strict):
    user_id: str | None = None


_NAMES = Names(
    {"stop": "stop_sequences", "response_format": "output_config.format"},
    {"function": "", "parameters": "input_schema", "json_schema": ""},
)


class CountBody(Strict):
    """POST /v1/messages/count_tokens"""

    model: str
    messages: Annotated[list[Turn], Field(min_length=1, fail_fast=True)]
    system: str | Annotated[list[TextBlock], Field(fail_fast=True)] | None = None
    tools: Annotated[list[ClientTool], Field(max_length=128, fail_fast=True)] | None = None
    tool_choice: Choice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None

    @field_validator("messages")
    @classmethod
    def _asks(cls, value: list[Turn]) -> list[Turn]:
        if isinstance(value[-1], AssistantTurn):
            raise ValueError("the last one is the assistant's, and no answer is continued here")
        return value

    def chat(self) -> dict[str, Any]:
        """Return the fields of the chat that has the same prompt."""
        messages = [message for turn in self.messages for message in turn.messages()]
        if self.system:
            messages.insert(0, {"role": "system", "content": _parts(self.system)})
        # A model that thinks by default does not, unless the request asks for it.
        thinking = self.thinking.type if self.thinking else "disabled"
        variables = {} if thinking == "adaptive" else {"enable_thinking": thinking == "enabled"}
        config = self.output_config or OutputConfig()
        schema = config.format and {"name": "output", "schema": config.format.schema_}
        return {
            "model": self.model, "messages": messages, "chat_template_kwargs": variables,
            "separate_reasoning": True, "reasoning_effort": config.effort,
            "tools": self.tools and [tool.plain() for tool in self.tools],
            "tool_choice": _choice(self.tool_choice),
            "parallel_tool_calls": _parallel(self.tool_choice),
            "response_format": schema and {"type": "json_schema", "json_schema": schema},
        }  # fmt: skip


class MessagesBody(CountBody, Extensions):
    """POST /v1/messages"""

    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    seed: int | None = None
    """A field of this server."""
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    # Not supported: only null, which asks for nothing, is accepted.
    container: None = None
    context_management: None = None
    inference_geo: None = None
    mcp_servers: None = None
    speed: Literal["standard"] | None = None

    @field_validator("stop_sequences")
    @classmethod
    def _stops(cls, value: list[str] | None) -> list[str] | None:
        if any(not 0 < len(one) <= _STOP_CHARS for one in value or ()):
            raise ValueError(f"give strings of 1 to {_STOP_CHARS} characters")
        return value

    def chat(self) -> dict[str, Any]:
        return super().chat() | {
            "max_tokens": self.max_tokens, "stop": self.stop_sequences, "stream": self.stream,
            "temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k,
            "seed": self.seed, "priority": self.priority, "cache_salt": self.cache_salt,
        }  # fmt: skip


def read_messages(body: bytes) -> Translated:
    """Return the chat of a request to /v1/messages. Raises ApiError."""
    return _chat(validated(MessagesBody, body, _TAGS))


def read_count(body: bytes) -> Translated:
    """Return the chat of a request to /v1/messages/count_tokens. Raises ApiError."""
    return _chat(validated(CountBody, body, _TAGS))


def _chat(asked: CountBody) -> Translated:
    return Translated(translated(ChatBody, asked.chat(), _NAMES), _NAMES)


def _parts(content: str | list[TextBlock]) -> Any:
    """Return a content as chats have it."""
    if isinstance(content, str):
        return content
    return [{"type": "text", "text": block.text} for block in content]


def _call(block: ToolUseBlock) -> dict[str, Any]:
    function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
    return {"id": block.id, "type": "function", "function": function}


def _choice(choice: FreeChoice | ToolChoice | NoChoice | None) -> Any:
    """Return the tool choice of a chat."""
    if isinstance(choice, ToolChoice):
        return {"type": "function", "function": {"name": choice.name}}
    return choice and {"any": "required"}.get(choice.type, choice.type)


def _parallel(choice: FreeChoice | ToolChoice | NoChoice | None) -> bool | None:
    single = not isinstance(choice, NoChoice) and choice and choice.disable_parallel_tool_use
    return False if single else None
