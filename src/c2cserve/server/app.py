"""The HTTP application: routes, keys, errors."""

import asyncio
import hmac
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from c2cserve import __version__
from c2cserve.core.model import ModelStatus
from c2cserve.runtime.gateway import Gateway, ModelFiles, Refused, Superseded
from c2cserve.server.access.cache_salts import cache_group
from c2cserve.server.access.gate import Gate, rate_headers
from c2cserve.server.access.keyring import CHALLENGES, Key, basic_password, bearer, key_header
from c2cserve.server.access.usage import as_csv
from c2cserve.server.bodies import Bodies
from c2cserve.server.connections import Connections
from c2cserve.server.dashboard.feed import Feed
from c2cserve.server.dashboard.live import LiveState, TickTap
from c2cserve.server.dashboard.routes import DashboardRoutes
from c2cserve.server.doors.ollama.models import catalogue_name
from c2cserve.server.doors.routes import DOORS, WEB_PATHS, DoorRoutes, error_body, id_headers
from c2cserve.server.doors.unknown_routes import no_such_path, unknown_route
from c2cserve.server.errors import ApiError
from c2cserve.server.guard import Guard, Role
from c2cserve.server.inference import Inference
from c2cserve.server.metrics import Metrics
from c2cserve.server.model_names import unknown_model
from c2cserve.server.pages.docs import DOCS_ROUTES
from c2cserve.server.prepare import (
    PROMPT_FIELDS,
    IncomingRequest,
    Prepared,
    Preparer,
    model_of,
)
from c2cserve.server.settings import ServerSettings
from c2cserve.server.shapes import model_card
from c2cserve.server.shedding.shedder import LoadShedder, request_id
from c2cserve.server.text.messages import Api
from c2cserve.server.text.pool import TextPool
from c2cserve.server.tls import Tls

log = logging.getLogger(__name__)
Handler = Callable[[HttpRequest], Awaitable[Response]]

_ADMIN_BODY_BYTES = 1 << 20
_NO_ROUTE = "none"
_ALL_KEYS = "*"
"""The cache group of all keys given as options; no keys file can name it."""
_RELOADS_MAX = 8
"""Reloads after which a request that has not reached its model is refused."""


def create_app(
    gateway: Gateway, settings: ServerSettings, connections: Connections | None = None,
    gate: Gate | None = None, *, tls: Tls | None = None, tap: TickTap | None = None,
) -> Starlette:  # fmt: skip
    """Return the application, which owns its text processes from its start to its end (ASGI's
    lifespan). `connections`, `tls`: shown in its metrics. `gate`: closed at the end; without one,
    only the settings' API keys are accepted. `tap`: what the dashboard shows of the controller."""
    gate = gate or Gate(settings.api_keys)
    texts = TextPool(settings.text, settings.vocabularies)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncGenerator[None]:
        texts.start()
        yield
        await texts.close()
        await asyncio.to_thread(gate.close)

    app = Starlette(lifespan=lifespan)
    app.router.redirect_slashes = False
    app.state.texts = texts
    metrics = Metrics(gateway, texts, connections, gate)
    if tls is not None:
        metrics.registry.register(tls)
    routes = _Routes(gateway, settings, texts, metrics, gate, tap or TickTap())
    app.state.shedder = routes.shedder
    for method, path, handler, role in routes.table():
        app.add_route(path, routes.guarded(handler, role, path), methods=[method])
    if settings.access.allowed_origins:
        for path in WEB_PATHS:
            app.add_route(path, routes.guarded(routes.preflight, "", path), methods=["OPTIONS"])

    async def http_error(http: HttpRequest, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return routes.failed(http, unknown_route(http, error), _NO_ROUTE, request_id(http.headers))

    app.add_exception_handler(HTTPException, http_error)
    return app


def _json(content: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")


class _Routes:
    def __init__(
        self, gateway: Gateway, settings: ServerSettings, texts: TextPool, metrics: Metrics,
        gate: Gate, tap: TickTap,
    ) -> None:  # fmt: skip
        self._gateway = gateway
        self._settings = settings
        self._guard = Guard(settings.access, admin_key=bool(settings.admin_key))
        self._metrics = metrics
        self._texts = texts
        self._gate = gate
        self._bodies = Bodies(settings.body_bytes_max, settings.bodies_bytes_max)
        self._preparer = Preparer(gateway, texts, settings.requests)
        self.shedder = LoadShedder(gateway, self._guard, gate, metrics, self._preparer)
        self._inference = Inference(gateway, self._metrics, tap)
        self._dashboard = DashboardRoutes(Feed(LiveState(gateway, tap).state))
        self._doors = DoorRoutes(gateway, self._answer, self._of_text)
        self._described: dict[str, Any] | None = None
        """The API's description, made when it is first asked for: it takes some 0.1 s."""
        metrics.add_routes(route for _, route, _, _ in self.table())

    def table(self) -> list[tuple[str, str, Handler, Role]]:
        """Return method, path, handler and kind of key. Model ids may contain slashes."""
        return [
            *self._doors.table(),
            ("GET", "/v1/models", self._models, "user"),
            ("GET", "/v1/models/{name:path}", self._model, "user"),
            ("GET", "/admin/state", self._state, "admin"),
            ("GET", "/admin/models", self._admin_models, "admin"),
            ("POST", "/admin/models", self._add, "admin"),
            ("POST", "/admin/models/{name:path}/reload", self._reload, "admin"),
            ("GET", "/admin/models/{name:path}", self._admin_model, "admin"),
            ("DELETE", "/admin/models/{name:path}", self._remove, "admin"),
            ("GET", "/admin/keys", self._keys, "admin"),
            ("POST", "/admin/keys/reload", self._reload_keys, "admin"),
            ("GET", "/admin/usage", self._usage, "admin"),
            *((*route, "dashboard") for route in self._dashboard.table()),
            ("GET", "/metrics", self._show_metrics, "metrics"),
            ("GET", "/health", self._health, ""),
            ("GET", "/ready", self._ready, ""),
            ("GET", "/version", self._version, ""),
            ("GET", "/openapi.json", self._description, ""),
            *((*route, "") for route in DOCS_ROUTES),
        ]

    def guarded(self, handler: Handler, role: Role, route: str) -> Handler:
        """Return the handler with checks of keys, request ids, and its API's shape for failures."""

        async def guarded(http: HttpRequest) -> Response:
            response = await answered(http)
            response.headers.update(self._guard.cross_origin(http, role))
            return response

        async def answered(http: HttpRequest) -> Response:
            id_ = http.state.request_id = request_id(http.headers)
            try:
                self._guard.check(http, role)
                self._authorize(http, role)
                response = await handler(http)
            except ApiError as error:
                return self.failed(http, error, route, id_)
            except Refused as refused:
                return self.failed(http, ApiError.of(refused), route, id_)
            except Exception:
                # The last resort: a defect answers 500 and is logged, and the server goes on.
                log.exception("%s failed", route, extra={"request_id": id_})
                fault = ApiError(500, "internal error; see the server's log")
                return self.failed(http, fault, route, id_)
            return self._sent(http, response, route, id_)

        return guarded

    def _sent(self, http: HttpRequest, response: Response, route: str, request_id: str) -> Response:
        """Complete an answer: its request's id, and the remaining rate limits of its key."""
        response.headers.update(id_headers(http.url.path, request_id))
        if getattr(http.state, "rated", False):
            response.headers.update(rate_headers(http.state.key))
        self._metrics.responded(route, response.status_code)
        return response

    def failed(self, http: HttpRequest, error: ApiError, route: str, request_id: str) -> Response:
        """Answer with an error; count it, and log why."""
        key: Key | None = getattr(http.state, "key", None)
        log.log(
            logging.WARNING if error.status >= 500 else logging.INFO,
            "%s answered %d: %s", route, error.status, error.message,
            extra={
                "request_id": request_id, "route": route, "status": error.status,
                "model": getattr(http.state, "model", None), "param": error.param,
                "code": error.code, "key": key.name or None if key else None,
            },
        )  # fmt: skip
        return self._sent(http, error.response(error_body(http.url.path, error)), route, request_id)

    async def preflight(self, http: HttpRequest) -> Response:
        return Response(status_code=204, headers=self._guard.preflight(http))

    def _authorize(self, http: HttpRequest, role: Role) -> None:
        """Check the key of a request. Set `key`, `tenant` and `cache_group` in the state of a
        user's request. The tenant is its unit of fair shares, and prefixes are reused within the
        group. Both are empty without keys. Raises ApiError (401)."""
        if role == "user":
            key: Key = self._gate.identify(key_header(http.headers))
            shared = key.cache_group
            if key.record is None and key.name and self._settings.access.shared_cache:
                shared = _ALL_KEYS
            http.state.key, http.state.tenant = key, key.tenant
            http.state.cache_group = cache_group(key.tenant, shared)
        elif self._guard.asks_for_key(role):
            right, header = self._settings.admin_key.encode(), http.headers.get("authorization")
            given = bearer(header) or (basic_password(header) if role == "dashboard" else None)
            if not hmac.compare_digest(given or b"", right):
                headers = {"www-authenticate": CHALLENGES.get(role, "Bearer")}
                said = (
                    "Incorrect admin key provided" if given else "You did not provide an admin key"
                )
                raise ApiError(401, said, code="invalid_api_key", headers=headers)

    # ---- inference ------------------------------------------------------------------------------

    async def _answer(self, http: HttpRequest, api: Api) -> Response:
        """Answer a request. If its model is reloaded before the request reaches it, the request is
        prepared again, since the new version may have another tokenizer."""
        key: Key = http.state.key
        http.state.rated = True
        lease = self._gate.arrive(key, http.state.request_id)
        try:
            async with self._bodies.receive(http) as body:
                incoming = self._incoming(http, api, body)
                prepared = await self._prepare(incoming, key)
            for _ in range(_RELOADS_MAX):
                lease.admit(prepared, http.headers, PROMPT_FIELDS[api])
                try:
                    return await self._inference.answer(
                        http, DOORS[api], prepared, http.state.request_id, lease
                    )
                except Superseded:
                    with self._bodies.hold(body):
                        prepared = await self._prepare(incoming, key)
            raise Superseded
        except BaseException:
            lease.end()
            raise

    @staticmethod
    def _incoming(http: HttpRequest, api: Api, body: bytes) -> IncomingRequest:
        state, key = http.state, http.state.key
        state.model = model_of(body)
        now = time.monotonic()
        return IncomingRequest(
            api, body, state.model, http.headers, state.tenant, state.cache_group,
            key.quota.limits.allows_model, getattr(state, "arrived_s", now),
            getattr(state, "read_s", now), getattr(state, "let_in", False),
        )  # fmt: skip

    async def _of_text(self, http: HttpRequest, api: Api) -> Response:
        """Answer a request that needs a tokenizer only. It counts as a request of its key."""
        key: Key = http.state.key
        http.state.rated = True
        lease = self._gate.arrive(key, http.state.request_id)
        try:
            async with self._bodies.receive(http) as body:
                incoming = self._incoming(http, api, body)
                files = self._files(incoming, key)
                content = await self._preparer.answer(incoming, files)
        finally:
            lease.end()
        return Response(content, media_type="application/json")

    async def _prepare(self, incoming: IncomingRequest, key: Key) -> Prepared:
        return await self._preparer.prepare(incoming, self._files(incoming, key))

    def _files(self, incoming: IncomingRequest, key: Key) -> ModelFiles | None:
        name = incoming.model
        if incoming.api.startswith("ollama"):
            name = catalogue_name(name, self._gateway)
        return self._gate.find_model(key, name, self._gateway)

    async def _models(self, http: HttpRequest) -> Response:
        allowed = http.state.key.quota.limits.allows_model
        cards = [model_card(one) for one in self._gateway.models() if allowed(one.id)]
        return _json({"object": "list", "data": cards})

    async def _model(self, http: HttpRequest) -> Response:
        status = self._status(http)
        self._gate.check_model(http.state.key, status.id, status.id)
        return _json(model_card(status))

    def _status(self, http: HttpRequest) -> ModelStatus:
        name, models = http.path_params["name"], self._gateway.models()
        if not name:
            raise no_such_path(http)
        for status in models:
            if name == status.id or name in status.aliases:
                return status
        key: Key | None = getattr(http.state, "key", None)
        if key is not None:  # else an administrator asks
            models = [one for one in models if key.quota.limits.allows_model(one.id)]
        raise unknown_model(name, models)

    # ---- administration -------------------------------------------------------------------------

    async def _state(self, http: HttpRequest) -> Response:
        return _json(self._gateway.snapshot())

    async def _admin_models(self, http: HttpRequest) -> Response:
        return _json({"models": self._gateway.models()})

    async def _admin_model(self, http: HttpRequest) -> Response:
        return _json(self._status(http))

    async def _add(self, http: HttpRequest) -> Response:
        async with self._bodies.receive(http, _ADMIN_BODY_BYTES) as body:
            entry = _entry(body)
        return _json(await self._gateway.add_model(entry), 201)

    async def _remove(self, http: HttpRequest) -> Response:
        status = self._status(http)
        await self._gateway.remove_model(status.id)
        self._texts.forget(status.id)
        return _json({"id": status.id, "removed": True})

    async def _reload(self, http: HttpRequest) -> Response:
        status = self._status(http)
        reloaded = await self._gateway.reload_model(status.id)
        self._texts.forget(status.id)
        return _json(reloaded)

    async def _keys(self, http: HttpRequest) -> Response:
        return _json(self._gate.listing())

    async def _reload_keys(self, http: HttpRequest) -> Response:
        return _json({"keys": await self._gate.reload()})

    async def _usage(self, http: HttpRequest) -> Response:
        """Answer with JSON, or with `?format=csv` with the usage per key and model alone."""
        wanted = http.query_params.get("format", "json")
        if wanted == "csv":
            return Response(as_csv(self._gate.usage.rows()), media_type="text/csv")
        if wanted != "json":
            raise ApiError(400, "format: json or csv", param="format")
        return _json(self._gate.report())

    # ---- to see it ------------------------------------------------------------------------------

    async def _show_metrics(self, http: HttpRequest) -> Response:
        return Response(await self._metrics.render(), media_type="text/plain; version=0.0.4")

    async def _health(self, http: HttpRequest) -> Response:
        healthy = self._gateway.healthy
        return _json({"healthy": healthy, "slices": self._conditions()}, 200 if healthy else 503)

    async def _ready(self, http: HttpRequest) -> Response:
        ready = self._gateway.ready
        return _json({"ready": ready, "slices": self._conditions()}, 200 if ready else 503)

    def _conditions(self) -> dict[str, dict[str, Any]]:
        """Return for each slice its state, its trouble, and the models that fail there."""
        return {
            one.id: {
                "state": one.state, "trouble": one.trouble, "failed_models": one.failed_models
            }
            for one in self._gateway.snapshot().slices
        }  # fmt: skip

    async def _version(self, http: HttpRequest) -> Response:
        return _json({"version": __version__})

    async def _description(self, http: HttpRequest) -> Response:
        if self._described is None:
            routes = [(method, path, role) for method, path, _, role in self.table()]
            self._described = await asyncio.to_thread(_describe, routes)
        return _json(self._described)


def _describe(routes: list[tuple[str, str, str]]) -> dict[str, Any]:
    from c2cserve.server.openapi.document import describe  # large, and rarely asked for

    return describe(__version__, routes)


def _entry(body: bytes) -> dict[str, Any]:
    """Return the catalogue entry in a body. Raises ApiError (400)."""
    try:
        entry: Any = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise ApiError(400, f"not valid JSON: {error}") from error
    except RecursionError as error:
        raise ApiError(400, "not valid JSON: nested too deeply") from error
    if not isinstance(entry, dict):
        raise ApiError(400, "a catalogue entry is an object with id and path or hub")
    # No file name contains NUL, and functions of the operating system end at it.
    if b"\\u0000" in body:
        raise ApiError(400, "a catalogue entry cannot contain NUL characters")
    return entry
