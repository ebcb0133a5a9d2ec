"""The fields of requests. Any other field is refused by name, never ignored."""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from c2cserve.server.tools.fields import Tool, ToolCalls, Tools
from c2cserve.server.tools.structured import NamedTool, ResponseFormat, StructuredOutputs

T = TypeVar("T")

_TOKEN_MAX = 2**31 - 1
_STOP_CHARS = 1024
_ID_DIGITS = 10
_SALT_CHARS = 256
_STRUCTURED = "structured_outputs"

Unit = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
TokenId = Annotated[int, Field(ge=0, le=_TOKEN_MAX)]
# A list ends at its first wrong entry: a million of them would be a million problems.
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Texts = Annotated[list[str], Field(min_length=1, fail_fast=True)]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(_Strict):
    include_usage: bool = False
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None
    """Accepted; chunks are never padded."""

    @field_validator("continuous_usage_stats")
    @classmethod
    def _continuous(cls, value: bool | None, others: ValidationInfo) -> bool | None:
        if value and not others.data.get("include_usage"):
            raise ValueError("needs include_usage to be true")
        return value


class Common(_Strict):
    """Fields that both APIs share."""

    model: str
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Unit | None = None
    seed: int | None = None
    stop: str | Annotated[list[str], Field(fail_fast=True)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True)] | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    priority: Annotated[int, Field(ge=-100, le=100)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=_SALT_CHARS)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    # Facts for OpenAI's service, which stores them or bills by them. They change nothing here.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] | None = None

    # Fields of vLLM with its default, which is what happens here. Other values are refused.
    skip_special_tokens: Literal[True] | None = None
    spaces_between_special_tokens: Literal[True] | None = None
    include_stop_str_in_output: Literal[False] | None = None
    use_beam_search: Literal[False] | None = None
    length_penalty: Annotated[float, Field(ge=1, le=1)] | None = None
    return_token_ids: Literal[False] | None = None
    return_tokens_as_token_ids: Literal[False] | None = None
    prompt_logprobs: None = None
    truncate_prompt_tokens: None = None
    allowed_token_ids: None = None
    bad_words: None = None

    @field_validator("stop")
    @classmethod
    def _stop(cls, value: str | list[str] | None) -> str | list[str] | None:
        values = [value] if isinstance(value, str) else value or []
        if any(not 0 < len(one) <= _STOP_CHARS for one in values):
            raise ValueError(f"give strings of 1 to {_STOP_CHARS} characters")
        return value

    @field_validator("logit_bias")
    @classmethod
    def _bias(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        if not all(
            key.isascii() and key.isdecimal() and len(key) <= _ID_DIGITS for key in value or {}
        ):
            raise ValueError("keys must be token ids")
        if len({int(key) for key in value or {}}) < len(value or {}):
            raise ValueError("a token id is given twice: leading zeros do not count")
        return value

    @field_validator("seed")
    @classmethod
    def _seed(cls, value: int | None) -> int | None:
        if value is not None and not -(2**63) <= value < 2**63:
            raise ValueError("must be a 64-bit integer")
        return value

    # If two fields contradict each other, the later one is named: a validator of the whole body
    # would name neither.
    @field_validator("stream_options")
    @classmethod
    def _stream_options(
        cls, value: StreamOptions | None, others: ValidationInfo
    ) -> StreamOptions | None:  # fmt: skip
        if value is not None and not others.data.get("stream"):
            raise ValueError("is only allowed when stream is true")
        return value

    @field_validator("structured_outputs")
    @classmethod
    def _structured(
        cls, value: StructuredOutputs | None, others: ValidationInfo
    ) -> StructuredOutputs | None:
        if value is None:
            return None
        if len(value.kinds) != 1:
            raise ValueError("give one of json, json_object, regex, choice and grammar")
        given = others.data.get("response_format")
        if given is not None and given.type != "text":
            raise ValueError("says what response_format says too: give one of them")
        return value

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class CompletionBody(Common):
    """POST /v1/completions"""

    prompt: str | TokenIds | Texts | Annotated[list[TokenIds], Field(min_length=1, fail_fast=True)]
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    best_of: int | None = None
    add_special_tokens: Literal[True] | None = None
    suffix: None = None

    @field_validator("best_of")
    @classmethod
    def _best_of(cls, value: int | None, others: ValidationInfo) -> int | None:
        if value is not None and value != (others.data.get("n") or 1):
            raise ValueError("is supported only when it equals n")
        return value


class TextPart(_Strict):
    type: Literal["text"]
    text: str


class Message(_Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: ToolCalls | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """The same by the name that other servers have for it."""
    # Clients send answers back unchanged, with nulls. These fields may be null and nothing else.
    refusal: None = None
    function_call: None = None
    audio: None = None
    annotations: None = None
    provider_specific_fields: dict[str, Any] | None = None
    """LiteLLM's own facts in messages that it sends back. They change nothing."""

    @property
    def chars(self) -> int:
        content = self.content or ""
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        called = sum(call.chars for call in self.tool_calls or ())
        return len(text) + len(self.name or "") + len(self._thought or "") + called

    @property
    def _thought(self) -> str | None:
        return self.reasoning if self.reasoning_content is None else self.reasoning_content

    @field_validator("tool_calls", "reasoning_content", "reasoning")
    @classmethod
    def _of_assistant(cls, value: T, others: ValidationInfo) -> T:
        if value is not None and others.data.get("role") != "assistant":
            raise ValueError("is only allowed in messages of the assistant")
        return value

    @field_validator("tool_call_id")
    @classmethod
    def _of_tool(cls, value: T, others: ValidationInfo) -> T:
        if value is not None and others.data.get("role") != "tool":
            raise ValueError("is only allowed in messages of a tool")
        return value

    def plain(self) -> dict[str, Any]:
        """Return the message for templates, its content a text or a list of parts: `developer` is
        OpenAI's newer word for `system`."""
        content: Any = self.content or ""
        if not isinstance(content, str):
            content = [{"type": "text", "text": part.text} for part in content]
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": content}
        given = {
            "name": self.name, "tool_call_id": self.tool_call_id,
            "reasoning_content": self._thought,
        }  # fmt: skip
        message.update((field, value) for field, value in given.items() if value is not None)
        if self.tool_calls is not None:
            message["tool_calls"] = [call.plain() for call in self.tool_calls]
        return message


class ChatBody(Common):
    """POST /v1/chat/completions"""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: ReasoningEffort | None = None
    modalities: list[Literal["text"]] | None = None
    verbosity: Literal["medium"] | None = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    separate_reasoning: bool | None = None
    """Default: for models that know the tag of thoughts."""
    include_reasoning: Literal[True] | None = None
    echo: Literal[False] | None = None
    add_generation_prompt: Literal[True] | None = None
    continue_final_message: Literal[False] | None = None
    add_special_tokens: Literal[False] | None = None
    # Not supported: only null, which asks for nothing, is accepted.
    functions: None = None
    function_call: None = None
    audio: None = None
    moderation: None = None
    prediction: None = None
    prompt_cache_options: None = None
    web_search_options: None = None

    @property
    def offered(self) -> list[Tool]:
        """The tools that the model may call."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def forced(self) -> list[Tool]:
        """The tools of which one or more must be called; empty if none must."""
        if isinstance(self.tool_choice, NamedTool):
            name = self.tool_choice.function.name
            return [tool for tool in self.offered if tool.function.name == name]
        return self.offered if self.tool_choice == "required" else []

    @property
    def names_tool(self) -> bool:
        """Whether `tool_choice` names the tool that is called."""
        return isinstance(self.tool_choice, NamedTool)

    @field_validator("tool_choice")
    @classmethod
    def _choice(cls, value: T, others: ValidationInfo) -> T:
        tools: list[Tool] | None = others.data.get("tools")
        if value in ("auto", "required") and not tools:
            raise ValueError(f"{value!r} is only allowed when tools are specified")
        if isinstance(value, NamedTool):
            name = value.function.name
            if all(tool.function.name != name for tool in tools or ()):
                raise ValueError(f"there is no tool {name!r} among the request's")
        if value == "required" or isinstance(value, NamedTool):
            wanted, given = others.data.get("response_format"), others.data.get(_STRUCTURED)
            if given is not None or (wanted is not None and wanted.type != "text"):
                raise ValueError("an output is either calls or what the format says")
        return value

    @property
    def template_variables(self) -> dict[str, Any]:
        """Return the variables that a request adds to its template's. `reasoning_effort` is one,
        and switches `enable_thinking`, which the request's own variables override."""
        effort = self.reasoning_effort
        added: dict[str, Any] = {}
        if effort is not None:
            added = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
        if self.offered:
            added["tools"] = [tool.plain() for tool in self.offered]
        return {**added, **(self.chat_template_kwargs or {})}

    @field_validator("top_logprobs")
    @classmethod
    def _top_logprobs(cls, value: int | None, others: ValidationInfo) -> int | None:
        if value is not None and not others.data.get("logprobs"):
            raise ValueError("needs logprobs to be true")
        return value

    @field_validator("max_completion_tokens")
    @classmethod
    def _max_tokens(cls, value: int | None, others: ValidationInfo) -> int | None:
        older = others.data.get("max_tokens")
        if None not in (value, older) and value != older:
            raise ValueError("says something else than max_tokens")
        return value


class TokenizeBody(_Strict):
    """POST /tokenize: `prompt` or `messages`."""

    model: str
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)] | None = Field(
        None, validate_default=True
    )
    add_special_tokens: bool | None = None
    """Default: for a prompt, since the templates of chats write them."""
    add_generation_prompt: bool | None = None
    continue_final_message: Literal[False] | None = None
    return_token_strs: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Tools | None = None

    @field_validator("messages")
    @classmethod
    def _one(cls, value: list[Message] | None, others: ValidationInfo) -> list[Message] | None:
        prompt = others.data.get("prompt", "")  # absent if it is wrong itself
        if (value is None) == (prompt is None):
            raise ValueError("give prompt or messages, one of them")
        return value


class DetokenizeBody(_Strict):
    """POST /detokenize"""

    model: str
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]
