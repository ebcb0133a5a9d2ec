"""Values: what is made once for every token and event, and never changed."""

from dataclasses import dataclass
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def value(kind: type[T]) -> type[T]:
    """A dataclass with slots that is frozen for type checkers, compared and hashed by its fields.
    `dataclass(frozen=True)` checks each assignment while it runs, its own constructor's too. Making
    such an object takes six times as long, and the loops make dozens for each request."""
    return dataclass(slots=True, unsafe_hash=True)(kind)
