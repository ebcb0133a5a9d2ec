"""Requests of other APIs as chats and completions, in a text process.

A door's body is validated by its own fields, so an error names the field as the client wrote it.
Then it becomes a `ChatBody` or a `CompletionBody`, and goes the same way as OpenAI's requests.
Later errors name fields of these; `Names` leads back.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from c2cserve.server.errors import ApiError, of_problem, of_validation
from c2cserve.server.fields import ChatBody, CompletionBody

B = TypeVar("B", bound=BaseModel)
C = TypeVar("C", ChatBody, CompletionBody)

_PROBLEMS_MAX = 100
_SALT_CHARS = 256


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Extensions(Strict):
    """Fields of this server, which no other API has."""

    priority: Annotated[int, Field(ge=-100, le=100)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=_SALT_CHARS)] | None = None


@dataclass(frozen=True, slots=True)
class Names:
    """What an API calls the fields of chats and completions."""

    fields: Mapping[str, str] = field(default_factory=dict[str, str])
    """First part of a field's path -> its name, for fields that are called otherwise."""
    inner: Mapping[str, str] = field(default_factory=dict[str, str])
    """The same for later parts; empty: the part is left out."""

    def of(self, error: ApiError) -> ApiError:
        """Return an error with its field as this API calls it."""
        old = error.param
        if old is None:
            return error
        head, *rest = old.split(".")
        renamed = [self.inner.get(part, part) for part in rest]
        new = ".".join([self.fields.get(head, head), *(part for part in renamed if part)])
        message = error.message
        for quote in ("", "'"):
            if message.startswith(quote + old):
                message = quote + new + message.removeprefix(quote + old)
        return ApiError(error.status, message, param=new, code=error.code)


@dataclass(frozen=True, slots=True)
class Translated:
    """A request as the server's own body, and how its API calls that body's fields."""

    body: ChatBody | CompletionBody
    names: Names = field(default_factory=Names)
    repeated: bytes = b""
    """What answers repeat of the request, as JSON."""
    unbounded: bool = False
    """A completion without `max_tokens` may fill the context, as a chat may."""


Reader = Callable[[bytes], Translated]


def validated(kind: type[B], body: bytes, tags: frozenset[str] = frozenset()) -> B:
    """Return a door's body. `tags`: the values of `type` and `role` that tell entries of its lists
    apart. Raises ApiError, which names the field."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        problems = error.errors(include_url=False)[:_PROBLEMS_MAX]
        # A union reports a problem per member. The one that lies deepest is of the member meant.
        field_ = problems[0]["loc"][:1]
        meant = max((p for p in problems if p["loc"][:1] == field_), key=lambda p: len(p["loc"]))
        raise of_problem(_without_tags(meant, tags)) from error


def _without_tags(problem: ErrorDetails, tags: frozenset[str]) -> ErrorDetails:
    """Return a problem whose location has fields and numbers only. Behind a number, pydantic puts
    the tag of a union's member."""
    place: list[int | str] = []
    numbered = False
    for part in problem["loc"]:
        if not (numbered and part in tags):
            place.append(part)
        numbered = isinstance(part, int)
    if problem["type"] in ("union_tag_invalid", "union_tag_not_found"):
        named = str(problem.get("ctx", {}).get("discriminator", ""))
        place.append("type" if named.endswith("()") else named.strip("'"))
    return {**problem, "loc": tuple(place)}


def translated(kind: type[C], fields: Mapping[str, Any], names: Names) -> C:
    """Return the body of a chat or a completion with these fields; null ones are left out. Raises
    ApiError, which names the field as its API calls it."""
    try:
        return kind.model_validate({key: one for key, one in fields.items() if one is not None})
    except ValidationError as error:
        found = of_validation(error)
        head = (found.param or "").partition(".")[0]
        if head == "messages":  # their numbers are not those of the client's list
            found = ApiError(400, found.message, param=head, code=found.code)
        raise names.of(found) from error
