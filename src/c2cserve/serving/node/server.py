"""`c2cserve node`: one machine's server behind a node's port. An agent starts it."""

import logging
import socket
import sys
from collections.abc import Sequence
from typing import BinaryIO

import msgspec
import uvloop

from c2cserve.catalog.entry import CatalogError
from c2cserve.cluster.agent import Announcement, NodeOrder
from c2cserve.cluster.port import NodePort
from c2cserve.core.fleet import FleetNode
from c2cserve.core.machine import Slice
from c2cserve.kernels.native import chosen_isa
from c2cserve.processes.own_stdout import own_stdout
from c2cserve.processes.parent_death import end_with
from c2cserve.server.access.gate import Gate
from c2cserve.server.dashboard.live import TickTap
from c2cserve.serving.controller.catalog_host import CatalogHost
from c2cserve.serving.controller.gateway import LiveGateway
from c2cserve.serving.doors import Door
from c2cserve.serving.live_server import LiveServer
from c2cserve.serving.logs import setup_logging
from c2cserve.serving.node.spec import NodeSpec, read_spec
from c2cserve.serving.node.weights import PoolWeights
from c2cserve.serving.start_signals import StartSignals
from c2cserve.terminal.output import CliError

log = logging.getLogger(__name__)

_GPU_COST = 50
"""What a GPU, or an instance of one, costs beside a CPU slice."""


class _NodeDoor:
    """A node's port, which tells the agent where it listens."""

    def __init__(self, port: NodePort, weights: PoolWeights, out: BinaryIO) -> None:
        self._port = port
        self._weights = weights
        self._out = out

    async def open(self, listener: socket.socket) -> None:
        await self._port.listen(listener)
        said = Announcement(listener.getsockname()[1], self._port.node.id)
        self._out.write(msgspec.json.encode(said) + b"\n")

    async def close(self) -> None:
        self._weights.close()
        await self._port.close()


class _NodeServer(LiveServer):
    def __init__(
        self, order: NodeOrder, spec: NodeSpec, signals: StartSignals, out: BinaryIO
    ) -> None:  # fmt: skip
        super().__init__(spec.settings, spec.catalog(), None, Gate(()), signals)
        self._order = order
        self._out = out

    def _door(
        self, gateway: LiveGateway, tap: TickTap, slices: Sequence[Slice], host: CatalogHost
    ) -> Door:
        node = FleetNode(
            f"{self._order.name}.{self._instance}", _kind(slices), len(slices), host.budget_bytes,
            self._order.cost or _usual_cost(slices),
        )  # fmt: skip
        secret = self._order.secret
        weights = PoolWeights(self._order.host, secret, host, gateway)
        return _NodeDoor(NodePort(gateway, node, secret, host.tables, weights), weights, self._out)


def _kind(slices: Sequence[Slice]) -> str:
    """Return what computes here: nodes with the same kind compute the same tokens."""
    kinds = {f"cpu {chosen_isa()}" if one.gpu is None else one.kind for one in slices}
    return " + ".join(sorted(kinds))


def _usual_cost(slices: Sequence[Slice]) -> float:
    """Return the cost of a machine of which nothing was said, by the kinds of its slices."""
    gpus = {one.gpu.uuid for one in slices if one.gpu is not None}
    return float(sum(one.gpu is None for one in slices) + _GPU_COST * len(gpus))


def node() -> None:
    """Run a node of a cluster, as its agent says on stdin."""
    out = own_stdout()
    try:
        order = msgspec.json.decode(sys.stdin.buffer.read(), type=NodeOrder)
        end_with(order.parent)
        spec = read_spec(order.spec)
        setup_logging(f"node {order.name}", spec.settings.log_level, spec.settings.log_format)
        signals = StartSignals(reloads=False)
        server = _NodeServer(order, spec, signals, out)
    except (msgspec.MsgspecError, CatalogError, ValueError) as error:
        raise CliError(f"this node cannot be started: {error}", 2) from error
    family = socket.AF_INET6 if ":" in order.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        try:
            listener.bind((order.host, 0))
        except OSError as error:
            raise CliError(f"cannot listen on {order.host}: {error.strerror}") from error
        reason = uvloop.run(server.run(listener))
    if reason is not None:
        raise CliError(reason)
