"""The HTTP server's side of the live controller: asyncio in front, the controller's thread behind.

Deltas cross from the thread to the event loop in batches, one wake-up per batch.
"""

import asyncio
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence

from c2cserve.core.events import Cancelled, ClusterEvent, Draining, ModelUsed, ModelWanted
from c2cserve.core.model import ModelStatus
from c2cserve.core.policy_names import OWN, PolicyName
from c2cserve.core.request import Delta, Job
from c2cserve.policy.by_name import relays_tokens
from c2cserve.policy.cluster.admission import BURST_S
from c2cserve.policy.cluster.entrance import Entrance, Newcomer
from c2cserve.runtime.gateway import ModelFiles, Refused, SliceStatus, Snapshot, Superseded
from c2cserve.serving.controller.changes import ModelChanges
from c2cserve.serving.controller.controller import Controller, Loop
from c2cserve.serving.controller.directory import BrokenModel, Directory, ModelRecord
from c2cserve.serving.controller.fleet import Fleet
from c2cserve.serving.controller.host import HostedModel, ModelHost
from c2cserve.serving.controller.jobs import JobTable, LiveJob
from c2cserve.serving.controller.output_stream import FairDelivery, Output, OutputStream
from c2cserve.serving.controller.snapshot import (
    BusyShares,
    find_places,
    slice_statuses,
    take_snapshot,
)
from c2cserve.serving.controller.world import ControllerWorld

_SWITCH_S = 0.0005
"""How long one thread waits for the interpreter's lock before the other must yield it. The event
loop takes the lock anew for each connection that it reads. With Python's 5 ms, a controller that is
busy all the time leaves the event loop some 200 reads per second."""
_GRACE_S = 2.0
"""Workers that got `Quit` have this long to end: a step under way is finished first."""
_PACE = 2.0
"""A client gets output once at most in so many of its TPOT targets, in an overload. Each time takes
the event loop as long as two refusals. It needs them for new requests, which wait for nothing else
then."""
_SAMPLE_S = 1.0
"""How often the busy time of slices is sampled."""
_STALLED_S = 5.0
"""A controller loop without a tick for longer is not healthy (it ticks every 0.25 s)."""


class LiveGateway:
    """`runtime.gateway.Gateway` over a fleet of workers. It is made on the event loop it serves."""

    def __init__(
        self,
        instance: str,
        make_loop: Callable[[int], Loop],
        fleet: Fleet,
        host: ModelHost,
        on_end: Callable[[str | None], None],
        burst_s: float = BURST_S,
        policy: PolicyName = OWN,
    ) -> None:
        """`make_loop`: see `Controller`. `on_end` is called on the event loop when the controller
        has ended: with None after a drain, else with the reason. The workers end from then on;
        `join` waits for them."""
        self._instance = instance
        self._loop = asyncio.get_running_loop()
        self._fleet = fleet
        self._host = host
        self._on_end = on_end
        self._directory = Directory()
        self._jobs = JobTable()
        self._outbox: list[Output] = []
        self._delivery = FairDelivery(self._loop)
        self._started_s = time.time()
        self._draining = False
        self._policy: PolicyName = policy
        self._entrance = Entrance(burst_s)
        self._present = Counter[str]()
        """Tenant -> choices under way."""
        self._busy = BusyShares()
        self._world = ControllerWorld(
            fleet, host, self._directory, self._jobs, self._flush, self._forgotten,
            relays_tokens=relays_tokens(policy),
        )  # fmt: skip
        self._controller = Controller(self._world, make_loop)
        self._changes = ModelChanges(
            host, self._directory, self._world.post, lambda: set(self._jobs.counts()),
            lambda: {worker.slice.id for worker in fleet.up},
        )  # fmt: skip
        self._thread = threading.Thread(target=self._control, name="controller", daemon=True)

    def start(self) -> None:
        sys.setswitchinterval(_SWITCH_S)
        self._thread.start()
        self._sample()

    def _sample(self) -> None:
        self._busy.sample(list(self._fleet.slots.values()), time.monotonic())
        self._loop.call_later(_SAMPLE_S, self._sample)

    # ---- the controller's thread --------------------------------------------------------------

    def post(self, event: ClusterEvent) -> None:
        """Hand an event to the controller. The model host's listener calls it from any thread."""
        self._world.post(event)

    def _control(self) -> None:
        reason = self._controller.run()
        # The event loop ends its connections while the workers end.
        self._loop.call_soon_threadsafe(self._ended, reason)
        self._world.close(grace_s=_GRACE_S)

    def _flush(self) -> None:
        if self._outbox:
            batch, self._outbox = self._outbox, []
            self._loop.call_soon_threadsafe(self._hand_out, batch, time.monotonic())

    def _forgotten(self, model: str) -> None:
        self._loop.call_soon_threadsafe(self._changes.forgotten, model)

    # ---- the event loop -----------------------------------------------------------------------

    def _hand_out(self, batch: list[Output], flushed_s: float) -> None:
        self._delivery.paced = self.may_refuse
        self._delivery.add(batch, flushed_s)
        self._jobs.hand_out_s = self._delivery.delay_s

    def _ended(self, reason: str | None) -> None:
        self._draining = True
        # Jobs may have been posted after the controller last looked.
        posted = [one for one in self._world.inbox.take() if isinstance(one, LiveJob)]
        for live in (*self._jobs.clear(), *posted):
            live.sink(Refused(503, reason or "the server is shutting down"))
        self._flush()
        self._changes.end()
        self._on_end(reason)

    def resolve(self, name: str) -> ModelFiles | None:
        model = self._directory.find(name)
        if isinstance(model, BrokenModel):
            raise Refused(503, f"the model {model.name!r} cannot be served: {model.error}")
        return None if model is None else model.hosted.files

    def overload(
        self, model: str, tenant: str, ttft_s: float, arrived_s: float,
        preparing: Mapping[str, int],
    ) -> Refused | None:  # fmt: skip
        world, now = self._world, time.monotonic()
        newcomer = Newcomer(model, tenant, ttft_s, now - arrived_s)
        posted = world.inbox.posted() if self._entrance.strict(world.backlog, now) else {}
        found = self._entrance.refusal(
            world.backlog, newcomer, preparing, posted, self._present, now
        )  # fmt: skip
        return None if found is None else Refused(429, *found)

    @property
    def may_refuse(self) -> bool:
        return self._entrance.strict(self._world.backlog, time.monotonic())

    async def submit(self, jobs: Sequence[Job]) -> AsyncGenerator[Delta, None]:
        request = jobs[0].request
        record = self._directory.version(request.model)
        if record is None or record.superseded:
            raise Superseded
        if record.draining:
            raise Refused(404, f"the model {record.name!r} does not exist")
        if self._draining:
            raise Refused(503, "the server is shutting down", retry_after_s=5.0)
        outage = self._fleet.outage(time.monotonic())
        if outage is not None and outage.retry_s > 0.0:
            raise Refused(503, outage.reason, outage.retry_s)
        self._entrance.prepared()
        now = time.monotonic()
        waited_s, ttft_s = now - request.arrival_s, request.slo.ttft_s
        late = self._entrance.overdue(self._world.backlog, waited_s, ttft_s, now)
        if late is not None:
            raise Refused(429, *late)
        stream, tenant = OutputStream(_PACE * request.slo.tpot_s), request.tenant
        running = {job.request.id for job in jobs}

        def sink(item: Delta | Refused) -> None:
            if stream.add(item):
                self._outbox.append((tenant, stream))

        self._present[tenant] += len(jobs)
        self._world.inbox.post_all([LiveJob(job, sink) for job in jobs])
        try:
            while running:
                item = await stream.get()
                if isinstance(item, Refused):
                    raise self._later(item)
                if item.finish is not None:
                    running.discard(item.request_id)
                yield item
        finally:
            self._present[tenant] -= len(jobs)
            if not self._present[tenant]:
                del self._present[tenant]
            for request_id in running:
                self.cancel(request_id)

    def _later(self, refused: Refused) -> Refused:
        """Return a refusal with the time to try again that fits all refusals together."""
        if refused.status == 429 and refused.retry_after_s is not None:
            backlog, least_s = self._world.backlog, refused.retry_after_s
            refused.retry_after_s = self._entrance.retry_s(backlog, least_s, time.monotonic())
        return refused

    def cancel(self, request_id: str) -> None:
        self._world.post(Cancelled(request_id))

    def hold(self, name: str, *, pinned: bool) -> None:
        """Load a model as if a request waited for it, unless it is in the pool, and keep it if it
        is `pinned`."""
        model = self._directory.find(name)
        if not isinstance(model, ModelRecord) or model.draining:
            return
        if pinned or not model.in_pool:
            self._world.post(ModelWanted(model.id, pinned))

    def note_uses(self, name: str, times_s: tuple[float, ...]) -> None:
        """Note when a model was used on other nodes."""
        if isinstance(model := self._directory.find(name), ModelRecord):
            self._world.post(ModelUsed(model.id, times_s))

    def snapshot(self) -> Snapshot:
        return take_snapshot(
            instance=self._instance,
            started_s=self._started_s,
            draining=self._draining,
            slots=list(self._fleet.slots.values()),
            directory=self._directory,
            jobs=self._jobs,
            host=self._host,
            counters=self._world.counters,
            busy=self._busy,
            stall_timeout_s=self._fleet.settings.stall_timeout_s,
            refused_early=self._entrance.refused,
            policy=self._policy,
        )

    def _slices(self) -> Sequence[SliceStatus]:
        slots, places = list(self._fleet.slots.values()), find_places(self._directory)
        return slice_statuses(slots, places, self._busy, self._fleet.settings.stall_timeout_s)

    @property
    def ready(self) -> bool:
        sound = any(one.state == "up" and not one.trouble for one in self._slices())
        return not self._draining and sound

    @property
    def healthy(self) -> bool:
        alive = self._thread.is_alive()
        turning = alive and time.monotonic() - self._world.last_tick_s < _STALLED_S
        if not turning or self._fleet.outage(time.monotonic()) is not None:
            return False
        up = [one for one in self._slices() if one.state == "up"]
        return not (up and all(one.trouble for one in up))

    def models(self) -> Sequence[ModelStatus]:
        return self.snapshot().models

    def _status(self, model: str) -> ModelStatus:
        return next(status for status in self.models() if status.id == model)

    def add_hosted(self, hosted: HostedModel) -> None:
        """Add a checked entry. Raises `Refused` (409) when a name is taken."""
        self._changes.add_hosted(hosted)

    def add_broken(self, broken: BrokenModel) -> None:
        """Add a model that is `failed` from the start. Raises `Refused` (409) when a name is
        taken."""
        self._directory.add(broken)

    async def add_model(self, entry: dict[str, object]) -> ModelStatus:
        return self._status((await self._changes.add(entry)).spec.name)

    async def remove_model(self, name: str) -> None:
        await self._changes.remove(name)

    async def reload_model(self, name: str) -> ModelStatus:
        return self._status((await self._changes.reload(name)).name)

    # ---- shutting down ------------------------------------------------------------------------

    def drain(self) -> None:
        """Refuse new requests and finish the others; `on_end` follows."""
        self._draining = True
        self._world.post(Draining())

    def abort(self, reason: str) -> None:
        """End now, and refuse the requests in flight."""
        self._draining = True
        self._world.abort(reason)

    @property
    def draining(self) -> bool:
        return self._draining

    def join(self) -> None:
        """Wait until all workers are gone. Blocks for as long as the last one takes to die."""
        self._thread.join()
