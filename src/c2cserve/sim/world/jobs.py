"""Requests of a simulation, from arrival to their one end, and what clients saw of them."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

from c2cserve.core.request import Request, Slo

Ending = Literal["", "finished", "truncated", "rejected", "failed"]

SloRule = Callable[[int], Slo]
"""Targets of a request by its prompt's length in tokens."""


@dataclass(frozen=True, slots=True)
class SimRequest:
    """One line of a workload. `owed`: tokens it will draw, which no policy knows."""

    arrival_s: float
    model: str
    prompt: int
    owed: int
    prefix_hashes: tuple[int, ...] = ()


@dataclass(slots=True, eq=False)
class Job:
    request: Request
    owed: int
    drawn: int = 0
    slice_id: str = ""
    dispatched_s: float = -1.0
    first_s: float = -1.0
    last_s: float = -1.0
    late_s: float = float("-inf")
    """The most that any token was later than SLINFER's equation 1 allows; negative: in time."""
    grace_s: float = 0.0
    """Spent on loading its instance's weights, in systems that load."""
    ending: Ending = ""
    status: int = 0
    """Why it was rejected, as HTTP says it."""
    resumed: bool = False
    preempted: int = 0

    def draw(self, tokens: int, now: float, gap_s: float = 0.0) -> None:
        """It got `tokens` tokens, the last of them now, each `gap_s` after the one before."""
        slo, before = self.request.slo, self.drawn
        due_s = self.request.arrival_s + slo.ttft_s + slo.tpot_s * before
        first_s = now - gap_s * (tokens - 1)
        if before == 0:
            self.first_s = first_s
        self.drawn = before + tokens
        self.last_s = now
        if first_s - due_s > self.late_s:
            self.late_s = first_s - due_s
        last_late_s = now - due_s - slo.tpot_s * (tokens - 1)
        if last_late_s > self.late_s:
            self.late_s = last_late_s

    @property
    def due_s(self) -> float:
        """Of its next token."""
        slo = self.request.slo
        return self.request.arrival_s + slo.ttft_s + slo.tpot_s * self.drawn

    def as_of_now(self) -> Request:
        """What a policy is told when the request must be placed again."""
        request = self.request
        new = self.drawn - request.sent
        if not new:
            return request
        return replace(
            request,
            prompt_len=request.prompt_len + new,
            max_new_tokens=request.max_new_tokens - new,
            sent=self.drawn,
        )

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.request.arrival_s

    @property
    def tpot_s(self) -> float:
        """Mean time per output token after the first; 0 with fewer than two."""
        return (self.last_s - self.first_s) / (self.drawn - 1) if self.drawn > 1 else 0.0


@dataclass(slots=True)
class JobBook:
    """All that is under way, and what has ended."""

    live: dict[str, Job] = field(default_factory=dict[str, Job])
    ended: list[Job] = field(default_factory=list[Job])

    def add(self, job: Job) -> None:
        assert job.request.id not in self.live, f"{job.request.id} arrives twice"
        self.live[job.request.id] = job

    def end(self, job: Job, ending: Ending, status: int = 0) -> None:
        """Exactly once: KeyError otherwise."""
        assert not job.ending, f"{job.request.id} ends twice"
        del self.live[job.request.id]
        job.ending, job.status = ending, status
        self.ended.append(job)
