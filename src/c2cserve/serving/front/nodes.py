"""The nodes of a front: their connections, made again for as long as a node is a member."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from c2cserve.cluster.link import LinkListener, NodeAddress, NodeLink, connect
from c2cserve.core.fleet import FleetNode, NodeReport
from c2cserve.core.model import ModelState
from c2cserve.runtime.gateway import Snapshot

log = logging.getLogger(__name__)

_RETRY_S = 0.5


@dataclass(slots=True)
class Node:
    """A node that is up."""

    link: NodeLink
    node: FleetNode
    name: str
    """What people and metrics call it, the same after it starts again."""
    state: Snapshot | None = None

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
            self.state.draining,
        )


class Members:
    """Connects to the nodes that membership names, and tries again while they are named."""

    def __init__(self, listener: LinkListener, timeout_s: float) -> None:
        self._listener = listener
        self._timeout_s = timeout_s
        self._connecting: dict[str, tuple[NodeAddress, asyncio.Task[None]]] = {}
        self.unreachable: dict[str, str] = {}
        """Members without a connection -> why. Ray says that they are alive: a cut, a hang, or a
        death that Ray has not noticed."""
        self._links: dict[NodeLink, str] = {}
        self._lost: dict[NodeLink, asyncio.Event] = {}

    def name_of(self, link: NodeLink) -> str:
        return self._links.get(link, "?")

    def update(self, members: Mapping[str, NodeAddress]) -> None:
        """Take over who is a member now, by name. A node that is no longer one keeps its
        connection for as long as that lives: Ray may be wrong, or gone itself."""
        for name, address in members.items():
            known = self._connecting.get(name)
            if known is not None and known[0] == address:
                continue
            if known is not None:
                known[1].cancel()
            task = asyncio.get_running_loop().create_task(self._keep(name, address))
            self._connecting[name] = address, task
        for name in self._connecting.keys() - members.keys():
            self._connecting.pop(name)[1].cancel()
            self.unreachable.pop(name, None)

    async def _keep(self, name: str, address: NodeAddress) -> None:
        while True:
            lost = asyncio.Event()

            def make() -> NodeLink:
                link = NodeLink(address.secret, self._listener, self._timeout_s)
                self._links[link] = name
                self._lost[link] = lost  # noqa: B023 - one loop's event for one link
                return link

            try:
                await connect(address, make, self._timeout_s)
            except (OSError, TimeoutError) as error:
                self._note(name, f"cannot connect: {error}")
            else:
                await lost.wait()
            await asyncio.sleep(_RETRY_S)

    def _note(self, name: str, why: str) -> None:
        if name not in self.unreachable:
            log.warning("node %s: %s", name, why)
        self.unreachable[name] = why

    def up(self, link: NodeLink) -> str:
        """Note that a node let this front in. Return its name."""
        name = self.name_of(link)
        self.unreachable.pop(name, None)
        return name

    def lost(self, link: NodeLink, reason: str) -> None:
        name = self._links.pop(link, None)
        if name is not None:
            self._note(name, reason)
            self._lost.pop(link).set()

    def close(self) -> None:
        for _, task in self._connecting.values():
            task.cancel()
        self._connecting.clear()
        for link in list(self._links):
            link.end("this front ends")


OnMembers = Callable[[Mapping[str, NodeAddress]], None]
"""Takes the members by name: called on the front's event loop."""
