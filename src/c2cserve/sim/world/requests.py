"""Requests of a simulation from arrival to their only end, with the latencies of clients."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

from c2cserve.core.request import Request, Slo

Ending = Literal["", "finished", "truncated", "rejected", "failed"]

SloRule = Callable[[int], Slo]
"""Returns the targets of a request by its prompt's length in tokens."""


@dataclass(frozen=True, slots=True)
class SimRequest:
    """One line of a workload. No policy sees `output`, the tokens that it will sample."""

    arrival_s: float
    model: str
    prompt: int
    output: int
    prefix_hashes: tuple[int, ...] = ()
    tenant: str = ""
    group: str = ""
    """See `core.request.Request`."""


@dataclass(slots=True, eq=False)
class TrackedRequest:
    request: Request
    output: int
    sampled: int = 0
    slice_id: str = ""
    dispatched_s: float = -1.0
    first_s: float = -1.0
    last_s: float = -1.0
    late_s: float = float("-inf")
    """The largest delay of a token after SLINFER's equation 1; negative: all were in time."""
    grace_s: float = 0.0
    """How long its model was loaded while it waited for its first token, where its targets
    excuse that."""
    ending: Ending = ""
    status: int = 0
    """The HTTP status of a rejection."""
    resumed: bool = False
    preempted: int = 0

    def receive(self, tokens: int, now: float, gap_s: float = 0.0) -> None:
        """Receive `tokens` tokens, the last one now, each `gap_s` after the one before.

        Tokens of a request that has ended are for no client: it was refused while a step of it
        ran."""
        if self.ending:
            return
        slo, before = self.request.slo, self.sampled
        due_s = self.request.arrival_s + slo.ttft_s + slo.tpot_s * before
        first_s = now - gap_s * (tokens - 1)
        if before == 0:
            self.first_s = first_s
        self.sampled = before + tokens
        self.last_s = now
        if first_s - due_s > self.late_s:
            self.late_s = first_s - due_s
        last_late_s = now - due_s - slo.tpot_s * (tokens - 1)
        if last_late_s > self.late_s:
            self.late_s = last_late_s

    @property
    def excuses_loads(self) -> bool:
        return self.request.slo.excuses_loads and not self.sampled

    @property
    def due_s(self) -> float:
        """When its next token is due."""
        slo = self.request.slo
        return self.request.arrival_s + slo.ttft_s + slo.tpot_s * self.sampled

    def as_of_now(self) -> Request:
        """Return the request as policies see it when it must be placed again."""
        request = self.request
        new = self.sampled - request.sent
        if not new:
            return request
        return replace(
            request,
            prompt_len=request.prompt_len + new,
            max_new_tokens=request.max_new_tokens - new,
            sent=self.sampled,
        )

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.request.arrival_s

    @property
    def tpot_s(self) -> float:
        """Mean time per output token after the first; 0 with fewer than two."""
        return (self.last_s - self.first_s) / (self.sampled - 1) if self.sampled > 1 else 0.0


@dataclass(slots=True)
class RequestBook:
    """All requests under way, and all that have ended."""

    live: dict[str, TrackedRequest] = field(default_factory=dict[str, TrackedRequest])
    ended: list[TrackedRequest] = field(default_factory=list[TrackedRequest])

    def add(self, tracked: TrackedRequest) -> None:
        assert tracked.request.id not in self.live, f"{tracked.request.id} arrives twice"
        self.live[tracked.request.id] = tracked

    def end(self, tracked: TrackedRequest, ending: Ending, status: int = 0) -> None:
        """End a request. Raises KeyError if it has ended before."""
        assert not tracked.ending, f"{tracked.request.id} ends twice"
        del self.live[tracked.request.id]
        tracked.ending, tracked.status = ending, status
        self.ended.append(tracked)
