"""Nodes, agents, machines and fronts die under streams, on a real Ray cluster."""

import asyncio
import os
import signal
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import openai
import pytest
from disturbing import TOKENS, disturbed_streams, undisturbed_streams
from ray_cluster import Front, Machines, kill_group
from server_process import SPECIALISTS, alive, run_cli, wait_until
from streams import stream_text

from c2cserve.cluster.agent import AgentState


@pytest.fixture(scope="session")
def undisturbed(front: Front) -> list[str]:
    """What the streams say while nothing happens."""
    return undisturbed_streams(front)


def lost(front: Front) -> float:
    return front.state()["counters"].get("nodes_lost", 0.0)


def test_a_killed_node_loses_no_token(
    machines: Machines, front: Front, undisturbed: list[str]
) -> None:
    """A fast machine may be done with its streams before the node dies: then none is resumed."""
    before = lost(front)
    assert disturbed_streams(front, lambda: kill_group(front.busiest(machines).pid)) == undisturbed
    wait_until(lambda: lost(front) == before + 1, 30, "the front notices")
    front.wait_nodes(3)


def test_a_killed_agent_takes_its_node_along_and_loses_no_token(
    machines: Machines, front: Front, undisturbed: list[str]
) -> None:
    victims: list[AgentState] = []

    def kill() -> None:
        victims.append(front.busiest(machines))
        os.kill(machines.agent_pid(victims[0]), signal.SIGKILL)

    assert disturbed_streams(front, kill) == undisturbed
    wait_until(lambda: not alive(victims[0].pid), 30, "the node ends with its agent")
    front.wait_nodes(3)


@pytest.mark.slow
def test_a_stopped_node_is_fenced(machines: Machines, front: Front, undisturbed: list[str]) -> None:
    victims: list[AgentState] = []

    def stop() -> None:
        victims.append(front.busiest(machines))
        os.killpg(victims[0].pid, signal.SIGSTOP)

    assert disturbed_streams(front, stop) == undisturbed
    wait_until(lambda: not alive(victims[0].pid), 60, "its agent kills it")
    front.wait_nodes(3)


def test_a_model_is_added_and_removed_while_others_are_served(front: Front) -> None:
    entry = {"id": "another", "path": str(SPECIALISTS / "sorter-llama"), "pinned": True}
    assert front.send("POST", "/admin/models", entry) == 201
    stream = partial(openai.OpenAI(base_url=f"{front.url}/v1", api_key="none").completions.create)
    said = [
        stream(model=name, prompt="sort: dcba", max_tokens=8, temperature=0).choices[0].text
        for name in ("another", "sorter-llama")
    ]
    assert said[0] == said[1] != ""
    assert front.state()["counters"].get("failed_fetches", 0.0) == 0.0
    assert front.send("DELETE", "/admin/models/another") in (200, 204)
    assert front.send("DELETE", "/admin/models/another") == 404


def test_a_drained_node_finishes_its_requests(
    machines: Machines, front: Front, undisturbed: list[str]
) -> None:
    victims: list[AgentState] = []

    def drain() -> None:
        victims.append(front.busiest(machines))
        done = run_cli("cluster", "drain", victims[0].name, "--address", machines.address)
        assert done.returncode == 0, done.stderr

    assert disturbed_streams(front, drain) == undisturbed
    [name] = [one.name for one in victims]
    wait_until(
        lambda: next(one for one in machines.states() if one.name == name).state == "drained",
        60, "it ends when its requests have",
    )  # fmt: skip
    shown = run_cli("cluster", "status", "--address", machines.address)
    assert "drained" in shown.stdout
    assert run_cli("cluster", "resume", name, "--address", machines.address).returncode == 0
    front.wait_nodes(3)


async def cut_off(front: Front, whole: str) -> None:
    """Kill a front under a stream, which may have been sent as a whole before."""
    begun = asyncio.Event()
    stream = asyncio.create_task(stream_text(front.url, 0, TOKENS, begun))
    await begun.wait()
    front.signal(signal.SIGKILL)
    with suppress(openai.APIError):
        assert await stream == whole


def test_a_killed_front_leaves_the_others_streams_alone(
    machines: Machines, front: Front, undisturbed: list[str], tmp_path: Path
) -> None:
    with Front(machines.address, directory=front.directory, log=tmp_path / "log") as other:
        other.wait_nodes(3)

        def cut() -> None:
            asyncio.run(cut_off(other, undisturbed[0]))

        assert disturbed_streams(front, cut) == undisturbed
        # A retry, at another front.
        assert asyncio.run(stream_text(front.url, 0, TOKENS)) == undisturbed[0]
    wait_until(lambda: front.state()["running"] == 0, 30, "nodes drop what a dead front asked")


@pytest.mark.slow
def test_a_dead_machine_loses_no_token(
    machines: Machines, front: Front, undisturbed: list[str]
) -> None:
    """The raylet and everything under it are killed at once."""

    def kill() -> None:
        machines.kill_machine(front.busiest(machines, headless=True))

    assert disturbed_streams(front, kill) == undisturbed
    front.wait_nodes(2)


@pytest.mark.slow
def test_serving_goes_on_without_the_head(
    machines: Machines, front: Front, undisturbed: list[str]
) -> None:
    """For as long as raylets wait for it, 60 s by default. The front says so. The last test: there
    is no cluster after it."""
    machines.kill_head_service()
    killed_s = time.monotonic()
    while time.monotonic() - killed_s < 40.0:
        assert undisturbed_streams(front) == undisturbed
    assert front.state()["members_age_s"] > 10.0
    assert "up" in front.state()["nodes"].values()
    said = front.log.read_text()
    assert "head has not answered" in said or "Ray does not answer" in said
