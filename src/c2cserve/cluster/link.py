"""A front's connection to one node."""

import asyncio
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from c2cserve.cluster import messages as msg
from c2cserve.cluster.peer import Peer
from c2cserve.cluster.weights import source_of
from c2cserve.core.fleet import FleetNode
from c2cserve.core.request import Delta, Job
from c2cserve.runtime.gateway import Snapshot


@dataclass(frozen=True, slots=True)
class NodeAddress:
    """Where a node listens, and what a front needs to be let in."""

    host: str
    port: int
    secret: bytes


class LinkListener(Protocol):
    """Gets what a node says. Called on the event loop, in the order in which it was sent."""

    def node_up(self, link: "NodeLink", node: FleetNode) -> None: ...

    def node_reported(self, link: "NodeLink", state: Snapshot) -> None: ...

    def output(self, link: "NodeLink", delta: Delta) -> None: ...

    def declined(self, link: "NodeLink", decline: msg.Decline) -> None: ...

    def key_used(self, use: msg.KeyUse) -> None:
        """Take what another front let in."""
        ...

    def catalogue_changed(self, changes: Mapping[str, msg.ModelChange]) -> None:
        """Take changes of the catalogue, also those known already."""
        ...

    def change_applied(self, link: "NodeLink", applied: msg.Applied) -> None: ...

    def node_lost(self, link: "NodeLink", reason: str) -> None:
        """Called once, also if it was never up."""
        ...


class NodeLink(Peer):
    def __init__(self, address: NodeAddress, listener: LinkListener, timeout_s: float) -> None:
        super().__init__(timeout_s)
        self._address = address
        self._listener = listener
        self._nonce = secrets.token_bytes(msg.NONCE_BYTES)
        self._tables: set[str] = set()
        """Vocabularies that the node has."""
        self.node: FleetNode | None = None
        self._weights_port = 0
        self._version = 0

    # ---- to the node ----------------------------------------------------------------------------

    def submit(
        self, job: Job, age_s: float, source: msg.Source | None, used_ago_s: tuple[float, ...]
    ) -> None:
        """Send a job, after its vocabulary if the node lacks that. Raises OSError if the
        vocabulary cannot be read."""
        grammar = job.sampling.grammar
        if grammar is not None and grammar.tokens not in self._tables:
            self.send(msg.Table(grammar.tokens, Path(grammar.tokens).read_bytes()))
            self._tables.add(grammar.tokens)
        self.send(msg.Submit(job, age_s, source, used_ago_s))

    def source_for(self, receiver: "NodeLink", model: str) -> msg.Source | None:
        """Return what lets another node get a model from this one; None if this one sends none."""
        if not self._weights_port:
            return None
        return source_of(
            self._address.host, self._weights_port, model,
            holder_secret=self._address.secret, receiver_secret=receiver._address.secret,
        )  # fmt: skip

    def tell_use(self, use: msg.KeyUse) -> bool:
        """Tell the node's other fronts what this one let in. Return whether the node can."""
        if self.knows_changes:
            self.send(use)
            return True
        return False

    @property
    def knows_changes(self) -> bool:
        """Whether the node's version of the protocol has what fronts tell each other."""
        return self.trusted and self._version >= msg.FRONTS_TALK_VERSION

    def tell_changes(self, changes: Mapping[str, msg.ModelChange]) -> None:
        """Tell changes of the catalogue to a node that knows them."""
        self.send(msg.Changes(dict(changes)))

    # ---- from the node --------------------------------------------------------------------------

    def opened(self) -> None:
        """Wait for the node's greeting."""

    def received(self, data: bytes) -> None:
        message = msg.decode_from_node(data)
        if not self.trusted:
            self._enter(message)
            return
        match message:
            case msg.Output(delta):
                self._listener.output(self, delta)
            case msg.Decline():
                self._listener.declined(self, message)
            case msg.KeyUse():
                self._listener.key_used(message)
            case msg.Changes(models):
                self._listener.catalogue_changed(models)
            case msg.Applied():
                self._listener.change_applied(self, message)
            case msg.Report(state):
                self._listener.node_reported(self, state)
            case msg.Beat():
                pass
            case _:
                raise ValueError(f"{type(message).__name__} at this time")

    def _enter(self, message: msg.FromNode) -> None:
        match message:
            case msg.Greeting(oldest, newest, nonce):
                version = min(newest, msg.VERSION)
                if version < max(oldest, msg.OLDEST_VERSION):
                    raise ValueError(
                        f"it speaks versions {oldest} to {newest} of the protocol, and this front "
                        f"{msg.OLDEST_VERSION} to {msg.VERSION}"
                    )
                self._version = version
                proof = msg.proof(self._address.secret, "front", nonce)
                self.send(msg.Enter(version, self._nonce, proof))
            case msg.Welcome(proof, node, weights_port):
                if not msg.same(proof, msg.proof(self._address.secret, "node", self._nonce)):
                    raise ValueError("a node without this cluster's secret")
                self.trusted, self.node, self._weights_port = True, node, weights_port
                self._listener.node_up(self, node)
            case msg.Beat():
                pass
            case _:
                raise ValueError(f"{type(message).__name__} before Welcome")

    def closed(self, reason: str) -> None:
        self._listener.node_lost(self, reason)


async def connect(
    address: NodeAddress, make_link: Callable[[], NodeLink], timeout_s: float
) -> NodeLink:
    """Connect to a node. Raises OSError or TimeoutError."""
    loop = asyncio.get_running_loop()
    connecting = loop.create_connection(make_link, address.host, address.port)
    _, link = await asyncio.wait_for(connecting, timeout_s)
    return link
