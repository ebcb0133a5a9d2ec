"""Who is a member, by a Ray that is played."""

import socket
import time
from dataclasses import asdict, dataclass
from typing import Any

import pytest

from c2cserve.cluster import membership
from c2cserve.cluster.agent import AgentState, digest_of
from c2cserve.cluster.membership import COST_LABEL, Membership, NoCluster, cost_of, join


@dataclass
class PlayedActor:
    state: AgentState | None
    """None: it does not answer."""

    @property
    def describe(self) -> "PlayedActor":
        return self

    def remote(self) -> "PlayedActor":
        return self


class PlayedRay:
    """The part of Ray's interface that membership uses."""

    class exceptions:  # noqa: N801 - a module of Ray's
        class RayError(Exception):
            """Ray's own."""

    def __init__(self) -> None:
        self.alive: dict[str, bool] = {}
        self.actors: dict[str, PlayedActor] = {}
        self.started: list[str] = []

    def nodes(self) -> list[dict[str, Any]]:
        return [
            {"NodeID": one, "Alive": alive, "NodeManagerAddress": "10.0.0.1"}
            for one, alive in self.alive.items()
        ]

    def wait(self, answers: list[PlayedActor], **_: Any) -> tuple[list[PlayedActor], list[Any]]:
        return [one for one in answers if one.state is not None], []

    def get(self, answer: PlayedActor) -> dict[str, Any]:
        assert answer.state is not None
        return asdict(answer.state)


def state(name: str, port: int, spec: bytes = b"{}") -> AgentState:
    return AgentState(name, "10.0.0.1", "up", port, b"secret", 1, 0, digest_of(spec))


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> PlayedRay:
    played = PlayedRay()

    def start(self: Membership, node_id: str, machine: object) -> PlayedActor:
        played.started.append(node_id)
        return played.actors[node_id]

    monkeypatch.setattr(membership.Membership, "_start", start)
    return played


def test_each_machine_gets_one_agent_and_is_a_member_when_it_listens(ray: PlayedRay) -> None:
    ray.alive = {"a": True, "b": True}
    ray.actors = {"a": PlayedActor(state("na", 1000)), "b": PlayedActor(state("nb", 0))}
    there = Membership(ray, b"{}")
    assert {name: one.port for name, one in there.poll().items()} == {"na": 1000}
    ray.actors["b"].state = state("nb", 2000)
    assert {name: one.port for name, one in there.poll().items()} == {"na": 1000, "nb": 2000}
    assert ray.started == ["a", "b"]


def test_an_agent_that_is_busy_keeps_its_node(ray: PlayedRay) -> None:
    ray.alive, ray.actors = {"a": True}, {"a": PlayedActor(state("na", 1000))}
    there = Membership(ray, b"{}")
    before = there.poll()
    ray.actors["a"].state = None
    assert there.poll() == before
    ray.alive["a"] = False
    assert there.poll() == {}


def test_a_node_of_other_options_is_logged_once(
    ray: PlayedRay, caplog: pytest.LogCaptureFixture
) -> None:
    ray.alive, ray.actors = {"a": True}, {"a": PlayedActor(state("na", 1000, b"other"))}
    there = Membership(ray, b"{}")
    there.poll()
    there.poll()
    assert sum("other options" in one.message for one in caplog.records) == 1


def test_a_machines_label_says_what_it_costs() -> None:
    assert cost_of({"Labels": {COST_LABEL: "2.5"}}) == 2.5
    assert cost_of({"Labels": {"ray.io/node-id": "a"}}) == 0.0
    assert cost_of({}) == 0.0


def test_a_label_that_is_no_number_is_said_and_counts_as_none(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert cost_of({"Labels": {COST_LABEL: "cheap"}}) == 0.0
    assert "c2cserve-cost=cheap" in caplog.text


@pytest.mark.parametrize("address", ["127.0.0.1:{port}", "auto"])
def test_an_address_where_nothing_listens_is_said_at_once(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray itself would try for minutes."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]  # bound, so that no other process listens there
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
        began = time.monotonic()
        with pytest.raises(NoCluster, match=f"127.0.0.1:{port}.*[Rr]efused"):
            join(address.format(port=port))
        assert time.monotonic() - began < 5.0


@pytest.mark.parametrize("address", ["127.0.0.1", "head:", "head:port", "[::1]:70000"])
def test_an_address_that_is_none_is_said(address: str) -> None:
    with pytest.raises(NoCluster, match="auto, local or HOST:PORT"):
        join(address)
