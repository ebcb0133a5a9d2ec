"""Processes are killed, stopped and told to end, with real signals, under real streams."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import openai
import pytest
from example_counts import few
from server_process import ServerProcess, alive, paused, wait_until
from streams import all_streams, stream_text

STREAMS = few(32, 16)


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of one slice, whose worker is killed and replaced."""
    with ServerProcess(directory=tmp_path_factory.mktemp("single") / "pool", slices=1) as server:
        yield server


@pytest.mark.parametrize(
    ("slices", "limit_s"),
    [(1, 60.0), (2, 60.0), pytest.param(2, 2.0, marks=[pytest.mark.alone, pytest.mark.slow])],
)
def test_killed_worker_loses_no_token(
    tmp_path: Path, request: pytest.FixtureRequest, slices: int, limit_s: float
) -> None:
    """A replacement is up within `limit_s`: the long one is for machines with busy cores."""
    with ExitStack() as stack:
        if slices == 1:
            server: ServerProcess = request.getfixturevalue("single")
        else:
            started = ServerProcess(directory=tmp_path / "pool", slices=slices)
            server = stack.enter_context(started)
        before = server.state()["counters"]
        undisturbed = asyncio.run(all_streams(server.url, STREAMS, 200))

        async def disturbed() -> tuple[list[str], float]:
            victim, begun = server.state()["slices"][0], asyncio.Event()
            streams = asyncio.create_task(all_streams(server.url, STREAMS, 200, begun))
            await begun.wait()
            os.kill(victim["pid"], signal.SIGKILL)
            killed = time.monotonic()

            def back() -> bool:
                now = server.state()["slices"][0]
                return now["state"] == "up" and now["pid"] != victim["pid"]

            while not await asyncio.to_thread(back):
                await asyncio.sleep(0.02)
            back_s = time.monotonic() - killed
            return await streams, back_s

        texts, back_s = asyncio.run(disturbed())
        assert texts == undisturbed
        assert back_s < limit_s
        counters = server.state()["counters"]
        assert counters["slice_lost"] == before["slice_lost"] + 1
        resumed = counters["resumed_requests"] - before["resumed_requests"]
        assert resumed >= STREAMS // 4, "the kill hit nothing in flight"


@pytest.mark.alone
def test_stopped_worker_is_replaced(tmp_path: Path) -> None:
    with ServerProcess(
        "--hang-timeout", "2", directory=tmp_path / "pool", slices=1
    ) as server:  # fmt: skip
        undisturbed = asyncio.run(all_streams(server.url, 8, 120))

        async def disturbed() -> list[str]:
            streams = asyncio.create_task(all_streams(server.url, 8, 120))
            while (await asyncio.to_thread(server.state))["running"] < 8:
                assert not streams.done()
                await asyncio.sleep(0.01)
            os.kill((await asyncio.to_thread(server.worker_pids))[0], signal.SIGSTOP)
            return await streams

        assert asyncio.run(disturbed()) == undisturbed
        assert server.state()["slices"][0]["restarts"] == 1


def test_sigterm_finishes_streams_and_refuses_new_ones(tmp_path: Path) -> None:
    with ServerProcess(directory=tmp_path / "pool", slices=1) as server:

        async def scenario() -> tuple[list[str], int]:
            streams = asyncio.create_task(all_streams(server.url, 8, 400))
            while (await asyncio.to_thread(server.state))["running"] < 8:
                assert not streams.done()
                await asyncio.sleep(0.01)
            # A worker that stands still keeps the drain from ending before the refused request.
            with paused(server.worker_pids()):
                server.signal(signal.SIGTERM)
                await asyncio.to_thread(
                    wait_until, lambda: server.get("/ready")[0] == 503, 60, "it drains"
                )
                refused = 0
                try:
                    await stream_text(server.url, 0, 4)
                except openai.APIStatusError as error:
                    refused = error.status_code
            return await streams, refused

        texts, refused = asyncio.run(scenario())
        assert all(texts)
        assert refused == 503
        assert server.wait(200) == 0
        assert server.leftovers() == []


def test_workers_die_with_the_server_and_the_next_start_cleans_up(tmp_path: Path) -> None:
    pool = tmp_path / "pool"
    with ServerProcess(directory=pool) as first:
        pids = first.worker_pids()
        first.signal(signal.SIGKILL)
        first.wait(60)
        wait_until(lambda: not any(map(alive, pids)), 60, "workers die with their server")
        dead = set(first.leftovers())
        assert dead, "a killed server leaves its segments"
    with ServerProcess(directory=pool, slices=1) as second:
        assert not dead & set(second.leftovers())
    assert second.leftovers() == []


def test_health_follows_the_controller(tmp_path: Path) -> None:
    """On a server of its own: after several deaths a slice's next start is delayed, and /health
    says so."""
    with ServerProcess(directory=tmp_path / "pool", slices=1) as server:
        assert server.get("/health")[0] == 200
        assert server.get("/ready")[0] == 200
        with paused([server.fork_server_pid()]):  # no worker takes its place meanwhile
            os.kill(server.worker_pids()[0], signal.SIGKILL)
            wait_until(lambda: server.get("/ready")[0] == 503, 60, "not ready without a slice")
            assert server.get("/health")[0] == 200
        wait_until(lambda: server.get("/ready")[0] == 200, 60, "ready again")
