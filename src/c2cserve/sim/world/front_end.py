"""What an overload does to a server whose event loop has costs. It reads, refuses or prepares
requests and hands out tokens, one thing at a time.

It decides with the same `Entrance` as a server. Its clients are open loops, which never wait, or
closed ones, which ask again when they have an answer, or when a refusal says so.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from random import Random

from c2cserve.core import actions as act
from c2cserve.core import events as ev
from c2cserve.core.request import Request
from c2cserve.policy.cluster.entrance import Entrance, Newcomer
from c2cserve.sim.world.hardware import SimMachine
from c2cserve.sim.world.requests import Ending, SimRequest, TrackedRequest
from c2cserve.sim.world.shapes import SimModel
from c2cserve.sim.world.simulation import Settings, Simulation


@dataclass(frozen=True, slots=True)
class FrontEnd:
    """Seconds of the event loop, and of what holds it up."""

    read_s: float = 0.00006
    """The cost of reading a request, and of refusing it."""
    prepare_s: float = 0.0006
    """The cost of bringing a request to the controller that is not refused."""
    token_s: float = 0.00002
    stall_s: float = 0.0
    """The mean length of stalls, in which other work has the core; about one in a second."""


@dataclass(frozen=True, slots=True)
class Users:
    """A closed loop. `patient`: users wait as a refusal says; else they ask again after `think_s`,
    as they do after an answer."""

    count: int
    seconds: float
    sample: Callable[[Random, float], SimRequest]
    """Returns a request for a time."""
    patient: bool = True
    think_s: float = 0.05


class FrontEndSimulation(Simulation):
    """A simulation in which requests and tokens pass through a front end."""

    def __init__(
        self, machine: SimMachine, models: Sequence[SimModel], requests: Iterable[SimRequest],
        settings: Settings, front_end: FrontEnd, users: Users | None = None,
    ) -> None:  # fmt: skip
        super().__init__(machine, models, requests, None, settings)
        self._costs = front_end
        self._users = users
        self._random = Random(settings.seed)
        self._entrance = Entrance(settings.admission.entrance_burst_s)
        self._backlog = act.Backlog()
        self._work: deque[tuple[Callable[..., float], tuple[object, ...]]] = deque()
        """What the event loop still has to do. Each call returns how long it takes."""
        self._busy = False
        self._preparing, self._present = Counter[str](), Counter[str]()
        """Tenant -> its requests that are being prepared, and those that are beyond that."""
        self._judged: dict[str, tuple[str, float] | None] = {}
        """What was decided of requests of several choices."""
        self.first_s: dict[str, float] = {}
        """When clients had their first tokens."""
        self.refusals_s: list[float] = []
        """How long refusals at the entrance took."""
        self._stall()

    def in_time(self, tracked: TrackedRequest) -> bool:
        """Return whether a request was answered within its targets, as its client sees it."""
        slo, request = tracked.request.slo, tracked.request
        first_s = self.first_s.get(request.id)
        if tracked.ending != "finished" or first_s is None:
            return False
        return first_s - request.arrival_s <= slo.ttft_s and tracked.tpot_s <= slo.tpot_s

    # ---- the event loop -------------------------------------------------------------------------

    def _add(self, work: Callable[..., float], *args: object) -> None:
        self._work.append((work, args))
        if not self._busy:
            self._next()

    def _next(self) -> None:
        self._busy = bool(self._work)
        if self._busy:
            work, args = self._work.popleft()
            self.timeline.at(self.timeline.now + work(*args), self._next)

    def _stall(self) -> None:
        if self._costs.stall_s and (self.requests.live or self._more):
            self._add(lambda: self._random.expovariate(1 / self._costs.stall_s))
        if self._costs.stall_s and self._more:
            later_s = self._random.expovariate(1.0)
            self.timeline.at(self.timeline.now + later_s, self._stall)

    # ---- requests come --------------------------------------------------------------------------

    def _next_request(self) -> None:
        if self._users is None:
            super()._next_request()
            return
        if not self.arrived:
            for _ in range(self._users.count):
                self.timeline.at(self._random.uniform(0.0, 0.5), self._ask)
            self.timeline.at(self._users.seconds, self._close)

    def _close(self) -> None:
        self._more = False

    def _ask(self) -> None:
        if self._users is not None and self._more:
            self._arrive(self._users.sample(self._random, self.timeline.now))

    def notify(self, event: ev.ClusterEvent) -> None:
        match event:
            case ev.Arrived(request):
                self._add(self._read, request)
            case ev.FirstToken(request_id):
                self._add(self._hand_out, request_id)
            case _:
                super().notify(event)

    def _read(self, request: Request) -> float:
        now = self.timeline.now
        found = self._judge(request, now)
        if found is not None:
            self._refused(self.requests.live[request.id], found[1], now + self._costs.read_s)
            self.refusals_s.append(now + self._costs.read_s - request.arrival_s)
            return self._costs.read_s
        self._preparing[request.tenant] += 1
        self._add(self._prepare, request)
        return self._costs.read_s

    def _judge(self, request: Request, now: float) -> tuple[str, float] | None:
        """Return why a request is refused, and when to try again. Its choices are read together, so
        what is decided of the first holds for all."""
        if request.group in self._judged:
            return self._judged[request.group]
        newcomer = Newcomer(
            request.model, request.tenant, request.slo.ttft_s, now - request.arrival_s
        )
        found = self._entrance.refusal(
            self._backlog, newcomer, self._preparing, {}, self._present, now
        )  # fmt: skip
        if request.group:
            self._judged[request.group] = found
        return found

    def _prepare(self, request: Request) -> float:
        self.timeline.at(self.timeline.now + self._costs.prepare_s, self._prepared, request)
        return self._costs.prepare_s

    def _prepared(self, request: Request) -> None:
        self._preparing[request.tenant] -= 1
        self._present[request.tenant] += 1
        self._entrance.prepared()
        super().notify(ev.Arrived(request))

    def _hand_out(self, request_id: str) -> float:
        self.timeline.at(self.timeline.now + self._costs.token_s, self._handed_out, request_id)
        return self._costs.token_s

    def _handed_out(self, request_id: str) -> None:
        tracked = self.requests.live.get(request_id)
        if tracked is not None:
            now = self.first_s[request_id] = self.timeline.now
            super().notify(ev.FirstToken(request_id, now - tracked.request.arrival_s))

    def _left(self, request: Request) -> None:
        self._present[request.tenant] -= 1
        if not self._present[request.tenant]:
            del self._present[request.tenant]

    # ---- requests end ---------------------------------------------------------------------------

    def _refused(self, tracked: TrackedRequest, retry_s: float, now: float) -> None:
        self.requests.end(tracked, "rejected", 429)
        if self._users is not None:
            wait_s = retry_s if self._users.patient else self._users.think_s
            self.timeline.at(now + wait_s, self._ask)

    def submit(self, action: act.ClusterAction | act.BaselineClusterAction) -> None:
        match action:
            case act.Backlog():
                self._backlog = action
            case act.Reject(request_id, 429, _, least_s):
                now, tracked = self.timeline.now, self.requests.live[request_id]
                self._left(tracked.request)
                retry_s = self._entrance.retry_s(self._backlog, least_s, now)
                self._add(lambda: self._costs.read_s)
                self._refused(tracked, retry_s, now)
            case _:
                super().submit(action)

    def _end(self, tracked: TrackedRequest, ending: Ending) -> None:
        self._left(tracked.request)
        # A short answer may end before its first token was handed out.
        self.first_s.setdefault(tracked.request.id, self.timeline.now)
        self._add(lambda: self._costs.token_s * tracked.sampled)
        super()._end(tracked, ending)
        if self._users is not None:
            self.timeline.at(self.timeline.now + self._users.think_s, self._ask)
