"""A live run's record replays to the same decisions, also when a worker was killed in it."""

import asyncio
import os
import signal
from pathlib import Path

import pytest
from server_process import ServerProcess, run_cli
from streams import all_streams

from c2cserve.runtime.replay import replay


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a server that has ended, and that lost a worker under streams."""
    directory = tmp_path_factory.mktemp("live-record")
    record = directory / "record.jsonl"
    with ServerProcess("--record", str(record), directory=directory / "pool") as server:

        async def scenario() -> None:
            begun = asyncio.Event()
            streams = asyncio.create_task(all_streams(server.url, 16, 120, begun))
            await begun.wait()
            os.kill((await asyncio.to_thread(server.worker_pids))[0], signal.SIGKILL)
            await streams
            while not (back := server.state()["slices"][0])["restarts"] or back["state"] != "up":
                await asyncio.sleep(0.05)

        asyncio.run(scenario())
    return record


def test_record_and_replay(record: Path) -> None:
    result = replay(record)
    assert result.equal, [stream.difference for stream in result.streams]
    streams = {stream.stream: stream for stream in result.streams}
    assert {"controller", "cpu0/1", "cpu1/1", "cpu0/2"} <= set(streams)
    # (cpu0 comes back to nothing when cpu1 could take all that it left)
    assert all(streams[name].actions for name in ("controller", "cpu0/1", "cpu1/1"))
    assert sum(stream.actions for stream in streams.values()) > 300
    done = run_cli("replay", str(record))
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_changed_record_is_noticed(record: Path, tmp_path: Path) -> None:
    text, changed = record.read_text(), tmp_path / "changed.jsonl"
    assert '"emits":true' in text
    changed.write_text(text.replace('"emits":true', '"emits":false', 1))
    assert not replay(changed).equal
    assert run_cli("replay", str(changed)).returncode == 1
