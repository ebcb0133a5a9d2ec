"""The shapes of answers, for the API's description. Tests compare real answers with them."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

FinishReason = Literal["stop", "length", "tool_calls"]


class Shape(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ErrorDetail(Shape):
    message: str
    type: str
    param: str | None
    """The field at fault, with its path."""
    code: str | None


class Error(Shape):
    error: ErrorDetail


class PromptTokensDetails(Shape):
    cached_tokens: int


class Usage(Shape):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None


class _Envelope(Shape):
    id: str
    created: int
    model: str
    system_fingerprint: str
    service_tier: Literal["default"] | None = None


# ---- completions --------------------------------------------------------------------------------


class CompletionLogprobs(Shape):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Shape):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None


class Completion(_Envelope):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage | None = None
    """Null or absent in chunks of a stream, except the last one."""


# ---- chats --------------------------------------------------------------------------------------


class TopLogprob(Shape):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Shape):
    content: list[TokenLogprob]
    refusal: None


class FunctionCalled(Shape):
    name: str
    arguments: str
    """A JSON object."""


class ToolCalled(Shape):
    id: str
    type: Literal["function"]
    function: FunctionCalled


class ToolCallChunk(ToolCalled):
    index: int


class AnswerMessage(Shape):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    tool_calls: list[ToolCalled] | None = None


class ChatChoice(Shape):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatCompletion(_Envelope):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage


class Delta(Shape):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallChunk] | None = None


class ChatChunkChoice(Shape):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class ChatCompletionChunk(_Envelope):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


# ---- tokens -------------------------------------------------------------------------------------


class Tokenized(Shape):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(Shape):
    prompt: str


# ---- models and administration ------------------------------------------------------------------


class ModelCard(Shape):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    state: str
    aliases: list[str]


class ModelCards(Shape):
    object: Literal["list"]
    data: list[ModelCard]


class Removed(Shape):
    id: str
    removed: Literal[True]


class KeysRead(Shape):
    keys: int


class KeyList(Shape):
    """Keys without their secrets."""

    file: str | None
    loaded: str | None
    error: str | None
    keys: list[dict[str, Any]]


class UsageReport(BaseModel):
    """Usage since the start of the server."""

    model_config = ConfigDict(extra="allow")

    lines_lost: int


class SliceCondition(Shape):
    state: str
    trouble: str
    failed_models: list[str]


class Health(Shape):
    healthy: bool
    slices: dict[str, SliceCondition]


class Readiness(Shape):
    ready: bool
    slices: dict[str, SliceCondition]


class Version(Shape):
    version: str
