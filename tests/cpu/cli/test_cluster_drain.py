"""`c2cserve cluster drain`, over agents that are played."""

from typing import Any

import pytest
from typer.testing import CliRunner

from c2cserve.cli import cluster
from c2cserve.cluster.agent import AgentState
from c2cserve.terminal.output import CliError


class _Agent:
    def __init__(self) -> None:
        self.asked: list[str] = []
        self.drain, self.resume = _Method(self.asked, "drain"), _Method(self.asked, "resume")


class _Method:
    def __init__(self, asked: list[str], name: str) -> None:
        self._asked, self._name = asked, name

    def remote(self) -> None:
        self._asked.append(self._name)


class _Ray:
    def get(self, said: None, timeout: float) -> None: ...


def ask(
    monkeypatch: pytest.MonkeyPatch, states: dict[str, str], *words: str
) -> tuple[list[str], str]:
    """Return what the first node was asked for, and the error."""
    agents: dict[str, Any] = {
        name: (_Agent(), AgentState(name, "host", state, 1, b"", 1, 0, ""))
        for name, state in states.items()
    }
    monkeypatch.setattr(cluster, "_found", lambda _: (_Ray(), agents))
    done = CliRunner().invoke(cluster.app, list(words))
    assert done.exception is None or isinstance(done.exception, CliError)
    return agents["n-1"][0].asked, str(done.exception or "")


def test_a_node_beside_another_one_is_drained(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask(monkeypatch, {"n-1": "up", "n-2": "up"}, "drain", "n-1") == (["drain"], "")


@pytest.mark.parametrize("other", ["draining", "drained", "starting", "failing"])
def test_the_only_node_that_is_up_is_not_drained(
    monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    asked, error = ask(monkeypatch, {"n-1": "up", "n-2": other}, "drain", "n-1")
    assert not asked
    assert "n-1 is the only node that is up" in error
    assert "cluster stop" in error


def test_to_drain_again_and_to_resume_are_always_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask(monkeypatch, {"n-1": "draining"}, "drain", "n-1") == (["drain"], "")
    assert ask(monkeypatch, {"n-1": "drained"}, "resume", "n-1") == (["resume"], "")
