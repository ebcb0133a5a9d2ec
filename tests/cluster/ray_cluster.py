"""Three machines on this one: raylets with nodes of their own, and fronts before them."""

import json
import os
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import psutil
import ray
from ray.cluster_utils import Cluster
from server_process import CATALOG, ServerProcess, wait_until

from c2cserve.cluster.agent import NAMESPACE, PREFIX, AgentState
from c2cserve.cluster.membership import COST_LABEL, agents_of, describe

_STORE_BYTES = 80 << 20


def patiently(start: Callable[[], Any]) -> Any:
    """Start something of Ray's, which gives a raylet 30 s: on a busy machine that is no fault.

    What a start in vain has left is killed, or it would slow down the next one."""
    before = set(psutil.Process().children(recursive=True))
    tries = 5
    while True:
        try:
            return start()
        except Exception as error:  # Ray raises no class of its own here
            tries -= 1
            if not tries or "timed out during startup" not in str(error):
                raise
            kill_all(set(psutil.Process().children(recursive=True)) - before)


def _machine(cost: float) -> dict[str, Any]:
    """Return what Ray is told of a machine. 0: nothing is said of its cost."""
    labels = {COST_LABEL: f"{cost:g}"} if cost else {}
    return {"num_cpus": 1, "object_store_memory": _STORE_BYTES, "labels": labels}


def _joined_address() -> str:
    return str(ray.get_runtime_context().gcs_address) if ray.is_initialized() else ""


def _join(address: str) -> None:
    ray.init(address=address, namespace=NAMESPACE, log_to_driver=False)


class Machines:
    """A Ray cluster whose raylets stand for machines. Started by `with`."""

    def __init__(
        self, count: int, *, joined: bool = True, redis: str = "", cost: float = 0.0
    ) -> None:
        """`joined`: this process is a member too, for what asks the agents. `redis`: the address of
        the Redis that the head keeps its state in. `cost`: of the head's machine."""
        os.environ |= {"RAY_memory_monitor_refresh_ms": "0", "RAY_worker_niceness": "0"}
        self._count = count
        self._joined, self._redis, self._cost = joined, redis, cost
        self._cluster: Any = None
        self._orphans: list[int] | None = None
        """The nodes, when there is no head any more to ask."""
        self._left = ""
        """The cluster that this process was a member of before."""

    def __enter__(self) -> Self:
        args = {**_machine(self._cost), "include_dashboard": False}
        if self._redis:
            os.environ["RAY_REDIS_ADDRESS"] = self._redis
        self._cluster = patiently(lambda: Cluster(initialize_head=True, head_node_args=args))
        for _ in range(self._count - 1):
            self.add()
        if self._joined:
            # A process is in one cluster at a time: it leaves that of the session for this one.
            self._left = _joined_address()
            if self._left:
                ray.shutdown()
            _join(self.address)
        return self

    def __exit__(self, *_: object) -> None:
        if not self._joined:
            kill_all(one for node in self._cluster.list_all_nodes() for one in self._under(node))
            self._cluster.head_node.kill_gcs_server(check_alive=False)
            os.environ.pop("RAY_REDIS_ADDRESS", None)
            return
        for pid in self._orphans if self._orphans is not None else self._pids():
            kill_group(pid)
        ray.shutdown()
        self._cluster.shutdown()
        if self._left:
            _join(self._left)

    def _pids(self) -> list[int]:
        return [one.pid for one in self.states() if one.pid]

    @property
    def address(self) -> str:
        return self._cluster.address

    def add(self, cost: float = 0.0, **env: str) -> str:
        """Start another machine. Return how its node's name ends. `env`: more of its
        environment."""
        node = patiently(lambda: self._cluster.add_node(**_machine(cost), env_vars=env))
        return node.node_id[:6]

    def states(self) -> list[AgentState]:
        said = describe(ray, agents_of(ray)).values()
        return sorted(
            (one for one in said if isinstance(one, AgentState)), key=lambda one: one.name
        )

    def agent_pid(self, state: AgentState) -> int:
        """The process of the agent: the parent of its node."""
        return psutil.Process(state.pid).ppid()

    def raylet_of(self, state: AgentState) -> psutil.Process:
        return psutil.Process(self.agent_pid(state)).parent()

    def kill_machine(self, state: AgentState) -> None:
        """Kill a raylet and everything under it at once."""
        raylet = self.raylet_of(state)
        kill_all([raylet, *raylet.children(recursive=True)])

    def stop_nodes(self) -> None:
        """End all nodes and agents: the next front starts them, with its own options."""
        for state in self.states():
            ray.kill(self.agent(state))

    def drain(self, state: AgentState) -> None:
        ray.get(self.agent(state).drain.remote(), timeout=30)

    def resume(self, state: AgentState) -> None:
        ray.get(self.agent(state).resume.remote(), timeout=30)

    def is_head(self, state: AgentState) -> bool:
        return bool(self.raylet_of(state).pid == self._raylet_pid(self._cluster.head_node))

    @staticmethod
    def _raylet_pid(node: Any) -> int:
        [raylet] = node.all_processes["raylet"]
        return raylet.process.pid

    def kill_head_service(self) -> None:
        """Kill the GCS, the head's own service. Ray would end this process for it later: leave the
        cluster before."""
        self._orphans = self._pids()
        ray.shutdown()
        self._cluster.head_node.kill_gcs_server()

    def stop_head_service(self) -> None:
        """Kill the GCS alone, so that it may start again."""
        [service] = self._cluster.head_node.all_processes["gcs_server"]
        kill_all([psutil.Process(service.process.pid)])

    def kill_head(self) -> None:
        """Kill the GCS, and the head's raylet with everything under it, at once."""
        self.stop_head_service()
        kill_all(self._under(self._cluster.head_node))

    def start_head_service(self) -> None:
        """Start the GCS again, at the same address: it finds its state in Redis."""
        self._cluster.head_node.kill_gcs_server(check_alive=False)  # it forgets the dead one
        self._cluster.head_node.start_gcs_server()

    def _under(self, node: Any) -> list[psutil.Process]:
        """Return a machine's raylet and all processes under it."""
        found: list[psutil.Process] = []
        with suppress(psutil.NoSuchProcess):
            raylet = psutil.Process(self._raylet_pid(node))
            found += [raylet, *raylet.children(recursive=True)]
        return found

    def agent(self, state: AgentState) -> Any:
        [name] = [
            one for one in agents_of(ray) if state.name.endswith(one[:6])
        ]  # fmt: skip
        return ray.get_actor(PREFIX + name)


def kill_group(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(os.getpgid(pid), signal.SIGKILL)


def kill_all(processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue


class Redis:
    """A Redis server with an empty database. Started by `with`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        self.address = f"127.0.0.1:{port}"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        port = self.address.rpartition(":")[2]
        self._process = subprocess.Popen(
            ["redis-server", "--port", port, "--bind", "127.0.0.1", "--save", "", "--dir",
             str(self._directory)], stdout=subprocess.DEVNULL,
        )  # fmt: skip
        wait_until(self._answers, 60, "Redis answers")
        return self

    def _answers(self) -> bool:
        host, _, port = self.address.rpartition(":")
        with suppress(OSError), socket.create_connection((host, int(port)), 1.0):
            return True
        return False

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()


class Front(ServerProcess):
    """`c2cserve serve --cluster`, with small nodes."""

    def __init__(
        self, address: str, *args: str, directory: Path, catalog: Path = CATALOG,
        pool: str = "200MiB", log: Path | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            "--cluster", address, "--threads", "1", "--pool-bytes", pool, "--kv-bytes", "32MiB",
            "--text-processes", "1", *args, directory=directory, slices=1, settled=False,
            catalog=catalog, log=log,
        )  # fmt: skip

    def wait_nodes(self, count: int, timeout_s: float = 240) -> None:
        """So many nodes answer, with their slices."""

        def there() -> bool:
            state = self.state()
            up = [one for one in state["slices"] if one["state"] == "up"]
            return list(state["nodes"].values()).count("up") == count == len(up)

        wait_until(there, timeout_s, f"{count} nodes are up", poll_s=0.1)

    def send(self, method: str, path: str, body: dict[str, Any] | None = None) -> int:
        """Send a request with a JSON body. Return the status."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            return error.code

    def busiest(self, machines: Machines, *, headless: bool = False) -> AgentState:
        """The node with most requests of this front. `headless`: not the head's."""
        running = {s["id"].rpartition("/")[0]: s["running"] for s in self.state()["slices"]}
        states = [one for one in machines.states() if not (headless and machines.is_head(one))]
        return max(states, key=lambda one: running.get(one.name, 0))

    def busiest_worker(self) -> int:
        """The process of the slice with most requests."""
        return max(self.state()["slices"], key=lambda one: one["running"])["pid"]
