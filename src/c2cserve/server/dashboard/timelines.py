"""Every request's way through the controller, told by the controller's stream of the record."""

from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from c2cserve.core import actions as act
from c2cserve.core import events as ev
from c2cserve.core.model import name_of
from c2cserve.core.request import Request, Slo, Timing
from c2cserve.server.dashboard.state import RefusalView, RequestView

_JUDGED_S = 60.0
"""Attainment and latencies are of the requests that ended in this time."""
_JUDGED_MAX = 1024
"""Requests of a model that are judged at most; the oldest make way."""
_ENDED_MAX = 200
"""Timelines that are kept after their end."""
_IN_FLIGHT_SHOWN = 60
_ENDED_SHOWN = 60
_REFUSALS_SHOWN = 20


@dataclass(slots=True)
class Timeline:
    """What is known of one request so far. It holds lengths and times, and no hashes."""

    id: str
    model: str
    slo: Slo
    prompt_tokens: int
    arrived_s: float
    sent: int = 0
    """Output tokens that were sent before it was placed again."""
    state: str = "waiting"
    slice: str = ""
    placed: int = 0
    dispatched_s: float | None = None
    first_step_s: float | None = None
    first_token_s: float | None = None
    switched: bool | None = None
    switch_s: float | None = None
    slice_queue_s: float | None = None
    weights_s: float | None = None
    prefill_s: float | None = None
    ended_s: float | None = None
    output_tokens: int | None = None
    met: bool | None = None

    def tell(self, timing: Timing) -> None:
        """Take over what the slice itself measured."""
        self.slice_queue_s, self.weights_s = timing.queue_s, timing.wait_weights_s
        self.prefill_s, self.switched = timing.prefill_s, timing.switched
        self.switch_s = timing.switch_s if timing.switched else 0.0

    def view(self) -> RequestView:
        queue_s, slice_queue_s, prefill_s = None, self.slice_queue_s, self.prefill_s
        if self.dispatched_s is not None:
            queue_s = max(0.0, self.dispatched_s - self.arrived_s)
            if slice_queue_s is None and self.first_step_s is not None:
                slice_queue_s = max(0.0, self.first_step_s - self.dispatched_s)
        first_s, began_s = self.first_token_s, self.first_step_s
        if prefill_s is None and first_s is not None and began_s is not None:
            prefill_s = max(0.0, first_s - began_s - (self.weights_s or 0.0))
        decoded = first_s is not None and self.ended_s is not None
        return RequestView(
            id=self.id, model=self.model, slice=self.slice, state=self.state,
            arrived_s=self.arrived_s, ended_s=self.ended_s, prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens, queue_s=queue_s, slice_queue_s=slice_queue_s,
            switch_s=self.switch_s, weights_s=self.weights_s, prefill_s=prefill_s,
            decode_s=max(0.0, (self.ended_s or 0.0) - (first_s or 0.0)) if decoded else None,
            ttft_s=None if first_s is None else first_s - self.arrived_s,
            switched=self.switched, met=self.met, placed=self.placed,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Judged:
    """A request that ended with all its tokens, against its targets."""

    at_s: float
    ttft_s: float
    tpot_s: float | None
    """None: it had one token."""
    met: bool


class Timelines:
    """The requests of one controller, whichever loops it has had."""

    def __init__(self) -> None:
        self._in_flight: dict[str, Timeline] = {}
        self._former: dict[str, Timeline] = {}
        """Requests of a loop that broke: those that go on arrive again."""
        self._ended: OrderedDict[str, Timeline] = OrderedDict()
        self._judged: dict[str, deque[Judged]] = {}
        self._targets: dict[str, Slo] = {}
        self.refused: Counter[str] = Counter()
        self._refusals: deque[RefusalView] = deque(maxlen=_REFUSALS_SHOWN)

    def begin_loop(self) -> None:
        """Note that the controller's loop starts anew: it is told again what goes on."""
        self._former |= self._in_flight
        self._in_flight = {}

    # ---- the controller's stream ----------------------------------------------------------------

    def tick(self, now: float, events: Sequence[object], actions: Sequence[object]) -> None:
        for event in events:
            self._apply(now, event)
        for action in actions:
            self._note(now, action)

    def _apply(self, now: float, event: object) -> None:
        match event:
            case ev.Arrived(request):
                self._arrived(request)
            case ev.FirstToken(request_id, ttft_s):
                self._first_token(request_id, ttft_s)
            case ev.Finished(request_id, output_len, failed):
                self._end(now, request_id, "failed" if failed else "done", output_len)
            case ev.Cancelled(request_id):
                self._end(now, request_id, "cancelled")
            case ev.SliceLost(_, displaced):
                for request in displaced:
                    self._displaced(request)
            case ev.Recalled(request) | ev.Returned(request):
                self._displaced(request)
            case ev.ModelAdded(spec):
                self._targets[spec.name] = spec.slo
            case _:
                pass

    def _note(self, now: float, action: object) -> None:
        match action:
            case act.Dispatch(request_id, slice_id):
                self._dispatched(now, request_id, slice_id)
            case act.Reject(request_id, status, reason, _, limit):
                self._refused(now, request_id, status, reason, limit)
            case act.Forget(model):
                self._targets.pop(name_of(model), None)
                self._judged.pop(name_of(model), None)
            case _:
                pass

    def _arrived(self, request: Request) -> None:
        former = self._former.pop(request.id, None)
        if former is not None:
            self._in_flight[request.id] = former
            self._displaced(request)
            return
        self._in_flight[request.id] = Timeline(
            request.id, name_of(request.model), request.slo, request.prompt_len - request.sent,
            request.arrival_s, request.sent,
        )  # fmt: skip

    def _displaced(self, request: Request) -> None:
        one = self._in_flight.get(request.id)
        if one is not None:
            one.state, one.slice, one.sent = "waiting", "", request.sent

    def _dispatched(self, now: float, request_id: str, slice_id: str) -> None:
        one = self._in_flight.get(request_id)
        if one is not None:
            one.state, one.slice, one.placed = "running", slice_id, one.placed + 1
            if one.dispatched_s is None:
                one.dispatched_s = now

    def _first_token(self, request_id: str, ttft_s: float) -> None:
        one = self._in_flight.get(request_id)
        if one is not None and one.first_token_s is None:
            one.first_token_s = one.arrived_s + ttft_s

    def _refused(self, now: float, id_: str, status: int, reason: str, limit: str) -> None:
        one = self._in_flight.get(id_)
        self.refused[limit or f"status_{status}"] += 1
        model = "" if one is None else one.model
        self._refusals.appendleft(
            RefusalView(at_s=now, model=model, status=status, reason=reason)
        )  # fmt: skip
        self._end(now, id_, "refused")

    def _end(self, now: float, id_: str, state: str, output_tokens: int | None = None) -> None:
        one = self._in_flight.pop(id_, None)
        if one is None:
            return  # it had ended: the client was gone before its slice had finished
        one.state, one.ended_s = state, now
        if output_tokens is not None:
            one.output_tokens = output_tokens
        if state == "done" and one.first_token_s is not None:
            self._judge(now, one, one.first_token_s)
        self._ended[id_] = one
        while len(self._ended) > _ENDED_MAX:
            self._ended.popitem(last=False)

    def _judge(self, now: float, one: Timeline, first_s: float) -> None:
        ttft_s, tpot_s, more = first_s - one.arrived_s, None, (one.output_tokens or 0) - 1
        if more > 0:
            tpot_s = max(0.0, now - first_s) / more
        one.met = ttft_s <= one.slo.ttft_s and (tpot_s or 0.0) <= one.slo.tpot_s
        judged = self._judged.setdefault(one.model, deque(maxlen=_JUDGED_MAX))
        judged.append(Judged(now, ttft_s, tpot_s, one.met))

    # ---- what slices tell -----------------------------------------------------------------------

    def find(self, request_id: str) -> Timeline | None:
        """Return a request that is in flight or has ended lately."""
        return self._in_flight.get(request_id) or self._ended.get(request_id)

    # ---- to show it -----------------------------------------------------------------------------

    def targets(self, model: str) -> Slo | None:
        return self._targets.get(model)

    def judged(self, model: str, now: float) -> list[Judged]:
        found = self._judged.get(model, ())
        return [one for one in found if now - one.at_s <= _JUDGED_S]

    def refusals(self) -> tuple[RefusalView, ...]:
        return tuple(self._refusals)

    def counts(self) -> tuple[Counter[str], Counter[str]]:
        """Return the requests of each model that run, and those that wait."""
        running = Counter(one.model for one in self._in_flight.values() if one.slice)
        waiting = Counter(one.model for one in self._in_flight.values() if not one.slice)
        return running, waiting

    def oldest_waiting_s(self, now: float) -> float:
        arrived = (one.arrived_s for one in self._in_flight.values() if not one.slice)
        return max(0.0, now - next(arrived, now))

    def views(self) -> tuple[RequestView, ...]:
        return tuple(one.view() for one in self._shown())

    def _shown(self) -> Iterator[Timeline]:
        yield from islice(reversed(self._in_flight.values()), _IN_FLIGHT_SHOWN)
        yield from islice(reversed(self._ended.values()), _ENDED_SHOWN)
