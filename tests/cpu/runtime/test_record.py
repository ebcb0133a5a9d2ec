import json
import logging
import multiprocessing
from dataclasses import asdict
from pathlib import Path
from random import Random

import pytest
from cluster_cases import random_world
from slice_cases import SLOS, world_of
from slice_world import SliceTestWorld

from c2cserve.core.events import Draining
from c2cserve.policy.cluster.admission import AdmissionSettings
from c2cserve.runtime.ports import no_record
from c2cserve.runtime.record import Record
from c2cserve.runtime.replay import RecordError, replay


def crowded(seed: int) -> SliceTestWorld:
    random = Random(seed)
    drawn = [
        (
            random.choice("abc"), random.randint(1, 200), random.randint(1, 30), random.random(),
            random.randint(0, 2), random.randint(0, 12), random.randint(1, 40),
            random.choice([None, random.random()]), random.choice(SLOS),
            random.random() < 0.8,
        )
        for _ in range(30)
    ]  # fmt: skip
    return world_of(drawn, seed, random.randint(2, 12), 2, 0.2, 0.05)


def write(path: Path, stream: str, policy: str, arguments: dict, log: list) -> None:
    record = Record(path, stream, policy, arguments)
    for now, events, actions in log:
        record(now, events, actions)
    record.close()


def record_slice(path: Path, seed: int, stream: str = "cpu0/1") -> SliceTestWorld:
    world = crowded(seed)
    world.run()
    write(path, stream, "slice", {"slice": world.slice, "max_in_flight": 2}, world.log)
    return world


@pytest.mark.parametrize("seed", range(5))
def test_a_slices_record_replays_to_the_same_actions(tmp_path: Path, seed: int) -> None:
    world = record_slice(tmp_path / "r", seed)
    result = replay(tmp_path / "r")
    assert result.equal
    assert not result.torn_line
    [stream] = result.streams
    assert (stream.stream, stream.ticks) == ("cpu0/1", len(world.log))
    assert stream.actions == sum(len(actions) for _, _, actions in world.log) > 50


@pytest.mark.parametrize("seed", range(25))
def test_a_controllers_record_replays_to_the_same_actions(tmp_path: Path, seed: int) -> None:
    world = random_world(seed)
    world.run()
    write(tmp_path / "r", "controller", "cluster", {"settings": world.settings}, world.log)
    result = replay(tmp_path / "r")
    assert result.equal, result.streams[0].difference
    assert result.streams[0].ticks == len(world.log)


def test_streams_are_replayed_apart(tmp_path: Path) -> None:
    world = random_world(1)
    world.run()
    write(tmp_path / "r", "controller", "cluster", {"settings": world.settings}, world.log)
    record_slice(tmp_path / "r", 1, "cpu0/1")
    record_slice(tmp_path / "r", 2, "cpu0/2")
    lines = (tmp_path / "r").read_bytes().splitlines(keepends=True)
    streams = [
        [x for x in lines if json.loads(x)["stream"] == s]
        for s in ("controller", "cpu0/1", "cpu0/2")
    ]
    mixed = []
    random = Random(0)
    while any(streams):
        mixed.append(random.choice([s for s in streams if s]).pop(0))
    (tmp_path / "mixed").write_bytes(b"".join(mixed))
    result = replay(tmp_path / "mixed")
    assert result.equal
    assert {s.stream for s in result.streams} == {"controller", "cpu0/1", "cpu0/2"}


def test_the_first_different_action_is_reported(tmp_path: Path) -> None:
    record_slice(tmp_path / "r", 0)
    lines = [json.loads(line) for line in (tmp_path / "r").read_text().splitlines()]
    at = [i for i, line in enumerate(lines) if line.get("actions")][10]
    expected = lines[at]["actions"]
    lines[at]["actions"] = [["Drop", {"request_id": "nobody", "requeued": False}]]
    (tmp_path / "r").write_text(
        "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    )
    result = replay(tmp_path / "r")
    assert not result.equal
    difference = result.streams[0].difference
    assert difference is not None
    assert difference.tick == at
    assert difference.now == lines[at]["now"]
    assert difference.recorded == lines[at]["actions"]
    assert difference.replayed == expected
    assert asdict(result)


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    record_slice(tmp_path / "r", 0)
    whole = (tmp_path / "r").read_bytes()
    (tmp_path / "r").write_bytes(whole[:-20])
    result = replay(tmp_path / "r")
    assert result.equal
    assert result.torn_line
    assert result.streams[0].ticks == whole.count(b"\n") - 2


def test_a_line_torn_by_a_killed_worker_hides_no_other(tmp_path: Path) -> None:
    record_slice(tmp_path / "r", 0, "cpu0/1")
    (tmp_path / "r").write_bytes((tmp_path / "r").read_bytes()[:-20])
    world = record_slice(tmp_path / "r", 1, "cpu0/2")
    result = replay(tmp_path / "r")
    assert result.equal
    assert result.torn_line
    assert result.streams[1].ticks == len(world.log)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "hello\n",
        '{"stream":"s","now":1.0,"events":[],"actions":[]}\n',
        '{"stream":"s","v":99,"policy":"slice","arguments":{}}\n',
        '{"stream":"s","v":1,"policy":"oracle","arguments":{}}\n',
        '{"stream":"s","v":1,"policy":"slice","arguments":{}}\n',
        '{"stream":"s","v":1,"policy":"cluster","arguments":{"settings":{}}}\n'
        '{"stream":"s","now":1.0,"events":[["Boo",{}]],"actions":[]}\n',
    ],
)
def test_what_is_no_record_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "r").write_text(text)
    with pytest.raises(RecordError):
        replay(tmp_path / "r")


def _write_many(path: Path, stream: str) -> None:
    arguments = {"settings": AdmissionSettings()}
    record = Record(path, stream, "cluster", arguments)
    for i in range(500):
        record(float(i), [Draining()] * (i % 50), [])


def test_processes_share_a_file_without_mixing_lines(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    writers = [
        context.Process(target=_write_many, args=(tmp_path / "r", f"s{i}")) for i in range(3)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
        assert writer.exitcode == 0
    lines = [json.loads(line) for line in (tmp_path / "r").read_text().splitlines()]
    for i in range(3):
        own = [line for line in lines if line["stream"] == f"s{i}"]
        assert [line.get("now") for line in own] == [None, *map(float, range(500))]


def test_a_full_disk_ends_the_record_and_not_the_server(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        record = Record(Path("/dev/full"), "s", "cluster", {})
        record(1.0, [Draining()], [])
    assert [r.getMessage() for r in caplog.records] == [
        "/dev/full: the record of s ends: No space left on device"
    ]


def test_nothing_is_written_without_a_record() -> None:
    assert no_record(1.0, [Draining()], []) is None
