"""Models as /api/tags and /api/ps have them."""

import hashlib
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from c2cserve.core.model import ModelStatus
from c2cserve.runtime.gateway import Gateway, Refused

_LATEST = ":latest"
_NEVER = "0001-01-01T00:00:00Z"
"""A model leaves memory when others need the room, at no time that is known."""


def catalogue_name(name: str, gateway: Gateway) -> str:
    """Return a name without the tag `:latest`, unless the catalogue itself has it."""
    if not name.endswith(_LATEST):
        return name
    try:
        known = gateway.resolve(name) is not None
    except Refused:
        known = True
    return name if known else name.removesuffix(_LATEST)


def tags(models: Iterable[ModelStatus]) -> dict[str, Any]:
    """Return the catalogue, every alias as a model of its own."""
    return {"models": [card for one in models for card in _cards(one)]}


def loaded(models: Iterable[ModelStatus]) -> dict[str, Any]:
    """Return the models whose weights are in the pool."""
    return {
        "models": [
            {
                **card, "expires_at": _NEVER, "size_vram": 0, "context_length": one.max_context,
                "size": one.loaded_bytes,
            }
            for one in models
            if one.loaded_bytes
            for card in _cards(one)[:1]
        ]
    }  # fmt: skip


def _cards(model: ModelStatus) -> list[dict[str, Any]]:
    modified = datetime.fromtimestamp(model.created_s, UTC).isoformat().replace("+00:00", "Z")
    return [
        {
            "name": tagged, "model": tagged, "modified_at": modified, "size": model.weight_bytes,
            "digest": hashlib.sha256(model.id.encode()).hexdigest(), "details": details_of(""),
        }
        for tagged in map(_tagged, (model.id, *model.aliases))
    ]  # fmt: skip


def _tagged(name: str) -> str:
    return name if ":" in name else name + _LATEST


def details_of(family: str) -> dict[str, Any]:
    return {
        "parent_model": "", "format": "safetensors", "family": family,
        "families": [family] if family else [], "parameter_size": "", "quantization_level": "",
    }  # fmt: skip
