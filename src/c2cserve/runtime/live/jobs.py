"""The controller's record of every request in flight: what was asked, what was sent.

It is the one place that knows which tokens a client already has, and so what a lost slice's
requests continue from.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from c2cserve.core.events import ClusterEvent, Finished, FirstToken
from c2cserve.core.request import Delta, FinishReason, Job, Request
from c2cserve.runtime.gateway import Refused

Sink = Callable[["Delta | Refused"], None]
"""Takes one request's output, in order; called on the controller's thread, must not block."""


_LIVES = 4
"""Workers a request may lose before it is held responsible."""


@dataclass(slots=True)
class LiveJob:
    job: Job
    sink: Sink
    slice_id: str | None = None
    output: list[int] = field(default_factory=list[int])
    prompt_reported: bool = False
    resumed: int = 0
    """Slices it was on that were lost."""
    moved: bool = False
    """It began anew on another slice, or on the same one."""

    @property
    def request(self) -> Request:
        return self.job.request

    @property
    def untold(self) -> bool:
        """Nothing of its output was sent."""
        return not self.output and not self.request.sent

    def remaining(self) -> Job:
        """What is left to do, as of the last token received: the prompt grows by the output."""
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
        """It is on no slice any more: it goes on from what its client has."""
        self.job = self.remaining()
        self.output.clear()
        self.slice_id = None
        self.moved = True
        return self.request


class JobTable:
    """Requests from arrival to their last delta. Used by the controller's thread alone, but for
    `counts`."""

    def __init__(self) -> None:
        self._jobs: dict[str, LiveJob] = {}
        self.resumed = 0

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, job: LiveJob) -> None:
        self._jobs[job.request.id] = job

    def get(self, request_id: str) -> LiveJob | None:
        return self._jobs.get(request_id)

    def drop(self, request_id: str) -> LiveJob | None:
        return self._jobs.pop(request_id, None)

    def clear(self) -> list[LiveJob]:
        """Forget all of them; returns what was in flight."""
        jobs = list(self._jobs.values())
        self._jobs.clear()
        return jobs

    def receive(self, delta: Delta, now: float) -> list[ClusterEvent]:
        """Hand a worker's delta to its client; return what the policy must hear of it. Deltas of
        requests that ended meanwhile (cancelled) are dropped."""
        live = self._jobs.get(delta.request_id)
        if live is None:
            return []
        events: list[ClusterEvent] = []
        if delta.tokens:
            if not live.output and not live.request.sent:
                events.append(FirstToken(delta.request_id, now - live.request.arrival_s))
            live.output.extend(delta.tokens)
        if live.moved:
            delta = self._without_repeats(live, delta)
        live.prompt_reported = True
        if delta.finish is not None:
            del self._jobs[delta.request_id]
            failed = delta.finish is FinishReason.ERROR
            output_len = live.request.sent + len(live.output)
            events.append(Finished(delta.request_id, output_len, failed))
        live.sink(delta)
        return events

    @staticmethod
    def _without_repeats(live: LiveJob, delta: Delta) -> Delta:
        """A resumed request reports its prompt, cache use and timing again: the client has them."""
        if not live.prompt_reported:
            return delta
        return replace(delta, prompt_logprobs=(), cached_tokens=0, timing=None)

    def give_back(self, request_id: str, slice_id: str) -> Request | None:
        """A slice returned the request; None if it has ended meanwhile."""
        live = self._jobs.get(request_id)
        return None if live is None or live.slice_id != slice_id else live.begin_anew()

    def displace(self, slice_id: str) -> tuple[tuple[Request, ...], list[ClusterEvent]]:
        """The slice is gone: its jobs continue from what the clients have. One that has lost
        `_LIVES` slices is likely what kills them: it fails, and the policy must hear of that."""
        displaced: list[Request] = []
        failed: list[ClusterEvent] = []
        for live in [one for one in self._jobs.values() if one.slice_id == slice_id]:
            if live.resumed + 1 >= _LIVES:
                reason = f"{_LIVES} workers died while they ran this request"
                ended = Delta(live.request.id, finish=FinishReason.ERROR, error=reason)
                failed += self.receive(ended, 0.0)
                continue
            live.resumed += 1
            displaced.append(live.begin_anew())
        self.resumed += len(displaced)
        return tuple(displaced), failed

    def counts(self) -> dict[str, tuple[int, int]]:
        """Per model: requests dispatched, requests waiting. Callable from any thread."""
        counts: dict[str, tuple[int, int]] = {}
        for live in list(self._jobs.values()):
            running, waiting = counts.get(live.request.model, (0, 0))
            if live.slice_id is None:
                counts[live.request.model] = (running, waiting + 1)
            else:
                counts[live.request.model] = (running + 1, waiting)
        return counts
