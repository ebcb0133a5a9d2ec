"""The shapes of answers of the doors beside OpenAI's chats. Tests compare real answers with
them."""

from typing import Any, Literal

from c2cserve.server.openapi.answers import Shape

# ---- Anthropic ----------------------------------------------------------------------------------


class AnthropicErrorDetail(Shape):
    type: str
    message: str


class AnthropicError(Shape):
    type: Literal["error"]
    error: AnthropicErrorDetail


class MessageText(Shape):
    type: Literal["text"]
    text: str


class MessageThinking(Shape):
    type: Literal["thinking"]
    thinking: str
    signature: str


class MessageToolUse(Shape):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


MessageBlock = MessageText | MessageThinking | MessageToolUse


class MessageUsage(Shape):
    """The three counts of input add up to the prompt."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageStop(Shape):
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None


class AnthropicMessage(MessageStop):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[MessageBlock]
    usage: MessageUsage


class MessageStart(Shape):
    type: Literal["message_start"]
    message: AnthropicMessage


class MessagePing(Shape):
    type: Literal["ping", "message_stop"]


class ContentBlockStart(Shape):
    type: Literal["content_block_start"]
    index: int
    content_block: MessageBlock


class TextDelta(Shape):
    type: Literal["text_delta"]
    text: str


class ThinkingDelta(Shape):
    type: Literal["thinking_delta"]
    thinking: str


class InputDelta(Shape):
    type: Literal["input_json_delta"]
    partial_json: str


class ContentBlockDelta(Shape):
    type: Literal["content_block_delta"]
    index: int
    delta: TextDelta | ThinkingDelta | InputDelta


class ContentBlockStop(Shape):
    type: Literal["content_block_stop"]
    index: int


class MessageDelta(Shape):
    type: Literal["message_delta"]
    delta: MessageStop
    usage: MessageUsage


MessageEvent = (
    MessageStart | MessagePing | ContentBlockStart | ContentBlockDelta | ContentBlockStop
    | MessageDelta | AnthropicError
)  # fmt: skip


class CountedTokens(Shape):
    input_tokens: int


# ---- Ollama -------------------------------------------------------------------------------------


class OllamaError(Shape):
    error: str


class OllamaCalled(Shape):
    index: int
    name: str
    arguments: dict[str, Any]


class OllamaToolCall(Shape):
    id: str
    function: OllamaCalled


class OllamaAnswerMessage(Shape):
    role: Literal["assistant"]
    content: str
    thinking: str | None = None
    tool_calls: list[OllamaToolCall] | None = None


class _Line(Shape):
    """A part of an answer. The fields of counts and durations (nanoseconds) are those of the last
    one."""

    model: str
    created_at: str
    done: bool
    done_reason: Literal["stop", "length"] | None = None
    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_count: int | None = None
    prompt_eval_duration: int | None = None
    eval_count: int | None = None
    eval_duration: int | None = None


class OllamaChatLine(_Line):
    message: OllamaAnswerMessage


class OllamaGenerateLine(_Line):
    response: str
    thinking: str | None = None


class OllamaDetails(Shape):
    parent_model: str
    format: Literal["safetensors"]
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaModel(Shape):
    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    """A digest of the model's id, not of its files."""
    details: OllamaDetails


class OllamaModels(Shape):
    models: list[OllamaModel]


class OllamaLoaded(OllamaModel):
    expires_at: str
    size_vram: int
    context_length: int


class OllamaLoadedModels(Shape):
    models: list[OllamaLoaded]


class OllamaShown(Shape):
    modelfile: str
    license: str
    template: str
    parameters: str
    capabilities: list[Literal["completion", "tools", "thinking"]]
    details: OllamaDetails
    model_info: dict[str, str | int]


# ---- OpenAI's Responses -------------------------------------------------------------------------


class OutputTextPart(Shape):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[Any]


class ReasoningTextPart(Shape):
    type: Literal["reasoning_text"]
    text: str


class _Item(Shape):
    id: str
    status: Literal["in_progress", "completed", "incomplete"]


class ResponseMessage(_Item):
    type: Literal["message"]
    role: Literal["assistant"]
    content: list[OutputTextPart]


class ResponseReasoning(_Item):
    type: Literal["reasoning"]
    summary: list[Any]
    content: list[ReasoningTextPart]
    encrypted_content: None


class ResponseCall(_Item):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    """A JSON object."""


class CachedTokens(Shape):
    cached_tokens: int
    cache_write_tokens: int


class ReasoningTokens(Shape):
    reasoning_tokens: int


class ResponseUsage(Shape):
    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class ResponseError(Shape):
    code: str
    message: str


class IncompleteDetails(Shape):
    reason: Literal["max_output_tokens"]


class Response(Shape):
    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    model: str
    output: list[ResponseMessage | ResponseReasoning | ResponseCall]
    usage: ResponseUsage | None
    service_tier: Literal["default"] | None = None
    # Fields of the request.
    background: Literal[False]
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: None
    prompt_cache_key: str | None
    reasoning: dict[str, Any]
    safety_identifier: str | None
    store: Literal[False]
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: Literal[0]
    top_p: float
    truncation: Literal["disabled"]
    user: str | None


class ResponseEvent(Shape):
    """An event. `type` says which of the other fields it has."""

    type: str
    sequence_number: int
    response: Response | None = None
    output_index: int | None = None
    content_index: int | None = None
    item_id: str | None = None
    item: ResponseMessage | ResponseReasoning | ResponseCall | None = None
    part: OutputTextPart | ReasoningTextPart | None = None
    delta: str | None = None
    text: str | None = None
    name: str | None = None
    arguments: str | None = None
    logprobs: list[Any] | None = None
