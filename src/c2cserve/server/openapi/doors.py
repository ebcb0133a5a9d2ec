"""What the description of the API says of the doors beside OpenAI's chats."""

from typing import Any

from c2cserve.server.doors.anthropic.fields import CountBody, MessagesBody
from c2cserve.server.doors.ollama.fields import OllamaChatBody, OllamaGenerateBody, ShowBody
from c2cserve.server.doors.responses.fields import ResponsesBody
from c2cserve.server.openapi import answers
from c2cserve.server.openapi import door_answers as shapes
from c2cserve.server.openapi.operation import Operation

_LINES = "application/x-ndjson"
_MODEL = "qwen3-8b"
_HELLO = [{"role": "user", "content": "Hello"}]
_DONE: dict[str, Any] = {
    "done": True, "done_reason": "stop", "total_duration": 151_000_000, "load_duration": 560_000,
    "prompt_eval_count": 9, "prompt_eval_duration": 31_000_000, "eval_count": 3,
    "eval_duration": 96_000_000,
}  # fmt: skip
_LINE = {"model": _MODEL, "created_at": "2026-01-31T12:00:00.000000Z"}
_MESSAGE: dict[str, Any] = {
    "id": "msg_5f3a9c0d12e84b67", "type": "message", "role": "assistant", "model": _MODEL,
    "content": [{"type": "text", "text": "Hi!"}], "stop_reason": "end_turn", "stop_sequence": None,
    "usage": {
        "input_tokens": 9, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0,
        "output_tokens": 3,
    },
}  # fmt: skip
_RESPONSE: dict[str, Any] = {
    "id": "resp_5f3a9c0d12e84b67", "object": "response", "created_at": 1_769_860_800,
    "status": "completed", "error": None, "incomplete_details": None, "model": _MODEL,
    "output": [{
        "id": "msg_5f3a9c0d12e84b67_0", "type": "message", "status": "completed",
        "role": "assistant", "content": [
            {"type": "output_text", "text": "Hi!", "annotations": [], "logprobs": []}
        ],
    }],
    "usage": {
        "input_tokens": 9, "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": 3, "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": 12,
    },
    "background": False, "instructions": None, "max_output_tokens": None, "max_tool_calls": None,
    "metadata": {}, "parallel_tool_calls": True, "previous_response_id": None,
    "prompt_cache_key": None, "reasoning": {"effort": None, "summary": None},
    "safety_identifier": None, "store": False, "temperature": 1.0,
    "text": {"verbosity": "medium", "format": {"type": "text"}}, "tool_choice": "auto",
    "tools": [], "top_logprobs": 0, "top_p": 1.0, "truncation": "disabled", "user": None,
}  # fmt: skip
_SHOWN: dict[str, Any] = {
    "modelfile": "", "license": "", "template": "{% for m in messages %}...", "parameters":
    "temperature 0.6", "capabilities": ["completion", "tools", "thinking"],
    "details": {
        "parent_model": "", "format": "safetensors", "family": "qwen3", "families": ["qwen3"],
        "parameter_size": "", "quantization_level": "",
    },
    "model_info": {
        "general.architecture": "qwen3", "qwen3.context_length": 40_960, "qwen3.vocab_size":
        151_936,
    },
}  # fmt: skip

DOOR_OPERATIONS: dict[tuple[str, str], Operation] = {
    ("POST", "/v1/messages"): Operation(
        "Answer a chat, as Anthropic does", shapes.AnthropicMessage, MessagesBody,
        shapes.MessageEvent, errors=(404, 500), error=shapes.AnthropicError,
        examples=({"model": _MODEL, "max_tokens": 100, "messages": _HELLO}, _MESSAGE),
    ),
    ("POST", "/v1/messages/count_tokens"): Operation(
        "Count the tokens of a chat, as Anthropic does", shapes.CountedTokens, CountBody,
        errors=(404, 500), error=shapes.AnthropicError,
        examples=({"model": _MODEL, "messages": _HELLO}, {"input_tokens": 9}),
    ),
    ("POST", "/v1/responses"): Operation(
        "Answer items, as OpenAI's Responses do; nothing is stored", shapes.Response,
        ResponsesBody, shapes.ResponseEvent, errors=(404, 500), error=answers.Error,
        examples=({"model": _MODEL, "input": "Hello"}, _RESPONSE),
    ),
    ("POST", "/api/chat"): Operation(
        "Answer a chat, as Ollama does", shapes.OllamaChatLine, OllamaChatBody,
        shapes.OllamaChatLine, errors=(404, 500), error=shapes.OllamaError, streams=_LINES,
        examples=(
            {"model": _MODEL, "messages": _HELLO, "stream": False},
            {**_LINE, "message": {"role": "assistant", "content": "Hi!"}, **_DONE},
        ),
    ),
    ("POST", "/api/generate"): Operation(
        "Continue or answer a text, as Ollama does", shapes.OllamaGenerateLine, OllamaGenerateBody,
        shapes.OllamaGenerateLine, errors=(404, 500), error=shapes.OllamaError, streams=_LINES,
        examples=(
            {"model": _MODEL, "prompt": "Hello", "stream": False},
            {**_LINE, "response": "Hi!", **_DONE},
        ),
    ),
    ("GET", "/api/tags"): Operation(
        "List the catalogue, as Ollama does", shapes.OllamaModels, error=shapes.OllamaError
    ),
    ("GET", "/api/ps"): Operation(
        "List models with weights in memory, as Ollama does", shapes.OllamaLoadedModels,
        error=shapes.OllamaError,
    ),
    ("POST", "/api/show"): Operation(
        "Show a model, as Ollama does", shapes.OllamaShown, ShowBody, errors=(404, 500),
        error=shapes.OllamaError, examples=({"model": _MODEL}, _SHOWN),
    ),
    ("GET", "/api/version"): Operation("Show the version, as Ollama does", answers.Version),
}  # fmt: skip
