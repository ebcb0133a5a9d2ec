"""The controller's record of every request in flight: what was asked, what was sent.

Only this table holds the tokens that each client already has. The requests of a lost slice continue
from there.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from c2cserve.core.events import (
    PROGRESS_TOKENS,
    Cancelled,
    Finished,
    FirstToken,
    Progressed,
    Recalled,
    RequestEvent,
    Returned,
    TokensSent,
)
from c2cserve.core.request import Delta, FinishReason, Job, Request, Timing
from c2cserve.runtime.gateway import Refused

Sink = Callable[["Delta | Refused"], None]
"""A function that takes one request's output, in order. The controller's thread calls it, so it
must not block."""


log = logging.getLogger(__name__)


@dataclass(slots=True)
class LiveJob:
    job: Job
    sink: Sink
    slice_id: str | None = None
    output: list[int] = field(default_factory=list[int])
    prompt_reported: bool = False
    deaths: int = 0
    """Slices that were lost with it since it last made progress."""
    recalled: bool = False
    """The controller asked its slice to give it back (`core.actions.Recall`)."""
    moved: bool = False
    """It was placed again, on another slice or on the same one."""
    dispatched_s: float = 0.0
    """When the controller sent it to its slice."""
    lost_slice: str = ""
    """The slice that it was on before it was placed again."""

    @property
    def request(self) -> Request:
        return self.job.request

    @property
    def unsent(self) -> bool:
        """Whether no token of its output was sent yet."""
        return not self.output and not self.request.sent

    def dispatch(self, slice_id: str) -> None:
        self.slice_id, self.dispatched_s = slice_id, time.monotonic()

    def with_times(self, timing: Timing, now: float) -> Timing:
        """Return a slice's report with what the controller saw."""
        arrival_s = self.request.arrival_s
        return replace(timing, wait_s=self.dispatched_s - arrival_s, report_s=now - arrival_s)

    def remaining(self) -> Job:
        """Return what is left to do after the last token received: the prompt grows by the
        output."""
        if not self.output:
            return self.job
        request = replace(
            self.request,
            prompt_len=self.request.prompt_len + len(self.output),
            max_new_tokens=self.request.max_new_tokens - len(self.output),
            sent=self.request.sent + len(self.output),
        )
        return replace(self.job, request=request, tokens=self.job.tokens + tuple(self.output))

    def begin_anew(self) -> Request:
        """Take it off its slice, so that it continues from what its client has."""
        self.job = self.remaining()
        self.output.clear()
        self.lost_slice, self.slice_id = self.slice_id or self.lost_slice, None
        self.moved, self.recalled = True, False
        return self.request


class JobTable:
    """Requests from arrival to their last delta. Used by the controller's thread alone, but for
    `counts` and `of_tenants`."""

    def __init__(self) -> None:
        self._jobs: dict[str, LiveJob] = {}
        self.resumed = 0
        self.blamed = 0
        """Requests that failed because handling them raised here."""
        self.hand_out_s = 0.0
        """How long the event loop took lately to get what was received. It sets this."""

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, job: LiveJob) -> None:
        self._jobs[job.request.id] = job

    def get(self, request_id: str) -> LiveJob | None:
        return self._jobs.get(request_id)

    def drop(self, request_id: str) -> LiveJob | None:
        return self._jobs.pop(request_id, None)

    def live(self) -> list[LiveJob]:
        """Return all requests, oldest first."""
        return list(self._jobs.values())

    def clear(self) -> list[LiveJob]:
        """Forget all requests, and return them."""
        jobs = list(self._jobs.values())
        self._jobs.clear()
        return jobs

    def receive(self, delta: Delta, now: float) -> list[RequestEvent]:
        """Hand a worker's delta to its client, and return the events for the policy. Deltas of
        requests that ended meanwhile (cancelled) are dropped."""
        live = self._jobs.get(delta.request_id)
        if live is None:
            return []
        events: list[RequestEvent] = []
        if delta.tokens and live.unsent:
            after_s = now + self.hand_out_s - live.request.arrival_s
            events.append(FirstToken(delta.request_id, after_s))
        if live.moved:
            delta = self._without_repeats(live, delta)
        if delta.timing is not None:
            delta = replace(delta, timing=live.with_times(delta.timing, now))
        # What can fail comes before: a token is noted exactly if its client gets it.
        before = len(live.output)
        live.output.extend(delta.tokens)
        if live.moved and before < PROGRESS_TOKENS <= len(live.output):
            live.deaths = 0
            events.append(Progressed(delta.request_id, now - live.request.arrival_s))
        live.prompt_reported = True
        live.sink(delta)
        if delta.finish is not None:
            del self._jobs[delta.request_id]
            failed = delta.finish is FinishReason.ERROR
            output_len = live.request.sent + len(live.output)
            events.append(Finished(delta.request_id, output_len, failed))
        return events

    def fail(self, request_id: str, reason: str) -> list[RequestEvent]:
        """End a request that cannot go on: its client gets an error. Return the events for the
        policy, none if the request has ended already."""
        live = self._jobs.pop(request_id, None)
        if live is None:
            return []
        live.sink(Delta(request_id, finish=FinishReason.ERROR, error=reason))
        return [Cancelled(request_id)]

    def blame(self, request_id: str, fault: Exception) -> list[RequestEvent]:
        """End the one request whose handling raised `fault`, as `fail` does."""
        self.blamed += 1
        return self.fail(request_id, f"{type(fault).__name__}: {fault}")

    @staticmethod
    def _without_repeats(live: LiveJob, delta: Delta) -> Delta:
        """Remove what a resumed request reports again and its client has: its prompt, cache use and
        timing."""
        if not live.prompt_reported:
            return delta
        return replace(delta, prompt_logprobs=(), cached_tokens=0, timing=None)

    def give_back(self, request_id: str, slice_id: str) -> Recalled | Returned | None:
        """Note that a slice returned the request. Return the event for the policy, None if the
        request has ended meanwhile."""
        live = self._jobs.get(request_id)
        if live is None or live.slice_id != slice_id:
            return None
        if live.recalled:
            return Recalled(live.begin_anew())
        log.warning("request %s: slice %s gave it back; it continues elsewhere",
                    request_id, slice_id, extra={"job": request_id})  # fmt: skip
        return Returned(live.begin_anew())

    def suspected(self, slice_id: str) -> bool:
        """Whether the slice has a request that lost two slices without progress between: the
        policy has isolated it (`policy.cluster.suspects`)."""
        return any(live.deaths > 1 for live in self._on(slice_id))

    def displace(self, slice_id: str) -> tuple[tuple[Request, ...], list[RequestEvent]]:
        """Take all requests off a lost slice. Return those that continue from what their clients
        have, and the events for the policy about those that cannot. The policy decides which
        request is to blame for a worker's death (`policy.cluster.suspects`)."""
        displaced: list[Request] = []
        failed: list[RequestEvent] = []
        for live in self._on(slice_id):
            request_id = live.request.id
            try:
                displaced.append(live.begin_anew())
            except Exception as fault:
                log.exception("request %s cannot go on", request_id, extra={"job": request_id})
                failed += self.blame(request_id, fault)
            else:
                live.deaths += 1
        self.resumed += len(displaced)
        return tuple(displaced), failed

    def tokens_sent(self) -> list[TokensSent]:
        """Return the event that says how many tokens clients have; none if no request runs."""
        rows = [
            (live.request.id, live.request.sent + len(live.output))
            for live in self._jobs.values() if live.slice_id is not None
        ]  # fmt: skip
        return [TokensSent(tuple(rows))] if rows else []

    def withdraw_all(self) -> list[str]:
        """Take all requests off their slices, and return their ids. No request is blamed for it."""
        moved: list[str] = []
        for live in self.live():
            if live.slice_id is None:
                continue
            try:
                live.begin_anew()
            except Exception as fault:
                request_id = live.request.id
                log.exception("request %s cannot go on", request_id, extra={"job": request_id})
                self.blame(request_id, fault)
            else:
                moved.append(live.request.id)
        return moved

    def _on(self, slice_id: str) -> list[LiveJob]:
        return [live for live in self._jobs.values() if live.slice_id == slice_id]

    def of_tenants(self) -> list[int]:
        """Return the number of requests of each tenant that has some. Callable from any thread."""
        return list(Counter(live.request.tenant for live in list(self._jobs.values())).values())

    def counts(self) -> dict[str, tuple[int, int]]:
        """Return per model: requests dispatched, requests waiting. Callable from any thread."""
        counts: dict[str, tuple[int, int]] = {}
        for live in list(self._jobs.values()):
            running, waiting = counts.get(live.request.model, (0, 0))
            if live.slice_id is None:
                counts[live.request.model] = (running, waiting + 1)
            else:
                counts[live.request.model] = (running + 1, waiting)
        return counts


def log_moved(request_ids: Sequence[str], why: str) -> None:
    """Log which requests are affected by a fault that was not their own."""
    if request_ids:
        log.warning(
            "%s; requests that continue from what their clients have: %s",
            why, ", ".join(request_ids), extra={"jobs": list(request_ids)},
        )  # fmt: skip
