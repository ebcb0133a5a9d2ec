"""What an agent is asked for twice, or too late. Its node is played; Ray is not there."""

import signal
import time

import pytest

from c2cserve.cluster.agent import Agent


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
