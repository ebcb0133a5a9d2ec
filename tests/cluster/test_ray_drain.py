"""Nodes are drained under streams, on real Ray: two at a time, while another one joins."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from disturbing import disturbed_streams, undisturbed_streams
from ray_cluster import Front, Machines
from server_process import run_cli, wait_until

pytestmark = pytest.mark.slow


def states(machines: Machines) -> dict[str, str]:
    return {one.name: one.state for one in machines.states()}


def copies(machines: Machines) -> dict[str, list[str]]:
    """Return the nodes that have each model."""
    found = dict[str, list[str]]()
    for one in machines.states():
        for model in one.models:
            found.setdefault(model, []).append(one.name)
    return found


def drain(machines: Machines, name: str) -> str:
    """Return what the command says on stderr."""
    done = run_cli("cluster", "drain", name, "--address", machines.address)
    return done.stderr if done.returncode else ""


def most_alone(machines: Machines) -> tuple[str, set[str]]:
    """Return the node with most models that no other one has, and these."""
    found = {one.name: set[str]() for one in machines.states()}
    for model, nodes in copies(machines).items():
        if len(nodes) == 1:
            found[nodes[0]].add(model)
    return max(found.items(), key=lambda one: len(one[1]))


def told(machines: Machines, name: str, state: str) -> Callable[[], bool]:
    return lambda: states(machines)[name] == state


def test_only_copies_two_drains_a_join_and_the_last_node(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with (
        Machines(3) as machines,
        Front(machines.address, directory=tmp_path / "p", log=log, pool="3MiB") as front,
    ):
        front.wait_nodes(3)
        undisturbed = undisturbed_streams(front)

        # A node leaves under load, and with it the only copies of some models.
        [name, only] = most_alone(machines)
        assert only, "each pool holds two of four"
        victim = next(one for one in machines.states() if one.name == name)
        assert disturbed_streams(front, lambda: drain(machines, name)) == undisturbed
        wait_until(told(machines, name, "drained"), 120, "it ends when its requests have")
        # The two pools that are left hold four models, popular ones twice: which, is the policy's.
        assert undisturbed_streams(front) == undisturbed, "the others answer for its models"
        machines.resume(victim)
        front.wait_nodes(3)

        # Two at a time, and a machine joins meanwhile.
        leaving = [one for one in machines.states() if one.name != name]

        def drain_two() -> None:
            with ThreadPoolExecutor(2) as threads:
                assert [*threads.map(drain, [machines] * 2, [one.name for one in leaving])] == [
                    "", "",
                ]  # fmt: skip

        with ThreadPoolExecutor(1) as thread:
            said = thread.submit(disturbed_streams, front, drain_two)
            machines.add()
            assert said.result() == undisturbed
        for one in leaving:
            wait_until(told(machines, one.name, "drained"), 120, "both end")
        front.wait_nodes(2)
        assert front.state()["counters"].get("failed_requests", 0.0) == 0.0

        # The last two, one after the other: only the first is let go.
        first, last = [one for one in machines.states() if one.state == "up"]
        assert not drain(machines, first.name)
        assert "only node that is up" in drain(machines, last.name)
        front.wait_nodes(1)
        assert undisturbed_streams(front) == undisturbed
