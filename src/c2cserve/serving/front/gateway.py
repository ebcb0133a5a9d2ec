"""A front's gateway: requests to nodes, and on to others when a node is lost.

It is `runtime.gateway.Gateway`, so the HTTP server before it is the one of a single machine. As the
controller does for its slices (`serving.controller.jobs`), it keeps the tokens that each client
has; only it may send a request again, from there. So no token is lost, and none is repeated.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import replace
from itertools import islice

from c2cserve.cluster.link import NodeAddress, NodeLink
from c2cserve.cluster.messages import Applied, Decline, HoldModel, KeyUse, ModelChange, Source
from c2cserve.cluster.messages import Cancel as CancelJob
from c2cserve.core import fleet
from c2cserve.core.actions import Reject
from c2cserve.core.events import Arrived, Cancelled, ModelAdded, RequestEvent
from c2cserve.core.model import ModelStatus, name_of
from c2cserve.core.request import Delta, Job
from c2cserve.runtime.gateway import ModelFiles, Refused, Snapshot
from c2cserve.serving.controller.jobs import JobTable, LiveJob, log_moved
from c2cserve.serving.controller.output_stream import OutputStream
from c2cserve.serving.front.catalogue import FrontCatalogue, Prepare
from c2cserve.serving.front.key_limits import TELL_S, KeyLimits
from c2cserve.serving.front.loop import FrontLoop, Loop, RestartTick
from c2cserve.serving.front.models import FrontModels
from c2cserve.serving.front.nodes import Members, Node

log = logging.getLogger(__name__)

_RELAYS = 2


class FleetGateway:
    """All methods are called on the event loop on which it was made."""

    def __init__(
        self, instance: str, models: FrontModels, make_loop: Callable[[int], Loop],
        on_end: Callable[[str | None], None], node_timeout_s: float, limits: KeyLimits,
        prepare: Prepare,
    ) -> None:  # fmt: skip
        """`make_loop`: see `FrontLoop`. `on_end`: called with None after a drain, else with the
        reason. `node_timeout_s`: a node that is silent for longer is lost. `prepare`: checks
        entries that are added."""
        self._instance = instance
        self._models = models
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._jobs = JobTable()
        self._ticks = FrontLoop(self, make_loop)
        self._members = Members(self, node_timeout_s)
        self._limits = limits
        self._catalogue = FrontCatalogue(
            instance, models, prepare, lambda: [one.link for one in self._nodes.values()], self.tick
        )
        self._nodes: dict[str, Node] = {}
        """Nodes that are up, by their incarnation."""
        self._counters = Counter[str]()
        self._ended_counters = Counter[str]()
        """What nodes counted that are gone: a sum of counters never falls."""
        self._started_s = time.time()
        self._draining = self._over = False

    def start(self) -> None:
        self.tick(*(ModelAdded(spec) for spec in self._models.specs))
        self._share_limits()

    def _share_limits(self) -> None:
        """Tell other fronts what was let in of each key, by way of two nodes: one may be lost."""
        if self._over:
            return
        self._limits.forget_silent(time.monotonic())
        if (use := self._limits.news()) is not None:
            relays = (self._nodes[one].link.tell_use(use) for one in sorted(self._nodes))
            sum(islice(filter(None, relays), _RELAYS))
        self._loop.call_later(TELL_S, self._share_limits)

    def members(self, members: Mapping[str, NodeAddress]) -> None:
        """Take over who is a member now, by name."""
        if not self._over:
            self._members.update(members)

    # ---- the loop -------------------------------------------------------------------------------

    def tick(self, *events: fleet.FleetEvent) -> None:
        """Tell the policy what happened, and carry out what it decides."""
        self._ticks.tick(*events)

    def restart_ticks(self) -> list[RestartTick]:
        """Return what a fresh policy is told. Requests on nodes come before those that wait, which
        are placed beside them."""
        ticks = [RestartTick(tuple(ModelAdded(spec) for spec in self._models.specs))]
        for node in self._nodes.values():
            up = fleet.NodeUp(node.node)
            events = (up,) if node.state is None else (up, node.report())
            ticks.append(RestartTick(events, node=node.node.id))
        for live in sorted(self._jobs.live(), key=lambda one: one.slice_id is None):
            request = replace(live.request, model=name_of(live.request.model))
            event = fleet.Resumed(request, live.slice_id or "", not live.unsent, live.deaths)
            ticks.append(RestartTick((event,), request.id))
        return ticks

    def expel(self, at_fault: RestartTick, fault: Exception) -> None:
        """Part with the request or the node of which no policy can be told."""
        self._blame(at_fault.request, fault)
        if (node := self._nodes.pop(at_fault.node, None)) is not None:
            self._count_lost(node)
            self._jobs.displace(at_fault.node)
            self._members.avoid(node.link)
            node.link.end(f"the front's loop breaks at it: {type(fault).__name__}: {fault}")

    def _blame(self, request_id: str, fault: Exception) -> list[RequestEvent]:
        """End the one request whose handling raised `fault`, here and on its node."""
        live = self._jobs.get(request_id)
        if live is None:
            return []
        if (node := self._nodes.get(live.slice_id or "")) is not None:
            node.link.send(CancelJob(request_id))
        return self._jobs.blame(request_id, fault)

    def carry_out(self, action: fleet.FleetAction) -> None:
        match action:
            case fleet.SendTo(_, node_id):
                self._send(action, self._nodes[node_id])
            case fleet.Hold(node_id, model, source, pinned):
                link = self._nodes[node_id].link
                link.send(HoldModel(model, self._source(source, link, model), pinned))
                self._counters["models_held"] += 1
            case Reject(request_id, status, reason, retry_after_s):
                if (live := self._jobs.drop(request_id)) is not None:
                    live.sink(Refused(status, reason, retry_after_s))
                    self._counters[f"rejected_{status}"] += 1

    def _source(self, holder: str, receiver: NodeLink, model: str) -> Source | None:
        node = self._nodes.get(holder)
        return None if node is None else node.link.source_for(receiver, model)

    def _send(self, action: fleet.SendTo, node: Node) -> None:
        request_id = action.request_id
        live = self._jobs.get(request_id)
        if live is None:
            return
        live.dispatch(node.node.id)
        try:
            job = live.remaining()
            job = replace(job, request=replace(job.request, model=name_of(job.request.model)))
            weights = self._source(action.source, node.link, job.request.model)
            age_s = time.monotonic() - job.request.arrival_s
            node.link.submit(job, age_s, weights, action.used_ago_s)
        except OSError as error:
            events = self._jobs.fail(request_id, f"its vocabulary cannot be read: {error}")
            self._loop.call_soon(self.tick, *events)
        except Exception as fault:  # a fresh loop would believe that it is there
            log.exception("request %s cannot be sent", request_id, extra={"job": request_id})
            self._loop.call_soon(self.tick, *self._blame(request_id, fault))

    # ---- what nodes say (`cluster.link.LinkListener`) -------------------------------------------

    def node_up(self, link: NodeLink, node: fleet.FleetNode) -> None:
        name = self._members.up(link)
        log.info("node %s is up: %d slices of %s, cost %g", name, node.slices, node.kind, node.cost)
        self._nodes[node.id] = Node(link, node, name)
        self.tick(fleet.NodeUp(node))
        self._catalogue.node_up(link)

    def node_reported(self, link: NodeLink, state: Snapshot) -> None:
        assert link.node is not None
        node = self._nodes[link.node.id]
        before = None if node.state is None else node.report()
        now = time.monotonic()
        node.take(state, now)
        if (report := node.report()) != before:
            self.tick(report)
        others = (one for one in self._nodes.values() if one is not node)
        if node.stuck(now) and any(one.open for one in others):
            self._relieve(node)

    def _relieve(self, node: Node) -> None:
        """Let the requests of a node without slices continue on others. The node may wait long
        before it starts a worker that has died often."""
        displaced, failed = self._jobs.displace(node.node.id)
        for request in displaced:
            node.link.send(CancelJob(request.id))
        if displaced or failed:
            why = "none of its slices is up"
            log_moved([one.id for one in displaced], f"node {node.name}: {why}")
            moved = (fleet.Declined(one, node.node.id, 503, why, 1.0) for one in displaced)
            self.tick(*moved, *failed)

    def output(self, link: NodeLink, delta: Delta) -> None:
        assert link.node is not None
        live = self._jobs.get(delta.request_id)
        if live is None or live.slice_id != link.node.id:
            return  # it goes on elsewhere
        if delta.timing is not None:
            where = f"{self._members.name_of(link)}/{delta.timing.slice}"
            delta = replace(delta, timing=replace(delta.timing, slice=where))
        try:
            events = self._jobs.receive(delta, time.monotonic())
        except Exception as fault:  # it is this request's, not the node's
            request_id = delta.request_id
            log.exception("request %s cannot be handled", request_id, extra={"job": request_id})
            events = self._blame(request_id, fault)
        if events:
            self.tick(*events)

    def declined(self, link: NodeLink, decline: Decline) -> None:
        assert link.node is not None
        live = self._jobs.get(decline.request_id)
        if live is None or live.slice_id != link.node.id:
            return
        self._counters["declined_by_nodes"] += 1
        after_s = decline.retry_after_s if decline.retry_after_s is not None else 1.0
        request = live.begin_anew()
        self.tick(fleet.Declined(request, link.node.id, decline.status, decline.reason, after_s))

    def catalogue_changed(self, changes: Mapping[str, ModelChange]) -> None:
        self._catalogue.changed(changes)

    def change_applied(self, link: NodeLink, applied: Applied) -> None:
        self._catalogue.applied(link, applied)

    def key_used(self, use: KeyUse) -> None:
        self._limits.take(use, time.monotonic())

    def node_lost(self, link: NodeLink, reason: str) -> None:
        name = self._members.name_of(link)
        self._members.lost(link, reason)
        self._catalogue.node_lost(link)
        node = link.node
        gone = None if node is None else self._nodes.pop(node.id, None)
        if node is None or gone is None:
            return
        self._count_lost(gone)
        displaced, failed = self._jobs.displace(node.id)
        log_moved([one.id for one in displaced], f"node {name} is lost: {reason}")
        self.tick(fleet.NodeLost(node.id, displaced), *failed)

    def _count_lost(self, node: Node) -> None:
        if node.state is not None:
            self._ended_counters.update(node.state.counters)
        self._counters["nodes_lost"] += 1

    # ---- what the HTTP server asks --------------------------------------------------------------

    def resolve(self, name: str) -> ModelFiles | None:
        return self._models.find(name)

    def overload(
        self, model: str, tenant: str, ttft_s: float, arrived_s: float,
        preparing: Mapping[str, int],
    ) -> Refused | None:  # fmt: skip
        """Nodes refuse for themselves; a front has no queue but for want of any node."""
        return None

    @property
    def may_refuse(self) -> bool:
        return False

    async def submit(self, jobs: Sequence[Job]) -> AsyncGenerator[Delta, None]:
        if self._draining:
            raise Refused(503, "the server is shutting down", retry_after_s=5.0)
        stream = OutputStream()
        running = {job.request.id for job in jobs}
        for job in jobs:
            self._jobs.add(LiveJob(job, stream.put))
        try:
            requests = (replace(one.request, model=name_of(one.request.model)) for one in jobs)
            self.tick(*map(Arrived, requests))
            while running:
                item = await stream.get()
                if isinstance(item, Refused):
                    raise item
                if item.finish is not None:
                    running.discard(item.request_id)
                yield item
        finally:
            for request_id in running:
                self.cancel(request_id)
            self._check_drained()

    def cancel(self, request_id: str) -> None:
        live = self._jobs.drop(request_id)
        if live is None:
            return
        if (node := self._nodes.get(live.slice_id or "")) is not None:
            node.link.send(CancelJob(request_id))
        self.tick(Cancelled(request_id))

    def snapshot(self) -> Snapshot:
        states = {node.name: node.state for node in self._nodes.values() if node.state is not None}
        counters = Counter[str](self._counters)
        counters.update(self._ended_counters)
        for state in states.values():
            counters.update(state.counters)
        counters["resumed_requests"] += self._jobs.resumed
        counters["front_restarts"] = self._ticks.restarts
        counters["front_request_failures"] = self._jobs.blamed
        return Snapshot(
            instance=self._instance,
            started_s=self._started_s,
            draining=self._draining,
            slices=tuple(
                replace(one, id=f"{name}/{one.id}")
                for name, state in sorted(states.items()) for one in state.slices
            ),
            models=tuple(self._models.statuses({n: s.models for n, s in states.items()})),
            pool_used_bytes=sum(state.pool_used_bytes for state in states.values()),
            pool_budget_bytes=sum(state.pool_budget_bytes for state in states.values()),
            running=sum(live.slice_id is not None for live in self._jobs.live()),
            waiting=sum(live.slice_id is None for live in self._jobs.live()),
            tenants=tuple(sorted(self._jobs.of_tenants())),
            nodes=self._node_states(),
            node_use={n.name: n.use for n in self._nodes.values() if n.state is not None},
            members_age_s=time.monotonic() - self._members.heard_s,
            counters={name: float(count) for name, count in counters.items()},
        )  # fmt: skip

    def _node_states(self) -> dict[str, str]:
        """Return each node's state by its name. Members without a connection say why."""
        found = dict(self._members.unreachable)
        for node in self._nodes.values():
            draining = node.state is not None and node.state.draining
            found[node.name] = "draining" if draining else "up"
        return found

    @property
    def ready(self) -> bool:
        return bool(self._nodes) and not self._draining

    @property
    def healthy(self) -> bool:
        return True

    def models(self) -> Sequence[ModelStatus]:
        return self.snapshot().models

    def _status(self, model: str) -> ModelStatus:
        return next(one for one in self.models() if one.id == model)

    async def add_model(self, entry: dict[str, object]) -> ModelStatus:
        return self._status(await self._catalogue.add(entry))

    async def remove_model(self, name: str) -> None:
        await self._catalogue.remove(name)

    async def reload_model(self, name: str) -> ModelStatus:
        return self._status(await self._catalogue.reload(name))

    # ---- shutting down --------------------------------------------------------------------------

    def drain(self) -> None:
        """Refuse new requests and finish the others; `on_end` follows. Nodes stay."""
        self._draining = True
        self._check_drained()

    def abort(self, reason: str) -> None:
        """End now, and refuse the requests in flight."""
        self._draining = True
        for live in self._jobs.clear():
            live.sink(Refused(503, reason))
        self._end(reason)

    def _check_drained(self) -> None:
        if self._draining and not len(self._jobs):
            self._end(None)

    def _end(self, reason: str | None) -> None:
        if self._over:
            return
        self._over = True
        self._ticks.close()
        self._members.close()
        self._on_end(reason)

    @property
    def draining(self) -> bool:
        return self._draining
