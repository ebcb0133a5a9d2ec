"""A request that is sent, and what came of it."""

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any, Literal

from soak.catalogue import Model

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"

End = Literal["whole", "done", "error event", "left", "cut", "no end", "no connection"]
"""How an answer ended. `whole`: a response that is not streamed. `done`: `[DONE]`. `error event`:
in a stream. `left`: the client went, as it was to. `cut`: the connection ended before the answer.
`no end`: none within the time an answer may take. `no connection`: none could be made."""


@dataclass(frozen=True, slots=True)
class Leave:
    """When the client goes away: after so many pieces of a stream, or so long."""

    pieces: int | None = None
    after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Case:
    id: str
    """Sent as `x-request-id`."""
    kind: str
    model: Model | None
    """None: no model of the catalogue is meant."""
    path: str
    body: dict[str, Any]
    allowed: frozenset[int]
    """Statuses it may get whatever else happens."""
    headers: dict[str, str] = field(default_factory=dict[str, str])
    prompt_lens: tuple[int, ...] = ()
    """Tokens of each prompt, where they are known."""
    leave: Leave | None = None
    code: str | None = None
    """What `error.code` must be when it is refused as its kind wants."""

    @property
    def streamed(self) -> bool:
        return bool(self.body.get("stream"))

    @property
    def choices(self) -> int:
        return int(self.body.get("n") or 1) * max(1, len(self.prompt_lens))

    @property
    def max_tokens(self) -> int:
        return int(self.body.get("max_tokens", 16))

    @property
    def work(self) -> int:
        """Tokens that the server computes, about; an output token takes a step of its own."""
        return sum(self.prompt_lens) + 4 * self.max_tokens * self.choices

    @property
    def deterministic(self) -> bool:
        """Whether the same request must get the same answer."""
        return self.body.get("temperature", 1.0) == 0 or "seed" in self.body

    @property
    def question(self) -> str:
        """The same for cases that must get the same answer, if `deterministic`."""
        left_out = ("stream", "stream_options", "priority")
        body = {name: value for name, value in self.body.items() if name not in left_out}
        if self.model is not None:
            body["model"] = self.model.same_as
        text = json.dumps([self.path, body], sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()

    def shown(self) -> dict[str, Any]:
        """All that is needed to send it again."""
        return {
            "id": self.id, "kind": self.kind, "path": self.path, "headers": self.headers,
            "body": self.body, "leave": self.leave and {"pieces": self.leave.pieces,
                                                        "after_s": self.leave.after_s},
        }  # fmt: skip


@dataclass(slots=True)
class Said:
    """One choice of an answer."""

    text: str = ""
    tokens: list[str] = field(default_factory=list[str])
    """As its log-probabilities spell them, if it has some."""
    logprobs: list[float | None] = field(default_factory=list[float | None])
    tops: list[dict[str, float]] = field(default_factory=list[dict[str, float]])
    """The likeliest tokens at each place, of completions that ask for them."""
    finishes: list[str] = field(default_factory=list[str])

    @property
    def finish(self) -> str | None:
        return self.finishes[-1] if self.finishes else None


@dataclass(slots=True)
class Reply:
    sent_s: float
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict[str, str])
    choices: dict[int, Said] = field(default_factory=dict[int, Said])
    usage: dict[str, Any] | None = None
    error: Any = None
    """Of an error's body or of an error event."""
    end: End = "no end"
    detail: str = ""
    first_s: float | None = None
    ended_s: float = 0.0
    """All three on `time.monotonic`'s clock."""

    @property
    def complete(self) -> bool:
        return self.status == 200 and self.end in ("whole", "done")

    def shown(self) -> dict[str, Any]:
        return {
            "status": self.status, "end": self.end, "detail": self.detail[:500],
            "error": self.error, "usage": self.usage, "seconds": self.ended_s - self.sent_s,
            "slice": self.headers.get("x-c2cserve-slice"),
            "choices": {
                i: {"text": said.text, "logprobs": said.logprobs, "finish": said.finishes}
                for i, said in sorted(self.choices.items())
            },
        }  # fmt: skip
