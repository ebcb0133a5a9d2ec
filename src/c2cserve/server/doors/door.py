"""What a door is to the server: a way to write the answer of a request."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from c2cserve.server.access.gate import Lease
from c2cserve.server.choices import ChoicePiece, ChoiceStream
from c2cserve.server.errors import ApiError
from c2cserve.server.prepare import Prepared
from c2cserve.server.text.messages import Asked

EVENTS, LINES = "text/event-stream", "application/x-ndjson"


@dataclass(slots=True)
class Answer:
    """One request in flight."""

    prepared: Prepared
    choices: list[ChoiceStream]
    request_id: str
    lease: Lease

    @property
    def asked(self) -> Asked:
        return self.prepared.asked

    @property
    def id(self) -> str:
        """The part of the answer's id behind its API's prefix."""
        return self.prepared.jobs[0].request.id

    @property
    def scored(self) -> bool:
        """Whether the prompt's tokens get log-probabilities too."""
        return self.asked.sampling.prompt_logprobs is not None

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the first prompt; doors other than OpenAI's completions have only one."""
        return len(self.prepared.prompts[0].tokens)


class Writer(Protocol):
    """Writes one answer in the shape of its API, either as a stream or whole. Parts of a stream may
    be empty: a text is held until it is known what it is."""

    @property
    def media_type(self) -> str:
        """The media type of its streams."""
        ...

    def begin(self, piece: ChoicePiece) -> bytes:
        """Return the beginning of a stream, with the first piece of any choice."""
        ...

    def add(self, piece: ChoicePiece) -> bytes: ...

    def end(self) -> bytes:
        """Return the end of a stream whose choices have all ended."""
        ...

    def fail(self, error: ApiError) -> bytes:
        """Return the end of a stream that fails after its beginning."""
        ...

    def whole(self, pieces: Mapping[int, Sequence[ChoicePiece]]) -> bytes:
        """Return the whole answer as JSON. `pieces`: by choice."""
        ...


Door = Callable[[Answer], Writer]
"""Makes the writer of an answer before its first piece: writers note when the request came."""
