"""A live run's record replays to the same decisions, also when a worker was killed in it."""

import asyncio
import json
import os
import signal
from pathlib import Path

import httpx
import pytest
from server_process import ServerProcess, run_cli
from streams import all_streams

from c2cserve.runtime.replay import RecordLines, replay
from c2cserve.server.dashboard.record_fold import RecordFold

STATE = "state.json"


def dashboard_state(url: str) -> str:
    """Return the first state that the dashboard's stream sends."""
    with httpx.stream("GET", f"{url}/dashboard/events", timeout=60) as answer:
        return next(line[6:] for line in answer.iter_lines() if line.startswith("data: "))


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
        (directory / STATE).write_text(dashboard_state(server.url))
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


def test_the_dashboard_shows_the_same_of_the_server_and_of_its_record(record: Path) -> None:
    """Each request has the same fate and lengths in both, also those of the killed worker."""
    live = json.loads((record.parent / STATE).read_text())
    fold = RecordFold("record")
    for _, line in RecordLines(record):
        fold.add(line)
    recorded = fold.state()
    assert live["trouble"] == ""
    fates = {(one["id"], one["state"], one["output_tokens"]) for one in live["requests"]}
    assert fates == {(one.id, one.state, one.output_tokens) for one in recorded.requests}
    assert len(fates) >= 16
    assert {one["state"] for one in live["requests"]} <= {"done", "cancelled"}
    assert max(one.placed for one in recorded.requests) > 1, "some were placed again"
    assert [one.restarts for one in recorded.slices if one.id == "cpu0"] == [1]
    assert [one["restarts"] for one in live["slices"] if one["id"] == "cpu0"] == [1]
