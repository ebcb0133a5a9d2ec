"""Events and actions as plain data, `[type name, fields]`, and back: what the record is made of.

msgspec decodes dataclasses strictly but takes no unions of them, hence the names.
"""

from collections.abc import Sequence
from types import UnionType
from typing import Any, get_args

import msgspec

from c2cserve.core.actions import Action
from c2cserve.core.events import Event
from c2cserve.core.fleet import FleetAction, FleetEvent


class WireError(ValueError):
    """The data is no event or action of this version."""


def _types(*unions: UnionType) -> dict[str, type]:
    return {kind.__name__: kind for union in unions for kind in get_args(union)}


TYPES = _types(Event, Action, FleetEvent, FleetAction)


def tagged(items: Sequence[object]) -> list[tuple[str, object]]:
    """Return events or actions with their type names, for msgspec's encoders."""
    return [(type(item).__name__, item) for item in items]


def plain(items: Sequence[object]) -> list[Any]:
    """Return `tagged` items as they are after writing them as JSON and reading them again."""
    return msgspec.json.decode(msgspec.json.encode(tagged(items)))


def untagged(items: object) -> list[Any]:
    """Return the events or actions themselves. Raises WireError."""
    if not isinstance(items, list):
        raise WireError(f"a list of events or actions was expected, not {items!r}")
    return [_untagged(item) for item in items]


def _untagged(item: object) -> object:
    match item:
        case [str(name), dict(fields)] if name in TYPES:
            try:
                return msgspec.convert(fields, TYPES[name])
            except msgspec.ValidationError as error:
                raise WireError(f"{name}: {error}") from error
        case _:
            raise WireError(f"[type name, fields] was expected, not {item!r}")
