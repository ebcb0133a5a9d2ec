"""What an agent is asked for twice, or too late. Its node is played; Ray is not there."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from c2cserve.cluster.agent import Agent, machine_environment, take_machine_priority
from c2cserve.processes.instances import take_instance


class PlayedProcess:
    """A node that runs until it is ended."""

    pid = 1

    def __init__(self) -> None:
        self.signals: list[int] = []
        self.status: int | None = None

    def poll(self) -> int | None:
        return self.status

    def send_signal(self, number: int) -> None:
        self.signals.append(number)

    def wait(self) -> None: ...


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Agent:
    monkeypatch.setattr(Agent, "_supervise", lambda _: time.sleep(0.0))
    made = Agent("a", "10.0.0.1", b"{}")
    made._state = "up"
    return made


def test_a_node_that_is_drained_twice_finishes_its_requests(agent: Agent) -> None:
    agent._process = node = PlayedProcess()  # pyright: ignore[reportAttributeAccessIssue]
    agent.drain()
    agent.drain()
    agent.resume()
    agent.drain()
    assert node.signals == [signal.SIGTERM]
    assert agent.describe()["state"] == "draining"


def test_a_node_that_has_ended_is_drained_without_a_signal(agent: Agent) -> None:
    agent._process = node = PlayedProcess()  # pyright: ignore[reportAttributeAccessIssue]
    node.status = 0
    agent.drain()
    assert not node.signals


def test_a_stop_removes_what_killed_nodes_have_left(
    agent: Agent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node is killed, so it removes nothing itself. Files of a run that lives stay."""
    other = take_instance(tmp_path, "living")
    (tmp_path / "c2cserve.living.model.1").touch()
    own = take_instance(tmp_path, "own")
    for name in ("own.m.1", "own.m.1.ctl", "own.cpu0.1.status", "dead.lock", "dead.m.1"):
        (tmp_path / f"c2cserve.{name}").touch()
    node = PlayedProcess()

    def kill(pid: int, number: int) -> None:
        assert (pid, number) == (node.pid, signal.SIGKILL)
        os.close(own)
        node.status = -number

    monkeypatch.setattr(os, "killpg", kill)
    agent._process = node  # pyright: ignore[reportAttributeAccessIssue]
    agent._spec = msgspec.json.encode({"settings": {"pool_dir": str(tmp_path), "port": 1}})
    agent.stop()
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["c2cserve.living.lock", "c2cserve.living.model.1"]
    os.close(other)


@pytest.fixture
def raylet(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A process in the place of this one's parent, with variables and a niceness of its own."""
    process = subprocess.Popen(
        [sys.executable, "-c", "print(flush=True); input()"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={"OMP_NUM_THREADS": "7", "OTHER": "1"},
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdout.readline()  # it runs, with its own environment
    monkeypatch.setattr(os, "getppid", lambda: process.pid)
    yield process.pid
    process.communicate(b"\n")


def test_a_node_gets_the_raylets_threads_and_gpus_not_those_of_an_actor(
    raylet: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray sets both for its workers: one thread, and no GPU for an actor that asks for none."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("MINE", "2")
    found = machine_environment()
    assert found["OMP_NUM_THREADS"] == "7"
    assert "CUDA_VISIBLE_DEVICES" not in found, "the raylet hides none"
    assert found["MINE"] == "2"
    assert "OTHER" not in found


def test_a_node_gets_the_raylets_niceness(raylet: int, monkeypatch: pytest.MonkeyPatch) -> None:
    os.setpriority(os.PRIO_PROCESS, raylet, os.getpriority(os.PRIO_PROCESS, 0) + 3)
    wanted = os.getpriority(os.PRIO_PROCESS, raylet)
    given: list[int] = []
    monkeypatch.setattr(os, "setpriority", lambda _which, _who, value: given.append(value))
    take_machine_priority()
    assert given == [wanted]
