"""A log whose reader has stopped, and a log on a full disk: lines are lost, and nothing waits."""

import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from c2cserve.serving.log_output import LogOutput


class Reader:
    """The reading end of a pipe: it reads nothing until it is told to."""

    def __init__(self) -> None:
        self._end, self.fd = os.pipe()
        self.text = b""
        self._thread = threading.Thread(target=self._read, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _read(self) -> None:
        while part := os.read(self._end, 1 << 16):
            self.text += part

    def finish(self) -> list[str]:
        """Close the writing end, and return all lines."""
        os.close(self.fd)
        self._thread.join(30)
        os.close(self._end)
        return self.text.decode().splitlines()


@pytest.fixture
def reader() -> Reader:
    return Reader()


def records(output: LogOutput, count: int) -> None:
    for number in range(count):
        output.emit(logging.makeLogRecord({"msg": f"{number:06d} " + "x" * 200}))


def test_a_reader_that_stops_costs_lines_and_no_time(reader: Reader) -> None:
    count = 30_000  # 6 MB; a pipe and the queue hold less
    output = LogOutput(reader.fd)
    records(output, count)
    lost = output.lost
    assert 0 < lost < count
    reader.start()
    deadline = time.monotonic() + 60
    while reader.text.count(b" x") < count - lost:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    output.flush()
    lines = reader.finish()
    told = [line for line in lines if "were lost" in line]
    assert sum(int(line.split()[0]) for line in told) == output.lost == lost
    numbers = [int(line.split()[0]) for line in lines if "were lost" not in line]
    assert len(numbers) == count - lost
    assert numbers == sorted(set(numbers)), "what was written while lines were lost comes in order"


def test_the_end_waits_for_a_stopped_reader_only_a_moment(reader: Reader) -> None:
    output = LogOutput(reader.fd)
    records(output, 1_000)
    began = time.monotonic()
    output.flush()
    assert time.monotonic() - began < 30
    reader.start()
    output.flush()
    assert len(reader.finish()) == 1_000


def test_a_descriptor_that_does_not_block_is_waited_for(reader: Reader) -> None:
    os.set_blocking(reader.fd, False)
    output = LogOutput(reader.fd)
    records(output, 2_000)
    reader.start()
    output.flush()
    assert len(reader.finish()) == 2_000
    assert output.lost == 0


def test_a_file_has_each_line_at_once(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("wb") as file:
        output = LogOutput(file.fileno())
        for number in range(3):
            output.emit(logging.makeLogRecord({"msg": f"é{number} \ud800"}))
            assert path.read_text().splitlines()[-1] == f"é{number} \\ud800"


@pytest.fixture
def full() -> Iterator[int]:
    with Path("/dev/full").open("wb", buffering=0) as file:
        yield file.fileno()


def test_a_full_disk_and_a_reader_that_has_ended_cost_lines(full: int) -> None:
    for fd in (full, _closed_pipe()):
        output = LogOutput(fd)
        records(output, 10)
        output.flush()
        assert output.lost == 10


def _closed_pipe() -> int:
    reading, writing = os.pipe()
    os.close(reading)
    return writing


def test_lost_lines_are_told_of_when_there_is_room_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_: object) -> int:
        raise OSError(28, "No space left on device")

    path = tmp_path / "log"
    with path.open("wb") as file, closing(LogOutput(file.fileno())) as output:
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", no_room)
            records(output, 3)
        records(output, 2)
    first, *rest = path.read_text().splitlines()
    assert first.startswith("3 lines of the log were lost")
    assert [line.split()[0] for line in rest] == ["000000", "000001"]
