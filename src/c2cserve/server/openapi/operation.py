"""What the description of the API says of one route."""

from dataclasses import dataclass
from typing import Any

from c2cserve.server.openapi.answers import Error


@dataclass(frozen=True, slots=True)
class Operation:
    """What the document says of one route. `answer`: a type, a media type, or None for any JSON."""

    summary: str
    answer: Any
    body: Any = None
    chunk: Any = None
    """The type of an event, if answers may be streams."""
    errors: tuple[int, ...] = ()
    status: int = 200
    query: tuple[str, ...] = ()
    streams: str = "text/event-stream"
    """The media type of streams."""
    error: Any = Error
    """The type of errors."""
    examples: tuple[Any, Any] | None = None
    """A body and its answer."""
