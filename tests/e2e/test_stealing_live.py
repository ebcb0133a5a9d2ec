"""A slice that comes up empty beside a full one takes requests that wait there without memory."""

import asyncio
import os
import signal
from pathlib import Path

import pytest
from injected import inject, recorded
from seeded_answers import seeded_answers
from server_process import ServerProcess, paused, wait_until

FAULTS = Path(__file__).parent / "step_faults"
REQUESTS, TOKENS = 40, 100
TIGHT = ("--kv-bytes", str(2 << 20))
"""One slab: memory for about eight of these requests at a time."""


async def answers(url: str) -> list[str]:
    return await seeded_answers(
        url, REQUESTS, TOKENS, lambda index: f"sort: {index} " + "dcba" * 65
    )


def state_of(server: ServerProcess, index: int) -> str:
    return server.state()["slices"][index]["state"]


async def answers_with_a_late_slice(server: ServerProcess, slow: Path) -> list[str]:
    """The answers of a server whose second slice comes up when requests wait on the first one. Its
    steps are slow until some of them have been taken over."""
    slow.touch()
    with paused([server.fork_server_pid()]):  # no worker takes the other's place meanwhile
        os.kill(server.state()["slices"][1]["pid"], signal.SIGKILL)
        await asyncio.to_thread(wait_until, lambda: state_of(server, 1) != "up", 60, "it is gone")
        asked = asyncio.create_task(answers(server.url))

        def waiting() -> bool:  # and none is left that the other slice would get at once
            state = server.state()
            come = state["running"] + state["waiting"] >= REQUESTS - 8  # some may have ended
            return come and state["slices"][0]["waiting"] > 0

        await asyncio.to_thread(wait_until, waiting, 60, "requests wait", 0.01)
        first = server.state()["slices"][0]["pid"]
        os.kill(first, signal.SIGSTOP)  # on a busy machine they would end before there is another
    try:
        await asyncio.to_thread(wait_until, lambda: state_of(server, 1) == "up", 50, "it is up")
    finally:
        os.kill(first, signal.SIGCONT)

    def taken() -> bool:
        runs = server.state()["slices"][1]["running"]
        return asked.done() or min(runs, recalled(server)) >= REQUESTS // 8

    await asyncio.to_thread(wait_until, taken, 200, "requests are taken over")
    slow.unlink()
    return await asked


def recalled(server: ServerProcess) -> int:
    return server.state()["counters"]["recalled_requests"]


def served(server: ServerProcess) -> dict[str, int]:
    """Requests that each slice has answered."""
    ended = [one["slice"] for one in server.logs() if one.get("output_tokens") == TOKENS]
    return {name: ended.count(name) for name in ("cpu0", "cpu1")}


def test_an_idle_slice_takes_requests_that_wait_for_memory_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inject(monkeypatch, FAULTS, tmp_path / "faults")
    with recorded(*TIGHT, directory=tmp_path, slices=2) as (server, _):
        undisturbed = asyncio.run(answers(server.url))
        before = served(server)
        slow = tmp_path / "faults" / "slow-20"
        assert asyncio.run(answers_with_a_late_slice(server, slow)) == undisturbed
        assert state_of(server, 1) == "up"
        assert served(server)["cpu1"] - before["cpu1"] >= REQUESTS // 8
        assert recalled(server) >= REQUESTS // 8
        assert all(one["running"] == one["waiting"] == 0 for one in server.state()["slices"])
