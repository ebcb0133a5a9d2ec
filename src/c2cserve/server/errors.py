"""Errors in OpenAI's shape."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import msgspec
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from c2cserve.core.model import name_of
from c2cserve.runtime.gateway import Refused
from c2cserve.server.tools.structured import FORMATS

if TYPE_CHECKING:
    from starlette.responses import Response

_TYPES = {
    400: "invalid_request_error", 401: "invalid_request_error", 403: "invalid_request_error",
    404: "invalid_request_error",
    405: "invalid_request_error", 408: "invalid_request_error", 409: "invalid_request_error",
    413: "invalid_request_error", 415: "invalid_request_error", 431: "invalid_request_error",
    429: "rate_limit_error", 500: "server_error", 503: "service_unavailable_error",
}  # fmt: skip


class ApiError(Exception):
    """An error as the answer to a request. `param` names the field at fault."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s
        self.headers = dict(headers or {})

    @classmethod
    def of(cls, refused: Refused) -> "ApiError":
        code = {404: "model_not_found", 429: "rate_limit_exceeded"}.get(refused.status)
        param = "model" if refused.status == 404 else None
        return cls(
            refused.status, refused.reason, param=param, code=code,
            retry_after_s=refused.retry_after_s,
        )  # fmt: skip

    @property
    def naming(self) -> str:
        """The message with the field at fault, for shapes that have no other place for it."""
        if self.param is None or self.param in self.message:
            return self.message
        return f"{self.param}: {self.message}"

    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "server_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self, body: dict[str, Any]) -> "Response":
        """Return the error as a response. `body`: the error in the shape of its API."""
        # A text process raises errors too, and sends no responses.
        from starlette.responses import Response

        content = msgspec.json.encode(body)
        return Response(content, self.status, self.all_headers(), media_type="application/json")

    def all_headers(self) -> dict[str, str]:
        """Return the header fields beside those of the content. `retry-after-ms` is what OpenAI's
        clients read first: whole seconds would bring many of them back together."""
        if self.retry_after_s is None:
            return self.headers
        after_s = max(1.0, self.retry_after_s)
        return {
            **self.headers, "retry-after": str(math.ceil(after_s)),
            "retry-after-ms": str(math.ceil(1e3 * after_s)),
        }  # fmt: skip


def unservable(version: str, reason: str) -> ApiError:
    """Return the error for a model whose tokenizer cannot be used: the request is not at fault."""
    return ApiError(503, f"the model {name_of(version)!r} cannot be served: {reason}")


_UNIONS = {
    "prompt": "a string, a list of strings, a list of token ids or a list of such lists",
    "stop": "a string or a list of strings",
    "content": "a string or a list of text parts",
}
"""Fields of several types -> what they may be. Pydantic would only mention the first type."""


_TEXT_ONLY = (
    "the models here read text only, so a message's content is a string or a list of parts of the"
    " type 'text'"
)
_MEDIA = (
    "image", "document", "input_image", "input_audio", "input_file", "image_url", "audio", "file",
)  # fmt: skip
"""Types of parts of messages in several APIs that are no text."""
_WHY_NOT = {
    "logits_processors": ": the server runs no code of its clients",
    "suffix": ": no model here fills in the middle",
    "audio": ": the models here write text only",
    "images": ": the models here read text only",
    "previous_response_id": ": answers are not stored, so send the items before as `input`",
    "conversation": ": conversations are not stored, so send their items as `input`",
}
"""Refused fields -> the reason, where a list of supported fields would not suggest it."""
_PROBLEMS_MAX = 100
"""The problems of a body that are examined, the first ones: there may be a million."""
_PARAM_CHARS = 200


def _shown(value: object) -> str:
    """Return a wrong value for a message, cut if it is long."""
    text = repr(value)
    return text if len(text) <= _PARAM_CHARS else f"{text[:_PARAM_CHARS]}..."


def of_validation(error: ValidationError) -> ApiError:
    """Return the first problem of a request body as an error that names its field."""
    problems = error.errors(include_url=False, include_context=False)[:_PROBLEMS_MAX]
    # Among the problems of a union, the one with a wrong word ("image_url") says most.
    first = next((one for one in problems if one["type"] == "literal_error"), problems[0])
    if first["type"] == "union_tag_invalid":
        first["loc"] = (*first["loc"], "type")
    return of_problem(first)


def of_problem(first: ErrorDetails) -> ApiError:
    """Return one problem of a request body as an error that names its field."""
    where = _fields(first["loc"])
    param = ".".join(where)[:_PARAM_CHARS] or None
    if first["type"] in ("extra_forbidden", "none_required"):
        message = f"{param!r} is not supported{_WHY_NOT.get(where[-1], '')}"
        return ApiError(400, message, param=param, code="unsupported_parameter")
    if first["type"] == "literal_error" and where[-1:] == ["type"] and "content" in where:
        message = f"{param}: {_shown(first['input'])} is not supported: {_TEXT_ONLY}"
        return ApiError(400, message, param=param, code="unsupported_parameter")
    if first["type"] == "union_tag_invalid":
        given = first["input"]
        fields = cast("dict[str, object]", given) if isinstance(given, dict) else {}
        tag = fields.get(where[-1], given)
        why = f": {_TEXT_ONLY}" if tag in _MEDIA else ""
        message = f"{param}: {_shown(tag)} is not supported{why}"
        return ApiError(400, message, param=param, code="unsupported_parameter")
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "union_tag_not_found":
        message = "Field required"
    named = [part for part in where if part in _UNIONS]
    if first["type"] == "literal_error":
        message += f", not {_shown(first['input'])}"
    elif named and first["type"] not in ("value_error", "missing"):
        message = f"must be {_UNIONS[named[0]]}"
    return ApiError(400, f"{param}: {message}" if param else message, param=param)


def _fields(location: tuple[int | str, ...]) -> list[str]:
    """Return the fields of a location, without pydantic's names of union members."""
    fields = [str(part) for part in location if not _is_branch(part)]
    if fields[:1] == ["response_format"] and len(fields) > 1 and fields[1] in FORMATS:
        del fields[1]
    return fields


def _is_branch(part: object) -> bool:
    """Return whether a part of a location is pydantic's name of a union member, not a field."""
    return isinstance(part, str) and (
        "[" in part or part in ("str", "int", "float", "bool", "function-after", "NamedTool")
    )
