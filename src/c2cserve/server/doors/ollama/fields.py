"""The fields of /api/chat, /api/generate and /api/show, and what they ask of a chat."""

import json
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator

from c2cserve.server.doors.translation import (
    Extensions,
    Names,
    Strict,
    Translated,
    translated,
    validated,
)
from c2cserve.server.fields import ChatBody, CompletionBody, Penalty, Unit

_UNLIMITED = (-1, -2)
"""`num_predict` without a limit, and up to the end of the context: the same here."""
_ENDLESS_PENALTY = -1


class OllamaOptions(Strict):
    """Sampling, and settings of Ollama's runner."""

    num_predict: int | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    min_p: Unit | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    repeat_penalty: Annotated[float, Field(ge=0.01, le=10)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None

    # Settings of Ollama's runner. They change no token, and nothing here.
    num_ctx: int | None = None
    num_keep: int | None = None
    num_batch: int | None = None
    num_gpu: int | None = None
    main_gpu: int | None = None
    num_thread: int | None = None
    numa: bool | None = None
    low_vram: bool | None = None
    f16_kv: bool | None = None
    use_mmap: bool | None = None
    use_mlock: bool | None = None

    # Samplers that are not there, with the values that switch them off.
    mirostat: Literal[0] | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    tfs_z: Annotated[float, Field(ge=1, le=1)] | None = None
    typical_p: Annotated[float, Field(ge=1, le=1)] | None = None
    penalize_newline: Literal[True] | None = None
    repeat_last_n: int | None = None

    @field_validator("num_predict")
    @classmethod
    def _count(cls, value: int | None) -> int | None:
        if value is not None and value < 1 and value not in _UNLIMITED:
            raise ValueError("at least 1, or -1 for no limit")
        return value

    @field_validator("repeat_last_n")
    @classmethod
    def _window(cls, value: int | None) -> int | None:
        if value not in (None, _ENDLESS_PENALTY):
            raise ValueError("only -1 is supported: repeat_penalty is of all tokens")
        return value

    def chat(self) -> dict[str, Any]:
        """Return the fields of a chat or a completion."""
        limit = None if self.num_predict in _UNLIMITED else self.num_predict
        return {
            "max_tokens": limit, "temperature": self.temperature, "top_k": self.top_k,
            "top_p": self.top_p, "min_p": self.min_p, "seed": self.seed, "stop": self.stop,
            "repetition_penalty": self.repeat_penalty, "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
        }  # fmt: skip


NoImages = Annotated[None, BeforeValidator(lambda value: value or None)]
"""Some clients send an empty list with each message."""


class CalledTool(Strict):
    name: str
    arguments: dict[str, Any]
    index: int | None = None


class OllamaCall(Strict):
    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledTool


class OllamaMessage(Strict):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    tool_calls: Annotated[list[OllamaCall], Field(fail_fast=True)] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None
    images: NoImages = None

    def plain(self) -> dict[str, Any]:
        """Return the message of a chat. Calls that have no ids get their numbers."""
        calls = [
            {"id": call.id or f"call_{number}", "type": "function", "function": {
                "name": call.function.name,
                "arguments": json.dumps(call.function.arguments, ensure_ascii=False),
            }}
            for number, call in enumerate(self.tool_calls or ())
        ]  # fmt: skip
        found = {
            "role": self.role, "content": self.content or "", "name": self.tool_name,
            "reasoning_content": self.thinking, "tool_call_id": self.tool_call_id,
            "tool_calls": calls or None,
        }  # fmt: skip
        return {key: value for key, value in found.items() if value is not None}


class _Asked(Extensions):
    """Fields that chats and completions share."""

    model: str
    stream: bool | None = None
    """Null is true, as in Ollama."""
    options: OllamaOptions | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    keep_alive: str | float | None = None
    """Accepted: models stay in memory as long as there is room."""
    truncate: Literal[False] | None = None
    """Prompts are never cut."""
    shift: Literal[False] | None = None
    logprobs: Literal[False] | None = None
    top_logprobs: Literal[0] | None = None

    def common(self) -> dict[str, Any]:
        """Return the fields of a chat or a completion."""
        options = self.options or OllamaOptions()
        schema = {"name": "output", "schema": self.format}
        given: dict[str, Any] | None = None
        if self.format:
            given = {"type": "json_object"}
            if self.format != "json":
                given = {"type": "json_schema", "json_schema": schema}
        return {
            "model": self.model, "stream": self.stream is not False, "response_format": given,
            "priority": self.priority, "cache_salt": self.cache_salt, **options.chat(),
        }  # fmt: skip

    def thinking(self) -> dict[str, Any]:
        """Return the fields of a chat that are about reasoning."""
        switched = isinstance(self.think, bool)
        return {
            "separate_reasoning": True,
            "reasoning_effort": None if switched else self.think,
            "chat_template_kwargs": {"enable_thinking": self.think} if switched else None,
        }


class OllamaChatBody(_Asked):
    """POST /api/chat"""

    messages: Annotated[list[OllamaMessage], Field(fail_fast=True)] | None = None
    """If there are none, the model is loaded."""
    tools: list[dict[str, Any]] | None = None

    @field_validator("messages")
    @classmethod
    def _asks(cls, value: list[OllamaMessage] | None) -> list[OllamaMessage] | None:
        if value and value[-1].role == "assistant":
            raise ValueError("the last one is the assistant's, and no answer is continued here")
        return value


class OllamaGenerateBody(_Asked):
    """POST /api/generate"""

    prompt: str = ""
    """If it is empty, the model is loaded."""
    system: str | None = None
    raw: bool | None = None
    # Not supported: only what asks for nothing is accepted. Ollama's command sends empty texts.
    context: None = None
    images: NoImages = None
    suffix: Literal[""] | None = None
    template: Literal[""] | None = None

    @field_validator("raw")
    @classmethod
    def _alone(cls, value: bool | None, others: Any) -> bool | None:
        for field in ("system", "think"):
            if value and others.data.get(field):
                raise ValueError(f"{field} is for chat templates, and raw prompts have none")
        return value


class ShowBody(Strict):
    """POST /api/show"""

    model: str
    name: str | None = None
    """The older name of `model`, which Ollama's command sends empty."""
    verbose: bool | None = None
    # Ollama's command sends them empty.
    system: Literal[""] | None = None
    template: Literal[""] | None = None
    options: None = None

    @field_validator("name")
    @classmethod
    def _same(cls, value: str | None, others: Any) -> str | None:
        if value and value != others.data.get("model"):
            raise ValueError("says something else than model")
        return value


_SAMPLING = {
    "max_tokens": "options.num_predict", "repetition_penalty": "options.repeat_penalty",
    "stop": "options.stop", "seed": "options.seed",
}  # fmt: skip
_CHAT = Names({**_SAMPLING, "response_format": "format"}, {"json_schema": "", "schema": ""})
_PROMPT = Names({**_CHAT.fields, "messages": "prompt"}, _CHAT.inner)


def read_chat(body: bytes) -> Translated:
    """Return the chat of a request to /api/chat. Raises ApiError."""
    asked = validated(OllamaChatBody, body)
    if not asked.messages:
        return _load(asked)
    messages = [message.plain() for message in asked.messages]
    fields = {**asked.common(), **asked.thinking(), "messages": messages, "tools": asked.tools}
    return Translated(translated(ChatBody, fields, _CHAT), _CHAT)


def read_generate(body: bytes) -> Translated:
    """Return the chat of a request to /api/generate, or the completion of a raw prompt. Raises
    ApiError."""
    asked = validated(OllamaGenerateBody, body)
    if not asked.prompt:
        return _load(asked)
    if asked.raw:
        fields = {**asked.common(), "prompt": asked.prompt}
        completion = translated(CompletionBody, fields, _PROMPT)
        return Translated(completion, _PROMPT, unbounded=True)
    messages = [{"role": "user", "content": asked.prompt}]
    if asked.system:
        messages.insert(0, {"role": "system", "content": asked.system})
    fields = {**asked.common(), **asked.thinking(), "messages": messages}
    return Translated(translated(ChatBody, fields, _PROMPT), _PROMPT)


def _load(asked: _Asked) -> Translated:
    """Return a request for no output, which loads the model. Its prompt is not shown."""
    fields = {"model": asked.model, "stream": asked.stream is not False, "prompt": "."}
    return Translated(translated(CompletionBody, {**fields, "echo": True, "max_tokens": 0}, _CHAT))
