"""The work of /api/show, in a text process: what a model's files say of it."""

from typing import Any

import msgspec

from c2cserve.files.reading import CONFIG_BYTES_MAX, FileProblem, read_object
from c2cserve.server.doors.ollama.fields import ShowBody
from c2cserve.server.doors.ollama.models import details_of
from c2cserve.server.doors.translation import validated
from c2cserve.server.errors import unservable
from c2cserve.server.text.messages import Target, TextAnswer, TextRequest
from c2cserve.server.text.tokenizer import Tokenizer

_PARAMETERS = {"repetition_penalty": "repeat_penalty", "max_new_tokens": "num_predict"}
"""Sampling defaults of a checkpoint -> Ollama's names."""


def do_show(work: TextRequest, tokenizer: Tokenizer | None) -> TextAnswer:
    """Answer a request to /api/show, in a text process. Raises ApiError."""
    body = validated(ShowBody, work.body)
    if work.target is None or tokenizer is None:
        return TextAnswer(body.model, b"")
    try:
        config = read_object(tokenizer.directory / "config.json", CONFIG_BYTES_MAX) or {}
    except FileProblem as problem:
        raise unservable(work.target.version, str(problem)) from problem
    return TextAnswer(body.model, msgspec.json.encode(_shown(work.target, tokenizer, config)))


def _shown(target: Target, tokenizer: Tokenizer, config: dict[str, Any]) -> dict[str, Any]:
    family = config.get("model_type")
    family = family if isinstance(family, str) else ""
    template, capabilities = tokenizer.template_source, ["completion"]
    if tokenizer.call_format is not None:
        capabilities.append("tools")
    if "enable_thinking" in template:
        capabilities.append("thinking")
    defaults: dict[str, Any] = msgspec.to_builtins(target.defaults)
    return {
        "modelfile": "", "license": "", "template": template, "capabilities": capabilities,
        "parameters": "\n".join(
            f"{_PARAMETERS.get(key, key)} {value}"
            for key, value in defaults.items()
            if value is not None
        ),
        "details": details_of(family),
        "model_info": {
            "general.architecture": family, f"{family}.context_length": target.max_context,
            f"{family}.vocab_size": target.vocab_size,
        },
    }  # fmt: skip
