"""A network that is cut between a front and a node, and what tells it apart from a death."""

from collections.abc import Iterator
from contextlib import ExitStack

import psutil
import pytest
from disturbing import disturbed_streams, undisturbed_streams
from ray_cluster import Front, Machines, kill_group, patiently
from separate_network import NoNamespaces, SeparateNetwork
from server_process import wait_until

from c2cserve.cluster.agent import AgentState

pytestmark = pytest.mark.slow


@pytest.fixture
def network(front: Front) -> Iterator[SeparateNetwork]:
    """A network for a fourth machine, which ends with it."""
    try:
        made = SeparateNetwork().__enter__()
    except NoNamespaces as error:
        pytest.skip(f"no network namespaces: {error}")
    with ExitStack() as stack:
        stack.push(made)
        yield made
    front.wait_nodes(3)


def described(machines: Machines, name: str) -> AgentState:
    return next(one for one in machines.states() if one.name == name)


def only(machines: Machines, front: Front, name: str) -> None:
    """Let all other nodes drain and come back, so that this one has the models' pools alone."""
    others = [one for one in machines.states() if one.name != name]
    for one in others:
        machines.drain(one)
    front.wait_nodes(1)
    undisturbed_streams(front)
    for one in others:
        machines.resume(one)
    front.wait_nodes(len(others) + 1)


def test_a_cut_node_is_told_apart_from_a_dead_one(
    machines: Machines, front: Front, network: SeparateNetwork
) -> None:
    patiently(lambda: network.start_raylet(machines.address))
    front.wait_nodes(4)
    [before] = [one for one in machines.states() if one.host == network.HOST]
    only(machines, front, before.name)
    expected = undisturbed_streams(front)

    def said() -> str:
        return front.state()["nodes"][before.name]

    assert disturbed_streams(front, network.cut) == expected
    wait_until(lambda: "no sign of life" in said(), 30, "the front says what it sees", poll_s=0.1)
    assert psutil.pid_exists(before.pid), "a cut is no reason to kill a node"
    network.mend()
    wait_until(lambda: said() == "up", 60, "the front connects again", poll_s=0.1)
    after = described(machines, before.name)
    assert (after.pid, after.restarts) == (before.pid, before.restarts), "it is the same node"

    kill_group(before.pid)
    wait_until(lambda: described(machines, before.name).restarts == 1, 60, "a death is one")
