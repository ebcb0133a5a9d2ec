"""Workers that cannot live, a machine that runs out of things: the server waits and says so."""

import asyncio
import contextlib
import http.client
import json
import os
import resource
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from server_process import SPECIALISTS, ServerProcess, wait_until
from soak.filling import Filler
from streams import all_streams


def ask(server: ServerProcess, model: str = "sorter-llama") -> tuple[int, str, str]:
    """Status, text or error, and Retry-After of one request."""
    body = {"model": model, "prompt": "sort: dcba", "max_tokens": 4, "temperature": 0}
    request = urllib.request.Request(
        f"{server.url}/v1/completions", json.dumps(body).encode(),
        {"content-type": "application/json"},
    )  # fmt: skip
    try:
        with urllib.request.urlopen(request, timeout=90) as answer:
            return answer.status, json.load(answer)["choices"][0]["text"], ""
    except urllib.error.HTTPError as error:
        message = json.load(error)["error"]["message"]
        return error.code, message, error.headers.get("retry-after", "")


@contextlib.contextmanager
def murder(server: ServerProcess) -> Generator[list[int]]:
    """Workers are killed as soon as they are up; yields the pids of those that were."""
    killed: list[int] = []
    stop = threading.Event()

    def kill() -> None:
        while not stop.wait(0.02):
            for pid in set(server.worker_pids()) - set(killed):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                killed.append(pid)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield killed
    finally:
        stop.set()
        thread.join()


@pytest.mark.alone
@pytest.mark.parametrize("slices", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_workers_that_die_whenever_they_come_up_do_not_end_the_server(
    tmp_path: Path, slices: int
) -> None:
    with ServerProcess(directory=tmp_path / "pool", slices=slices) as server:
        right = ask(server)
        assert right[0] == 200
        with murder(server) as killed:
            wait_until(lambda: len(killed) >= 3 * slices, 60, "killed again and again")
            wait_until(lambda: ask(server)[0] == 503, 60, "refused, not kept waiting")
            status, reason, retry_after = ask(server)
            assert status == 503
            assert "no slice is up" in reason
            assert "killed by signal 9" in reason
            assert 1 <= int(retry_after) <= 30
            status, text = server.get("/health")
            assert status == 503
            assert "killed by signal 9" in json.loads(text)["slices"]["cpu0"]["trouble"]
            assert server.get("/ready")[0] == 503
            listed = json.loads(server.get("/v1/models")[1])["data"]
            assert len(listed) == len(server.state()["models"]) > 1
        wait_until(lambda: server.get("/health")[0] == 200, 60, "healthy again")
        assert ask(server) == right


def test_requests_that_a_dead_worker_had_are_in_the_log(tmp_path: Path) -> None:
    with ServerProcess(directory=tmp_path / "pool", slices=1) as server:
        [worker] = server.worker_pids()

        async def disturbed() -> None:
            begun = asyncio.Event()
            streams = asyncio.create_task(all_streams(server.url, 4, 200, begun))
            await begun.wait()
            os.kill(worker, signal.SIGKILL)
            await streams

        asyncio.run(disturbed())
        [line] = [one for one in server.logs() if "was lost" in one["message"]]
        assert "killed" in line["message"]
        answered = {one["job"] for one in server.logs() if "output_tokens" in one}
        assert line["jobs"]
        assert set(line["jobs"]) <= answered
        assert all(one in line["message"] for one in line["jobs"])


@contextlib.contextmanager
def few_descriptors(pid: int, most: int) -> Generator[None]:
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (most, before[1]))
    yield
    resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


def test_connections_that_take_all_descriptors_kill_no_worker(tmp_path: Path) -> None:
    with ServerProcess(directory=tmp_path / "pool") as server, contextlib.ExitStack() as sockets:
        pids = server.worker_pids()
        inside = http.client.HTTPConnection("127.0.0.1", server.port)

        def state() -> list[dict[str, object]]:
            inside.request("GET", "/admin/state")
            return json.loads(inside.getresponse().read())["slices"]

        state()
        open_now = len(os.listdir(f"/proc/{server.process.pid}/fd"))
        with few_descriptors(server.process.pid, open_now + 20):
            for _ in range(100):
                idle = sockets.enter_context(socket.socket())
                idle.connect(("127.0.0.1", server.port))
            began_s = time.monotonic()
            while time.monotonic() - began_s < 2.0:
                assert [one["pid"] for one in state()] == pids
                time.sleep(0.1)
            os.kill(pids[0], signal.SIGKILL)

            def back() -> bool:
                return all(one["state"] == "up" and one["pid"] != pids[0] for one in state())

            wait_until(back, 60, "a worker is replaced with what was kept in reserve")
        sockets.close()
        inside.close()
        assert ask(server)[0] == 200


def _namespaces() -> bool:
    probe = ["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    try:
        return subprocess.run(probe, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def free_bytes(directory: Path) -> int:
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize


def _small_filesystem(pool: Path) -> tuple[str, ...]:
    """A command's wrapper: 16 MB for the pool, of a mount namespace of its own."""
    script = 'mount -t tmpfs -o size=16m tmpfs "$0" && exec "$@"'
    return ("unshare", "-rm", "sh", "-c", script, str(pool))


@pytest.fixture(scope="module")
def cramped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerProcess, Path]]:
    """A server with room for few more models, and its pool as this process reaches it."""
    if not _namespaces():
        pytest.skip("needs user and mount namespaces")
    pool = tmp_path_factory.mktemp("cramped") / "pool"
    with ServerProcess(
        "--pool-bytes", "12000000", directory=pool, slices=1, wrapper=_small_filesystem(pool)
    ) as server:
        yield server, Path(f"/proc/{server.process.pid}/root{pool}")


def test_a_load_that_found_shared_memory_full_is_tried_again(
    cramped: tuple[ServerProcess, Path],
) -> None:
    """When the model is asked for, some seconds later. What is in the pool is served meanwhile."""
    server, inside = cramped
    right, other = ask(server), ask(server, "adder-qwen")

    def while_it_is_full() -> None:
        wait_until(lambda: free_bytes(inside) == 0, 60, "it is full")
        entry = {"id": "again", "path": str(SPECIALISTS / "sorter-llama")}
        add = urllib.request.Request(f"{server.url}/admin/models", json.dumps(entry).encode())
        add.add_header("content-type", "application/json")
        urllib.request.urlopen(add, timeout=90).close()
        status, reason, retry_after = ask(server, "again")
        assert status == 503
        assert "larger shared-memory filesystem" in reason
        assert 1 <= int(retry_after) <= 5
        assert ask(server, "adder-qwen") == other

    async def scenario() -> None:
        checks = asyncio.create_task(asyncio.to_thread(while_it_is_full))
        await Filler(inside).fill_until(checks.done)
        await checks

    asyncio.run(scenario())
    wait_until(lambda: ask(server, "again") == right, 60, "it is loaded", poll_s=0.3)


def test_full_shared_memory_is_an_error_and_passes(cramped: tuple[ServerProcess, Path]) -> None:
    server, inside = cramped
    right = ask(server)
    assert right[0] == 200
    filler = inside / "filler"
    with filler.open("wb", buffering=0) as file:

        def short_of_room() -> bool:
            """What the dead worker frees is taken as well, if the server has not done so."""
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(4096))
            for pid in server.worker_pids():
                os.kill(pid, signal.SIGKILL)
            return "No space left" in server.get("/health")[1]

        wait_until(short_of_room, 60, "it says why")
    assert server.get("/health")[0] == 503
    reload = urllib.request.Request(f"{server.url}/admin/models/adder-qwen/reload", method="POST")
    with pytest.raises(urllib.error.HTTPError, match="503") as refused:
        urllib.request.urlopen(reload, timeout=90)
    assert "larger shared-memory filesystem" in refused.value.read().decode()
    filler.unlink()
    wait_until(lambda: server.get("/health")[0] == 200, 60, "it goes on by itself")
    assert ask(server) == right
