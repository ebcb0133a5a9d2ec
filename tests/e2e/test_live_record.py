"""A live run's record replays to the same decisions, also when a worker was killed in it."""

import asyncio
import os
import signal
from pathlib import Path

from server_process import ServerProcess, run_cli
from streams import all_streams

from c2cserve.runtime.replay import replay


def test_record_and_replay(tmp_path: Path) -> None:
    record = tmp_path / "record.jsonl"
    with ServerProcess("--record", str(record), directory=tmp_path / "pool") as server:

        async def scenario() -> None:
            begun = asyncio.Event()
            streams = asyncio.create_task(all_streams(server.url, 16, 120, begun))
            await begun.wait()
            os.kill((await asyncio.to_thread(server.worker_pids))[0], signal.SIGKILL)
            await streams
            while not (back := server.state()["slices"][0])["restarts"] or back["state"] != "up":
                await asyncio.sleep(0.05)

        asyncio.run(scenario())
    result = replay(record)
    assert result.equal, [stream.difference for stream in result.streams]
    streams = {stream.stream: stream for stream in result.streams}
    assert {"controller", "cpu0/1", "cpu1/1", "cpu0/2"} <= set(streams)
    # (cpu0 comes back to nothing when cpu1 could take all that it left)
    assert all(streams[name].actions for name in ("controller", "cpu0/1", "cpu1/1"))
    assert sum(stream.actions for stream in streams.values()) > 300
    done = run_cli("replay", str(record))
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_changed_record_is_noticed(tmp_path: Path) -> None:
    record = tmp_path / "record.jsonl"
    with ServerProcess("--record", str(record), directory=tmp_path / "pool", slices=1) as server:
        asyncio.run(all_streams(server.url, 4, 8))
    text = record.read_text()
    assert '"emits":true' in text
    record.write_text(text.replace('"emits":true', '"emits":false', 1))
    assert not replay(record).equal
    assert run_cli("replay", str(record)).returncode == 1
