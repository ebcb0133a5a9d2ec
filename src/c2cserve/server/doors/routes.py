"""The routes of all doors, and the shape that each gives to errors."""

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from c2cserve import __version__
from c2cserve.runtime.gateway import Gateway
from c2cserve.server.doors.anthropic import events as anthropic
from c2cserve.server.doors.door import Door
from c2cserve.server.doors.ollama import lines as ollama
from c2cserve.server.doors.ollama.models import loaded, tags
from c2cserve.server.doors.openai import openai_writer
from c2cserve.server.doors.responses.events import ResponseWriter
from c2cserve.server.errors import ApiError
from c2cserve.server.guard import Role
from c2cserve.server.text.messages import Api

Handler = Callable[[HttpRequest], Awaitable[Response]]

DOORS: dict[Api, Door] = {
    "completions": openai_writer, "chat": openai_writer, "messages": anthropic.MessageWriter,
    "responses": ResponseWriter, "ollama_chat": ollama.ChatLineWriter,
    "ollama_generate": ollama.LineWriter,
}  # fmt: skip
ANSWER_PATHS: dict[str, Api] = {
    "/v1/completions": "completions", "/v1/chat/completions": "chat", "/v1/messages": "messages",
    "/v1/responses": "responses", "/api/chat": "ollama_chat", "/api/generate": "ollama_generate",
}  # fmt: skip
_TEXT_PATHS: dict[str, Api] = {
    "/tokenize": "tokenize", "/detokenize": "detokenize",
    "/v1/messages/count_tokens": "count_tokens", "/api/show": "ollama_show",
}  # fmt: skip
WEB_PATHS = ("/v1/{name:path}", "/api/{name:path}", "/tokenize", "/detokenize")
"""Routes that web pages of allowed origins may use."""
_ROOT = "c2cserve is running. /docs describes its API, /dashboard shows what it does.\n"
_ANTHROPIC = "/v1/messages"
_ERROR_BODIES: dict[str, Callable[[ApiError], dict[str, Any]]] = {
    _ANTHROPIC: anthropic.error_body,
    "/api/": ollama.error_body,
}
"""The beginning of a path -> errors there, where they have not OpenAI's shape."""


def error_body(path: str, error: ApiError) -> dict[str, Any]:
    """Return an error in the shape of the API that a path belongs to."""
    for begin, body in _ERROR_BODIES.items():
        if path.startswith(begin):
            return body(error)
    return error.body()


def id_headers(path: str, request_id: str) -> dict[str, str]:
    """Return the header fields with a request's id. Anthropic's client reads one of its own."""
    headers = {"x-request-id": request_id}
    if path.startswith(_ANTHROPIC):
        headers["request-id"] = request_id
    return headers


class DoorRoutes:
    """Handlers of requests for text, and of what else other APIs have."""

    def __init__(
        self, gateway: Gateway, answer: Callable[[HttpRequest, Api], Awaitable[Response]],
        of_text: Callable[[HttpRequest, Api], Awaitable[Response]],
    ) -> None:  # fmt: skip
        """`answer` answers requests that need slices, `of_text` those that need a tokenizer."""
        self._gateway = gateway
        self._answer = answer
        self._of_text = of_text

    def table(self) -> list[tuple[str, str, Handler, Role]]:
        """Return method, path, handler and kind of key."""
        return [
            *(
                ("POST", path, _with(self._answer, api), "user")
                for path, api in ANSWER_PATHS.items()
            ),
            *(
                ("POST", path, _with(self._of_text, api), "user")
                for path, api in _TEXT_PATHS.items()
            ),
            ("GET", "/api/tags", self._tags, "user"),
            ("GET", "/api/ps", self._loaded, "user"),
            ("GET", "/api/version", self._version, ""),
            ("GET", "/", self._root, ""),
        ]

    async def _tags(self, http: HttpRequest) -> Response:
        return _json(tags(filter(_allowed(http), self._gateway.models())))

    async def _loaded(self, http: HttpRequest) -> Response:
        return _json(loaded(filter(_allowed(http), self._gateway.models())))

    async def _root(self, _: HttpRequest) -> Response:
        """Say that there is a server: Ollama's command looks here (HEAD) before all else."""
        return Response(_ROOT, media_type="text/plain")

    async def _version(self, http: HttpRequest) -> Response:
        return _json({"version": __version__})


def _with(handle: Callable[[HttpRequest, Api], Awaitable[Response]], api: Api) -> Handler:
    async def handler(http: HttpRequest) -> Response:
        return await handle(http, api)

    return handler


def _allowed(http: HttpRequest) -> Callable[[Any], bool]:
    """Return whether the request's key may use a model."""
    limits = http.state.key.quota.limits
    return lambda status: limits.allows_model(status.id)


def _json(content: object) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")
