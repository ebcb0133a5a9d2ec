"""A request that kills every worker that runs it gets 500; no other request notices more than a
pause. The server is a real one; its workers die as files say (step_faults/)."""

import asyncio
import json
import os
import signal
import urllib.error
import urllib.request
from math import ceil, log2
from pathlib import Path
from typing import Any

import pytest
from injected import during, inject, recorded
from server_process import ServerProcess, wait_until
from streams import all_streams

FAULTS = Path(__file__).parent / "step_faults"
MARK = 7
"""A token that no other prompt here has: that of "!"."""
STREAMS = 10


def ask(server: ServerProcess) -> tuple[int, str]:
    """Status and error of the poisonous request."""
    body = {"model": "sorter-llama", "prompt": "sort: dcba!", "max_tokens": 20}
    request = urllib.request.Request(
        f"{server.url}/v1/completions", json.dumps(body).encode(),
        {"content-type": "application/json"},
    )  # fmt: skip
    try:
        with urllib.request.urlopen(request, timeout=90) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["error"]["message"]


@pytest.mark.parametrize("slices", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_request_that_kills_its_workers_is_found_among_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slices: int
) -> None:
    faults = tmp_path / "faults"
    inject(monkeypatch, FAULTS, faults)
    with recorded(directory=tmp_path, slices=slices) as (server, _):
        undisturbed = asyncio.run(all_streams(server.url, STREAMS, 200))
        (faults / f"kill-{MARK}").touch()
        answers: list[tuple[int, str]] = []
        assert during(server.url, STREAMS, lambda: answers.append(ask(server))) == undisturbed
        [(status, error)] = answers
        assert status == 500
        assert "workers died while they ran this request" in error
        state: dict[str, Any] = server.state()
        assert state["counters"]["poison_requests"] == 1
        assert 4 <= state["counters"]["slice_lost"] <= 4 + ceil(log2(STREAMS + 1))
        assert all(model["state"] == "ready" for model in state["models"])
        wait_until(lambda: len(server.worker_pids()) == slices, 60, "all slices are up again")


def test_workers_that_an_operator_kills_cost_no_request(tmp_path: Path) -> None:
    """Three in a row, as soon as they are up."""
    with ServerProcess(directory=tmp_path / "pool", slices=1) as server:
        undisturbed = asyncio.run(all_streams(server.url, STREAMS, 60))

        async def disturbed() -> list[str]:
            begun = asyncio.Event()
            streams = asyncio.create_task(all_streams(server.url, STREAMS, 60, begun))
            await begun.wait()
            killed: set[int] = set()
            while len(killed) < 3:
                for pid in await asyncio.to_thread(server.worker_pids):
                    if pid not in killed:
                        killed.add(pid)
                        os.kill(pid, signal.SIGKILL)
                await asyncio.sleep(0.01)
            return await streams

        assert asyncio.run(disturbed()) == undisturbed
        counters = server.state()["counters"]
        # One that is killed before it has said that it is up takes no slice along.
        assert 1 <= counters["slice_lost"] <= 3
        assert counters["poison_requests"] == 0
