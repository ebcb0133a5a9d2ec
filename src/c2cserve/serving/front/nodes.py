"""The nodes of a front: their connections, made again for as long as a node is a member."""

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass

from c2cserve.cluster.link import LinkListener, NodeAddress, NodeLink, connect
from c2cserve.core.fleet import FleetNode, NodeReport, Speed
from c2cserve.core.model import ModelState, ModelStatus
from c2cserve.runtime.gateway import NodeUse, Snapshot

log = logging.getLogger(__name__)

_RETRY_S = 0.5
_AVOID_S = 30.0
"""How long a node has no connection whose reports break the front's loop."""
_DOWN_S = 1.0
"""A worker that dies is there again within this time, as a rule. A node without any for longer
keeps no requests that another node could take."""


@dataclass(slots=True)
class Node:
    """A node that is up."""

    link: NodeLink
    node: FleetNode
    name: str
    """What people and metrics call it, the same after it starts again."""
    state: Snapshot | None = None
    _down_s: float | None = None
    """Since when none of its slices is up."""

    def take(self, state: Snapshot, now: float) -> None:
        """Take over what the node says of itself."""
        self.state = state
        if any(one.state == "up" for one in state.slices) or not state.slices:
            self._down_s = None
        elif self._down_s is None:
            self._down_s = now

    @property
    def open(self) -> bool:
        """Whether it takes new requests."""
        return self.state is not None and not self.state.draining and self._down_s is None

    def stuck(self, now: float) -> bool:
        """Whether its requests make no progress because it has had no slice for a while."""
        return self._down_s is not None and now - self._down_s >= _DOWN_S

    @property
    def use(self) -> NodeUse:
        """Return what people see of the node beside its slices."""
        assert self.state is not None
        state = self.state
        return NodeUse(
            state.running, state.waiting, sum(one.loaded_bytes > 0 for one in state.models),
            state.pool_used_bytes, state.pool_budget_bytes,
        )  # fmt: skip

    def report(self) -> NodeReport:
        """Return what the policy is told of the node."""
        assert self.state is not None
        models = self.state.models
        return NodeReport(
            self.node.id,
            tuple(one.id for one in models if one.state is ModelState.READY),
            tuple(one.id for one in models if one.state is ModelState.LOADING),
            self.state.pool_used_bytes,
            self.state.running + self.state.waiting,
            not self.open,
            tuple(_speed(one) for one in models if one.token_s > 0.0),
        )


def _speed(model: ModelStatus) -> Speed:
    """Return what the node has measured, without digits that would make each report a new one."""
    return Speed(model.id, float(f"{model.prompt_token_s:.2g}"), float(f"{model.token_s:.2g}"))


class Members:
    """Connects to the nodes that membership names, and tries again while they are named."""

    def __init__(self, listener: LinkListener, timeout_s: float) -> None:
        self._listener = listener
        self._timeout_s = timeout_s
        self._members: dict[str, NodeAddress] = {}
        self.heard_s = time.monotonic()
        """When membership was last known."""
        self._tasks: dict[tuple[str, NodeAddress], asyncio.Task[None]] = {}
        """Who was a member lately -> what keeps the connection: one for each address."""
        self.unreachable: dict[str, str] = {}
        """Members without a connection -> why. Ray says that they are alive: a cut, a hang, or a
        death that Ray has not noticed."""
        self._pauses_s: dict[str, float] = {}
        """Members that are connected to again later than others."""
        self._links: dict[NodeLink, str] = {}
        self._lost: dict[NodeLink, asyncio.Event] = {}

    def name_of(self, link: NodeLink) -> str:
        return self._links.get(link, "?")

    def update(self, members: Mapping[str, NodeAddress]) -> None:
        """Take over who is a member now, by name. A node that is no longer one keeps its
        connection for as long as that lives: Ray may be wrong, or gone itself."""
        self._members = dict(members)
        self.heard_s = time.monotonic()
        for key in members.items():
            if key not in self._tasks:
                self._tasks[key] = asyncio.get_running_loop().create_task(self._keep(*key))
        for name in self.unreachable.keys() - members.keys():
            del self.unreachable[name]

    async def _keep(self, name: str, address: NodeAddress) -> None:
        """Connect, again and again, for as long as the member has this address."""
        try:
            while self._members.get(name) == address:
                await self._connection(name, address)
                await asyncio.sleep(self._pauses_s.pop(name, _RETRY_S))
        finally:
            del self._tasks[name, address]

    async def _connection(self, name: str, address: NodeAddress) -> None:
        """Connect once. Return when the connection is over."""
        lost = asyncio.Event()

        def make() -> NodeLink:
            link = NodeLink(address, self._listener, self._timeout_s)
            self._links[link], self._lost[link] = name, lost
            return link

        try:
            await connect(address, make, self._timeout_s)
        except ConnectionError as error:
            self._note(name, f"cannot connect: {error}")
        except OSError as error:
            # Nothing comes back, as in a cut. That it was connected and fell silent says more.
            if name not in self.unreachable:
                why = str(error) or f"no answer within {self._timeout_s:g} s"
                self._note(name, f"cannot connect: {why}")
        else:
            await lost.wait()

    def _note(self, name: str, why: str) -> None:
        if name not in self.unreachable:
            log.warning("node %s: %s", name, why)
        self.unreachable[name] = why

    def up(self, link: NodeLink) -> str:
        """Note that a node let this front in. Return its name."""
        name = self.name_of(link)
        self.unreachable.pop(name, None)
        return name

    def avoid(self, link: NodeLink) -> None:
        """Connect to this node again after a while only: what it says breaks the front's loop."""
        self._pauses_s[self.name_of(link)] = _AVOID_S

    def lost(self, link: NodeLink, reason: str) -> None:
        name = self._links.pop(link, None)
        if name is not None:
            self._note(name, reason)
            self._lost.pop(link).set()

    def close(self) -> None:
        self._members.clear()
        for task in list(self._tasks.values()):
            task.cancel()
        for link in list(self._links):
            link.end("this front ends")
