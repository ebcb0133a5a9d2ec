"""OpenAI's error shape, and turning what goes wrong into it."""

from typing import Any

import msgspec
from pydantic import ValidationError
from starlette.responses import Response

from c2cserve.runtime.gateway import Refused

_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 404: "invalid_request_error",
    405: "invalid_request_error", 409: "invalid_request_error", 413: "invalid_request_error",
    429: "rate_limit_error", 500: "server_error", 503: "service_unavailable_error",
}  # fmt: skip


class ApiError(Exception):
    """An answer that is an error. `param` names the field at fault."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    @classmethod
    def of(cls, refused: Refused) -> "ApiError":
        code = {404: "model_not_found", 429: "rate_limit_exceeded"}.get(refused.status)
        param = "model" if refused.status == 404 else None
        return cls(
            refused.status, refused.reason, param=param, code=code,
            retry_after_s=refused.retry_after_s,
        )  # fmt: skip

    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "server_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> Response:
        headers: dict[str, str] = {}
        if self.retry_after_s is not None:
            headers["retry-after"] = str(max(1, round(self.retry_after_s)))
        content = msgspec.json.encode(self.body())
        return Response(content, self.status, headers, media_type="application/json")


def of_validation(error: ValidationError) -> ApiError:
    """The first problem of a request body, in the words of its author."""
    first = error.errors(include_url=False, include_context=False)[0]
    where = [str(part) for part in first["loc"] if not _is_branch(part)]
    param = ".".join(where) or None
    if first["type"] == "extra_forbidden":
        message = f"{param!r} is not supported"
        return ApiError(400, message, param=param, code="unsupported_parameter")
    message = first["msg"].removeprefix("Value error, ")
    return ApiError(400, f"{param}: {message}" if param else message, param=param)


def _is_branch(part: object) -> bool:
    """Names of union members that pydantic puts into a location; not names of fields."""
    return isinstance(part, str) and (
        "[" in part or part in ("str", "int", "float", "bool", "function-after")
    )
