"""The HTTP application: routes, keys, errors."""

import hmac
import logging
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from c2cserve import __version__
from c2cserve.core.model import ModelStatus
from c2cserve.runtime.gateway import Gateway, Refused, Superseded
from c2cserve.server.errors import ApiError, of_validation
from c2cserve.server.fields import ChatBody, Common, CompletionBody
from c2cserve.server.inference import Inference
from c2cserve.server.metrics import Metrics
from c2cserve.server.prepare import Prepared, Preparer
from c2cserve.server.settings import ServerSettings

log = logging.getLogger(__name__)
Body = TypeVar("Body", bound=BaseModel)
Handler = Callable[[HttpRequest], Awaitable[Response]]

_RELOADS_MAX = 8
"""Reloads that one request may meet before it reaches its model."""


def create_app(gateway: Gateway, settings: ServerSettings) -> FastAPI:
    app = FastAPI(title="c2cserve", version=__version__, docs_url=None, redoc_url=None)
    routes = _Routes(gateway, settings)
    for method, path, handler, role in routes.table():
        app.add_route(path, routes.guarded(handler, role, path), methods=[method])

    async def http_error(_: HttpRequest, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return ApiError(error.status_code, str(error.detail), headers=error.headers).response()

    app.add_exception_handler(HTTPException, http_error)
    return app


def _json(content: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")


class _Routes:
    def __init__(self, gateway: Gateway, settings: ServerSettings) -> None:
        self._gateway = gateway
        self._settings = settings
        self._metrics = Metrics(gateway)
        self._preparer = Preparer(gateway, settings.tokenizer_threads, settings.tokenizers)
        self._inference = Inference(gateway, self._metrics, f"c2cserve-{__version__}")

    def table(self) -> list[tuple[str, str, Handler, str]]:
        """Method, path, handler, and whose key is asked for. Model ids may contain slashes."""
        return [
            ("POST", "/v1/completions", self._completions, "user"),
            ("POST", "/v1/chat/completions", self._chat, "user"),
            ("GET", "/v1/models", self._models, "user"),
            ("GET", "/v1/models/{name:path}", self._model, "user"),
            ("GET", "/admin/state", self._state, "admin"),
            ("GET", "/admin/models", self._admin_models, "admin"),
            ("POST", "/admin/models", self._add, "admin"),
            ("POST", "/admin/models/{name:path}/reload", self._reload, "admin"),
            ("GET", "/admin/models/{name:path}", self._admin_model, "admin"),
            ("DELETE", "/admin/models/{name:path}", self._remove, "admin"),
            ("GET", "/metrics", self._show_metrics, "admin"),
            ("GET", "/health", self._health, ""),
            ("GET", "/ready", self._ready, ""),
            ("GET", "/version", self._version, ""),
        ]

    def guarded(self, handler: Handler, role: str, route: str) -> Handler:
        """Keys, request ids, and every failure as an error in OpenAI's shape."""

        async def guarded(http: HttpRequest) -> Response:
            request_id = http.headers.get("x-request-id") or secrets.token_hex(8)
            http.state.request_id = request_id
            try:
                self._authorize(http, role)
                response = await handler(http)
            except ApiError as error:
                response = error.response()
            except Refused as refused:
                response = ApiError.of(refused).response()
            except Exception:
                # The last stop: a defect answers 500 and is logged, the server goes on.
                log.exception("%s failed", route, extra={"request_id": request_id})
                response = ApiError(500, "internal error; see the server's log").response()
            response.headers["x-request-id"] = request_id
            self._metrics.responded(route, response.status_code)
            if response.status_code >= 400 and role:
                log.info(
                    "%s answered %d", route, response.status_code,
                    extra={
                        "request_id": request_id, "route": route, "status": response.status_code
                    },
                )  # fmt: skip
            return response

        return guarded

    def _authorize(self, http: HttpRequest, role: str) -> None:
        keys = {"user": self._settings.api_keys, "admin": (self._settings.admin_key,)}.get(role, ())
        accepted = [key for key in keys if key]
        if not accepted:
            return
        given = http.headers.get("authorization", "").removeprefix("Bearer ").encode()
        if not any(hmac.compare_digest(given, key.encode()) for key in accepted):
            raise ApiError(401, "Incorrect API key provided", code="invalid_api_key")

    async def _body(self, http: HttpRequest) -> bytes:
        limit = self._settings.body_bytes_max
        data = bytearray()
        async for part in http.stream():
            data += part
            if len(data) > limit:
                raise ApiError(413, f"the request body is larger than {limit} bytes")
        return bytes(data)

    async def _parse(self, http: HttpRequest, kind: type[Body]) -> Body:
        data = await self._body(http)
        try:
            return kind.model_validate_json(data)
        except ValidationError as error:
            raise of_validation(error) from error

    # ---- inference ------------------------------------------------------------------------------

    async def _completions(self, http: HttpRequest) -> Response:
        body = await self._parse(http, CompletionBody)
        return await self._answer(http, body, lambda: self._preparer.completion(body, http.headers))

    async def _chat(self, http: HttpRequest) -> Response:
        body = await self._parse(http, ChatBody)
        return await self._answer(http, body, lambda: self._preparer.chat(body, http.headers))

    async def _answer(
        self, http: HttpRequest, body: Common, prepare: Callable[[], Awaitable[Prepared]]
    ) -> Response:
        """A model that is reloaded has another tokenizer: what was prepared for the old version,
        and has not reached it, is prepared again."""
        for _ in range(_RELOADS_MAX):
            try:
                prepared = await prepare()
                return await self._inference.answer(http, body, prepared, http.state.request_id)
            except Superseded:
                continue
        raise Superseded

    async def _models(self, http: HttpRequest) -> Response:
        return _json({"object": "list", "data": [_card(m) for m in self._gateway.models()]})

    async def _model(self, http: HttpRequest) -> Response:
        return _json(_card(self._status(http)))

    def _status(self, http: HttpRequest) -> ModelStatus:
        name = http.path_params["name"]
        for status in self._gateway.models():
            if name == status.id or name in status.aliases:
                return status
        message = f"The model {name!r} does not exist"
        raise ApiError(404, message, param="model", code="model_not_found")

    # ---- administration -------------------------------------------------------------------------

    async def _state(self, http: HttpRequest) -> Response:
        return _json(self._gateway.snapshot())

    async def _admin_models(self, http: HttpRequest) -> Response:
        return _json({"models": self._gateway.models()})

    async def _admin_model(self, http: HttpRequest) -> Response:
        return _json(self._status(http))

    async def _add(self, http: HttpRequest) -> Response:
        try:
            entry: Any = msgspec.json.decode(await self._body(http))
        except (msgspec.DecodeError, RecursionError) as error:
            raise ApiError(400, f"not valid JSON: {error}") from error
        if not isinstance(entry, dict):
            raise ApiError(400, "a catalogue entry is an object with id and path or hub")
        return _json(await self._gateway.add_model(entry), 201)

    async def _remove(self, http: HttpRequest) -> Response:
        status = self._status(http)
        await self._gateway.remove_model(status.id)
        self._preparer.forget(status.id)
        return _json({"id": status.id, "removed": True})

    async def _reload(self, http: HttpRequest) -> Response:
        status = self._status(http)
        reloaded = await self._gateway.reload_model(status.id)
        self._preparer.forget(status.id)
        return _json(reloaded)

    # ---- to see it ------------------------------------------------------------------------------

    async def _show_metrics(self, http: HttpRequest) -> Response:
        return Response(self._metrics.render(), media_type="text/plain; version=0.0.4")

    async def _health(self, http: HttpRequest) -> Response:
        healthy = self._gateway.healthy
        return _json({"healthy": healthy, "slices": self._conditions()}, 200 if healthy else 503)

    async def _ready(self, http: HttpRequest) -> Response:
        ready = self._gateway.ready
        return _json({"ready": ready, "slices": self._conditions()}, 200 if ready else 503)

    def _conditions(self) -> dict[str, dict[str, Any]]:
        """Of each slice: its state, why its requests do not get on, and which models fail there."""
        return {
            one.id: {
                "state": one.state, "trouble": one.trouble, "failed_models": one.failed_models
            }
            for one in self._gateway.snapshot().slices
        }  # fmt: skip

    async def _version(self, http: HttpRequest) -> Response:
        return _json({"version": __version__})


def _card(status: ModelStatus) -> dict[str, Any]:
    """A model as /v1/models lists it, whatever state it is in."""
    shown = asdict(status)
    return {
        "id": status.id, "object": "model", "created": status.created_s, "owned_by": "c2cserve",
        "max_model_len": status.max_context, "state": status.state.value,
        "aliases": shown["aliases"],
    }  # fmt: skip
