"""The agent of a machine: a Ray actor that keeps the machine's node running.

    raylet ── agent (a Ray worker) ── node: server, its workers, text processes

Ray starts the agent again when it dies. A node never outlives its agent: the kernel kills the
server with the agent, and the workers with the server. So there is never a second node beside one
that was left behind. A node that hangs is killed with its whole process group.
"""

import asyncio
import hashlib
import logging
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from c2cserve.cluster import messages as msg
from c2cserve.cluster.link import NodeAddress, NodeLink, connect
from c2cserve.core.backoff import back_off_s
from c2cserve.core.fleet import FleetNode
from c2cserve.core.request import Delta
from c2cserve.processes.instances import remove_dead_runs
from c2cserve.runtime.gateway import Snapshot

log = logging.getLogger(__name__)

NAMESPACE = "c2cserve"
PREFIX = "c2cserve-agent-"
_HANG_S = 10.0
"""A node that is silent for longer is killed and replaced. Fronts have left it long before."""
_START_S = 300.0
_STEADY_S = 60.0
"""A node that has run for so long has not failed at its start."""
_RETRY_MOST_S = 30.0
_OF_RAY = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
"""Variables that Ray sets for its workers, by what an actor asked for. A node takes the machine's
own, as the raylet got them."""


class NodeOrder(msgspec.Struct):
    """What an agent tells the node that it starts, on its stdin."""

    name: str
    host: str
    secret: bytes
    parent: int
    """The process id of the agent."""
    spec: msgspec.Raw
    cost: float = 0.0
    """What an hour of the machine costs; 0: nothing was said."""


class _Settings(msgspec.Struct):
    pool_dir: str


class _Spec(msgspec.Struct):
    """What an agent reads of the specification that it hands on."""

    settings: _Settings


class Announcement(msgspec.Struct):
    """What a node that listens says on its stdout."""

    port: int
    id: str


@dataclass(frozen=True, slots=True)
class AgentState:
    """What an agent says of its node."""

    name: str
    host: str
    state: str
    """`starting`, `up`, `draining`, `drained`, `failing`, `stopped`."""
    port: int
    secret: bytes
    pid: int
    restarts: int
    spec: str
    """A digest of its specification."""
    reason: str = ""
    """Why the last node ended."""
    requests: int = 0
    models: tuple[str, ...] = ()
    """Models in its pool."""
    pool_used_bytes: int = 0
    pool_budget_bytes: int = 0


def digest_of(spec: bytes) -> str:
    return hashlib.blake2b(spec, digest_size=8).hexdigest()


class Agent:
    """Methods are called by Ray, on threads of its own."""

    def __init__(self, name: str, host: str, spec: bytes, cost: float = 0.0) -> None:
        self._name = name
        self._cost = cost
        self._host = host
        self._spec = spec
        self._secret = secrets.token_bytes(32)
        self._process: subprocess.Popen[bytes] | None = None
        self._state, self._reason = "starting", ""
        self._port = self._restarts = 0
        self._wanted = True
        self._seen: Snapshot | None = None
        self._changed = threading.Event()
        # The kernel ends the node with the thread that started it, which lives as long as this.
        threading.Thread(target=self._supervise, name="node", daemon=True).start()

    # ---- calls of Ray ---------------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        seen, process = self._seen, self._process
        return asdict(AgentState(
            self._name, self._host, self._state, self._port, self._secret,
            0 if process is None else process.pid, self._restarts, digest_of(self._spec),
            self._reason,
            0 if seen is None else seen.running + seen.waiting,
            () if seen is None else tuple(one.id for one in seen.models if one.loaded_bytes),
            0 if seen is None else seen.pool_used_bytes,
            0 if seen is None else seen.pool_budget_bytes,
        ))  # fmt: skip

    def drain(self) -> None:
        """Finish the node's requests and end it. `resume` starts it again.

        A second signal would cut the node's requests, so a node that drains gets none."""
        self._wanted = False
        running = self._process is not None and self._process.poll() is None
        if self._process is not None and running and self._state != "draining":
            self._state = "draining"
            self._process.send_signal(signal.SIGTERM)

    def resume(self) -> None:
        self._wanted = True
        self._changed.set()

    def stop(self) -> None:
        """End the node at once, and remove what it has left in its pool's directory. So goes what
        nodes before it have left; what lives there keeps its files."""
        self._wanted = False
        self._kill()
        directory = Path(msgspec.json.decode(self._spec, type=_Spec).settings.pool_dir)
        for dead in remove_dead_runs(directory):
            log.info("removed what the node %s left in shared memory", dead)

    # ---- the node -------------------------------------------------------------------------------

    def _kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _supervise(self) -> None:
        take_machine_priority()
        failures = 0
        while True:
            if not self._wanted:
                self._state = "drained"
                self._changed.wait()
                self._changed.clear()
                continue
            began_s = time.monotonic()
            try:
                self._reason = self._run_node()
            except OSError as error:
                self._reason = f"cannot be started: {error}"
            self._kill()
            self._port, self._seen = 0, None
            if not self._wanted:
                continue
            failures = 0 if time.monotonic() - began_s > _STEADY_S else failures + 1
            log.error("the node of this machine has ended: %s", self._reason)
            self._state, self._restarts = "failing", self._restarts + 1
            self._changed.wait(back_off_s(failures - 1, 0.1, _RETRY_MOST_S) if failures else 0.0)

    def _run_node(self) -> str:
        """Run a node until it ends or hangs. Return why it is over. Raises OSError."""
        self._state = "starting"
        process = self._process = subprocess.Popen(
            [sys.executable, "-m", "c2cserve.cli.main", "node"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
            env=machine_environment(),
        )  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        order = NodeOrder(
            self._name, self._host, self._secret, os.getpid(), msgspec.Raw(self._spec), self._cost
        )
        with process.stdin as stdin:
            stdin.write(msgspec.json.encode(order))
        line = process.stdout.readline()
        if not line:
            return f"it ended at its start, with status {process.wait()}: see its log"
        self._port = msgspec.json.decode(line, type=Announcement).port
        if self._wanted:
            self._state = "up"
        return asyncio.run(self._watch(process))

    async def _watch(self, process: subprocess.Popen[bytes]) -> str:
        """Watch the node as fronts do, and its process."""
        watcher = _Watcher(self._note)
        address = NodeAddress(self._host, self._port, self._secret)
        make = partial(NodeLink, address, watcher, _HANG_S)
        try:
            link = await connect(address, make, _HANG_S)
        except (OSError, TimeoutError) as error:
            return f"it cannot be reached: {error}"
        while process.poll() is None:
            if watcher.lost:
                # A server that drains closes its port before it ends.
                await asyncio.sleep(2.0)
                return watcher.lost if process.poll() is None else _status(process)
            await asyncio.sleep(0.05)
        link.end("the node has ended")
        return _status(process)

    def _note(self, state: Snapshot) -> None:
        self._seen = state


def _status(process: subprocess.Popen[bytes]) -> str:
    return f"it ended with status {process.wait()}"


class _Watcher:
    """Listens to a node for its agent (`cluster.link.LinkListener`)."""

    def __init__(self, note: Any) -> None:
        self._note = note
        self.lost = ""

    def node_up(self, link: NodeLink, node: FleetNode) -> None: ...

    def node_reported(self, link: NodeLink, state: Snapshot) -> None:
        self._note(state)

    def output(self, link: NodeLink, delta: Delta) -> None: ...

    def declined(self, link: NodeLink, decline: msg.Decline) -> None: ...

    def key_used(self, use: msg.KeyUse) -> None: ...

    def catalogue_changed(self, changes: Mapping[str, msg.ModelChange]) -> None: ...

    def change_applied(self, link: NodeLink, applied: msg.Applied) -> None: ...

    def node_lost(self, link: NodeLink, reason: str) -> None:
        self.lost = reason


def take_machine_priority() -> None:
    """Give this thread, and what it starts, the raylet's niceness. Ray starts its workers with 15:
    beside any other process, a node would starve."""
    wanted = os.getpriority(os.PRIO_PROCESS, os.getppid())
    try:
        os.setpriority(os.PRIO_PROCESS, 0, wanted)
    except PermissionError:
        log.warning(
            "this node runs with the niceness of Ray's workers, %d: set RAY_worker_niceness=0 "
            "where `ray start` runs", os.getpriority(os.PRIO_PROCESS, 0),
        )  # fmt: skip


def machine_environment() -> dict[str, str]:
    """Return the environment for a node: this process's, with the raylet's own values of what Ray
    changes for its workers. A worker's parent is its raylet."""
    own = dict(os.environ)
    try:
        lines = Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0")
    except OSError:
        return own
    raylet = dict(line.decode(errors="replace").split("=", 1) for line in lines if b"=" in line)
    for name in _OF_RAY:
        own.pop(name, None)
        if name in raylet:
            own[name] = raylet[name]
    return own
