"""The description of the API as an OpenAPI 3.1 document: every route, its fields and its errors."""

from collections.abc import Iterable
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import JsonSchemaMode

from c2cserve.catalog.parse import EntryKeys
from c2cserve.core.model import ModelStatus
from c2cserve.runtime.gateway import Snapshot
from c2cserve.server.dashboard.state import DashboardState
from c2cserve.server.fields import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from c2cserve.server.openapi import answers as shapes
from c2cserve.server.openapi.doors import DOOR_OPERATIONS
from c2cserve.server.openapi.operation import Operation

_JSON, _TEXT = "application/json", "text/plain"
_SCHEMAS = "#/components/schemas/{model}"
_BODY_ERRORS = (400, 408, 413, 415, 429)
_REASONS = {
    200: "the answer", 201: "added", 400: "a wrong or unknown field, or a limit",
    401: "no key, or a wrong one", 403: "not allowed", 404: "no such model or path",
    408: "the request arrives too slowly", 409: "the name is taken", 413: "the body is too large",
    415: "the body is not JSON", 429: "a rate limit, or an overload; Retry-After",
    500: "a defect, or a step that failed twice", 503: "draining, or the model cannot be served",
}  # fmt: skip
_ROLE_ERRORS: dict[str, tuple[int, ...]] = {
    "user": (401, 403, 503), "admin": (401, 403), "metrics": (401, 403),
    "dashboard": (401, 403), "": (),
}  # fmt: skip


OPERATIONS: dict[tuple[str, str], Operation] = {
    ("POST", "/v1/completions"): Operation(
        "Continue texts or token ids", shapes.Completion, CompletionBody, shapes.Completion,
        errors=(404, 500),
    ),
    ("POST", "/v1/chat/completions"): Operation(
        "Answer a chat", shapes.ChatCompletion, ChatBody, shapes.ChatCompletionChunk,
        errors=(404, 500),
    ),
    ("POST", "/tokenize"): Operation(
        "Turn a text or a chat into tokens", shapes.Tokenized, TokenizeBody, errors=(404, 500)
    ),
    ("POST", "/detokenize"): Operation(
        "Turn tokens into text", shapes.Detokenized, DetokenizeBody, errors=(404, 500)
    ),
    ("GET", "/v1/models"): Operation("List the catalogue", shapes.ModelCards),
    ("GET", "/v1/models/{name}"): Operation("Show a model", shapes.ModelCard, errors=(404,)),
    ("GET", "/admin/state"): Operation("Show slices, models, pool and counters", Snapshot),
    ("GET", "/admin/models"): Operation(
        "List models with their states", dict[str, list[ModelStatus]]
    ),
    ("POST", "/admin/models"): Operation(
        "Add a model", ModelStatus, EntryKeys, errors=(409,), status=201
    ),
    ("GET", "/admin/models/{name}"): Operation("Show a model's state", ModelStatus, errors=(404,)),
    ("DELETE", "/admin/models/{name}"): Operation(
        "Drain and remove a model", shapes.Removed, errors=(404,)
    ),
    ("POST", "/admin/models/{name}/reload"): Operation(
        "Read a model's files again", ModelStatus, errors=(400, 404, 503)
    ),
    ("GET", "/admin/keys"): Operation("List keys without secrets", shapes.KeyList),
    ("POST", "/admin/keys/reload"): Operation(
        "Read the keys file again", shapes.KeysRead, errors=(400, 409)
    ),
    ("GET", "/admin/usage"): Operation(
        "Report what keys have used; `format=csv` for a table", shapes.UsageReport, errors=(400,),
        query=("format",),
    ),
    ("GET", "/dashboard"): Operation("Show the dashboard, a page for browsers", "text/html"),
    ("GET", "/dashboard/{name}"): Operation(
        "Show a file of that page: `.js`, `.css`", _TEXT, errors=(404,)
    ),
    ("GET", "/dashboard/events"): Operation(
        "Stream the dashboard's state as it changes", "text/event-stream", None, DashboardState,
        errors=(429,),
    ),
    ("GET", "/metrics"): Operation("Show metrics for Prometheus", _TEXT),
    ("GET", "/health"): Operation(
        "Say whether the server makes progress", shapes.Health, errors=(503,)
    ),
    ("GET", "/ready"): Operation(
        "Say whether requests can be served", shapes.Readiness, errors=(503,)
    ),
    ("GET", "/version"): Operation("Show the version", shapes.Version),
    ("GET", "/openapi.json"): Operation("Describe the API", None),
    ("GET", "/docs"): Operation("Show this description, a page for browsers", "text/html"),
    ("GET", "/docs/{name}"): Operation(
        "Show a file of that page: `.js`, `.css`", _TEXT, errors=(404,)
    ),
    ("GET", "/"): Operation("Say that a server is here", _TEXT),
    **DOOR_OPERATIONS,
}  # fmt: skip
_OWN_503 = ("/health", "/ready")
"""Routes whose 503 has the shape of their 200."""


def public_path(path: str) -> str:
    """Return a route's path as the document has it, without the kinds of its parameters."""
    return path.replace("{name:path}", "{name}")


def describe(version: str, routes: Iterable[tuple[str, str, str]]) -> dict[str, Any]:
    """Return the document. `routes`: method, path and role of each. Raises KeyError for a route
    without an operation."""
    found = [(method, public_path(path), role) for method, path, role in routes]
    schemas = _Schemas(OPERATIONS[method, path] for method, path, _ in found)
    paths: dict[str, dict[str, Any]] = {}
    for method, path, role in found:
        operation = OPERATIONS[method, path]
        paths.setdefault(path, {})[method.lower()] = _described(schemas, operation, path, role)
    return {
        "openapi": "3.1.0",
        "info": {"title": "c2cserve", "version": version},
        "paths": paths,
        "components": {
            "schemas": schemas.definitions,
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
                "admin": {"type": "http", "scheme": "bearer"},
            },
        },
    }  # fmt: skip


_Kind = tuple[Any, JsonSchemaMode]


def _kinds(operation: Operation) -> list[_Kind]:
    return [
        (operation.body, "validation"),
        (operation.answer, "serialization"),
        (operation.chunk, "serialization"),
        (operation.error, "serialization"),
    ]


class _Schemas:
    """The JSON schemas of all bodies and answers, by type."""

    def __init__(self, operations: Iterable[Operation]) -> None:
        kinds: list[_Kind] = []
        for one in operations:
            kinds += _kinds(one)
        inputs: list[tuple[int, JsonSchemaMode, TypeAdapter[Any]]] = [
            (number, mode, TypeAdapter(kind))
            for number, (kind, mode) in enumerate(kinds)
            if kind is not None and not isinstance(kind, str)
        ]
        by_number, more = TypeAdapter.json_schemas(inputs, ref_template=_SCHEMAS)
        self._of = {
            (str(kinds[number][0]), mode): schema for (number, mode), schema in by_number.items()
        }
        self.definitions: dict[str, Any] = more.get("$defs", {})
        for schema in self.definitions.values():
            _leave_out_refused(schema)

    def body(self, kind: Any) -> Any:
        return self._of[str(kind), "validation"]

    def answer(self, kind: Any) -> Any:
        if isinstance(kind, str):
            return {"type": "string"}
        return {} if kind is None else self._of[str(kind), "serialization"]


def _leave_out_refused(schema: dict[str, Any]) -> None:
    """Leave out the fields of a body that may only be null: they are refused by name."""
    properties, required = schema.get("properties", {}), schema.get("required", ())
    if schema.get("additionalProperties") is False and "model" in properties:
        for name, one in list(properties.items()):
            if one.get("type") == "null" and name not in required:
                del properties[name]


def _described(schemas: _Schemas, operation: Operation, path: str, role: str) -> dict[str, Any]:
    statuses = {*operation.errors, *_ROLE_ERRORS[role], *(_BODY_ERRORS if operation.body else ())}
    media_type = operation.answer if isinstance(operation.answer, str) else _JSON
    content: dict[str, Any] = {media_type: {"schema": schemas.answer(operation.answer)}}
    if operation.chunk is not None:
        content[operation.streams] = {"schema": schemas.answer(operation.chunk)}
    if operation.examples is not None:
        content[media_type]["example"] = operation.examples[1]
    good = {"description": _REASONS[operation.status], "content": content}
    error = {_JSON: {"schema": schemas.answer(operation.error)}}
    described: dict[str, Any] = {
        "summary": operation.summary,
        "responses": {str(operation.status): good}
        | {
            str(status): {
                "description": _REASONS[status],
                "content": content if status == 503 and path in _OWN_503 else error,
            }
            for status in sorted(statuses)
        },
    }
    names = [("path", "name")] if "{name}" in path else []
    parameters = [*names, *(("query", name) for name in operation.query)]
    if parameters:
        described["parameters"] = [
            {"name": name, "in": where, "required": where == "path", "schema": {"type": "string"}}
            for where, name in parameters
        ]
    if operation.body is not None:
        body: dict[str, Any] = {_JSON: {"schema": schemas.body(operation.body)}}
        if operation.examples is not None:
            body[_JSON]["example"] = operation.examples[0]
        described["requestBody"] = {"required": True, "content": body}
    if role:
        described["security"] = (
            [{"key": []}, {"x-api-key": []}] if role == "user" else [{"admin": []}]
        )
    return described
