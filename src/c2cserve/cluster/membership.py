"""Who is in the cluster, by Ray: a process of its own beside each front.

A process that Ray's head no longer answers ends itself after a while
(`RAY_gcs_rpc_server_reconnect_timeout_s`). So fronts do not talk to Ray: this process does. It says
on its stdout which nodes there are, a JSON line twice a second. When it is silent or ends, a front
goes on with the nodes it has. After its end, the front starts another one.
"""

import importlib
import logging
import os
import socket
import time
from collections.abc import Mapping
from typing import Any, BinaryIO

import msgspec

from c2cserve.cluster.agent import NAMESPACE, PREFIX, Agent, AgentState, digest_of
from c2cserve.cluster.link import NodeAddress

log = logging.getLogger(__name__)

AUTO, LOCAL = "auto", "local"
COST_LABEL = "c2cserve-cost"
_POLL_S = 0.5
_ANSWER_S = 5.0
_STOP_S = 8.0
"""How long nodes may take to end. A front that ends kills this process after 10 s."""
_REACHED_S = 5.0
"""A head that takes no connection within this time is not there."""
_LOCAL_STORE_BYTES = 80 << 20
"""Ray's object store on `local`: nothing is put there, and it lies where the pool lies."""


class MemberOrder(msgspec.Struct):
    """What a front tells this process, on its stdin."""

    address: str
    parent: int
    """The process id of the front."""
    spec: msgspec.Raw


class MemberLine(msgspec.Struct):
    """Node's name -> where it listens."""

    members: dict[str, NodeAddress]


class NoCluster(Exception):
    """Ray is not there, or there is no cluster at the address."""


def join(address: str) -> Any:
    """Connect this process to the cluster. Return the module `ray`, which is imported here alone:
    the extra `cluster` brings it. Raises NoCluster."""
    named = os.environ.get("RAY_ADDRESS", AUTO) if address == AUTO else address
    if named not in {AUTO, LOCAL}:
        _check_reached(named)
    try:
        ray = importlib.import_module("ray")
    except ImportError as error:
        raise NoCluster("Ray is not installed: pip install '.[cluster]' in the checkout") from error
    if address == LOCAL:
        # Ray's own killer of processes would count the pool as its workers' memory.
        os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")
        more: dict[str, Any] = {
            "include_dashboard": False, "object_store_memory": _LOCAL_STORE_BYTES,
        }  # fmt: skip
    else:
        more = {"address": address}
    try:
        ray.init(namespace=NAMESPACE, log_to_driver=False, logging_level="warning", **more)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise NoCluster(f"no Ray cluster at {address!r}: {error}") from error
    return ray


def _check_reached(address: str) -> None:
    """Raise NoCluster if nothing listens at the address. Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise NoCluster(f"{address!r} is no address of a cluster: auto, local or HOST:PORT")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _REACHED_S).close()
    except OSError as error:
        raise NoCluster(f"no Ray cluster at {address!r}: {error.strerror or error}") from error


def agents_of(ray: Any) -> dict[str, Any]:
    """Return the handles of all agents, by Ray's id of their node."""
    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    names = [one for one in ray.util.list_named_actors() if one.startswith(PREFIX)]
    return {
        name.removeprefix(PREFIX): ray.get_actor(name) for name in names
        if name.removeprefix(PREFIX) in alive
    }  # fmt: skip


def describe(ray: Any, agents: Mapping[str, Any]) -> dict[str, AgentState | str]:
    """Return what each agent says, or why it says nothing."""
    answers = {node: agent.describe.remote() for node, agent in agents.items()}
    ready, _ = ray.wait(list(answers.values()), num_returns=len(answers), timeout=_ANSWER_S)
    found: dict[str, AgentState | str] = {}
    for node, answer in answers.items():
        if answer not in ready:
            found[node] = f"not within {_ANSWER_S:g} s"
            continue
        try:
            found[node] = msgspec.convert(ray.get(answer), AgentState)
        except ray.exceptions.RayError as error:
            found[node] = f"{type(error).__name__}"
    return found


def cost_of(machine: Mapping[str, Any]) -> float:
    """Return what its label says that an hour of the machine costs; 0: nothing."""
    said = machine.get("Labels", {}).get(COST_LABEL, "0")
    try:
        return max(0.0, float(said))
    except ValueError:
        log.warning("the label %s=%s of a machine is no number", COST_LABEL, said)
        return 0.0


def stop_agents(ray: Any, agents: Mapping[str, Any]) -> dict[str, str]:
    """End all nodes and their agents. Return which agents did not say that theirs has ended, and
    why: by Ray's id of their node. Their agents end all the same, and the nodes with them."""
    asked = {node: agent.stop.remote() for node, agent in agents.items()}
    ray.wait(list(asked.values()), num_returns=len(asked), timeout=_STOP_S)
    failed: dict[str, str] = {}
    for node, answer in asked.items():
        try:
            ray.get(answer, timeout=0)
        except ray.exceptions.RayError as error:
            failed[node] = type(error).__name__
        ray.kill(agents[node])
    return failed


class Membership:
    """Starts an agent on each machine, and tells which nodes are up."""

    def __init__(self, ray: Any, spec: bytes) -> None:
        self._ray = ray
        self._spec = spec
        self._agents: dict[str, Any] = {}
        self._addresses: dict[str, tuple[str, NodeAddress]] = {}
        """Ray's id of a node -> its name and address, as its agent said last."""
        self._warned = False

    def run(self, out: BinaryIO) -> None:
        """Say on `out` who is a member, again and again until the process is ended. What has not
        changed is said too: else the front would take an answer of long ago for one of now."""
        while True:
            out.write(msgspec.json.encode(MemberLine(self.poll())) + b"\n")
            time.sleep(_POLL_S)

    def poll(self) -> dict[str, NodeAddress]:
        """Return the nodes that are up. Their machines are members for Ray."""
        alive = {node["NodeID"]: node for node in self._ray.nodes() if node["Alive"]}
        self._agents = {one: self._agents[one] for one in self._agents if one in alive}
        for node_id in sorted(alive.keys() - self._agents.keys()):
            self._agents[node_id] = self._start(node_id, alive[node_id])
        for node, state in describe(self._ray, self._agents).items():
            if isinstance(state, str):
                log.info("the agent on %s does not answer: %s", node[:8], state)
                continue
            address = NodeAddress(state.host, state.port, state.secret)
            self._addresses[node] = state.name, address
            self._compare(state)
        # An agent that does not answer may be busy, or start again: its node is where it was.
        self._addresses = {one: self._addresses[one] for one in self._addresses if one in alive}
        return {name: address for name, address in self._addresses.values() if address.port}

    def _start(self, node_id: str, machine: Mapping[str, Any]) -> Any:
        """Return the machine's agent; start it if there is none. It is bound to its machine, and
        outlives this front. `machine`: what Ray says of it."""
        host = machine["NodeManagerAddress"]
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        bound = strategies.NodeAffinitySchedulingStrategy(node_id, soft=False)
        return self._ray.remote(Agent).options(
            name=PREFIX + node_id, namespace=NAMESPACE, lifetime="detached", get_if_exists=True,
            num_cpus=0, max_restarts=-1, max_concurrency=8, scheduling_strategy=bound,
        ).remote(f"{host}-{node_id[:6]}", host, self._spec, cost_of(machine))  # fmt: skip

    def _compare(self, state: AgentState) -> None:
        if state.spec != digest_of(self._spec) and not self._warned:
            self._warned = True
            log.warning(
                "node %s was started with other options or another catalogue than this front: "
                "`c2cserve cluster stop` ends the nodes, so that the next front starts them anew",
                state.name,
            )
