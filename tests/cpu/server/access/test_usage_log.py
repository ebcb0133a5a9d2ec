"""The usage log: every line once, and a bad disk costs lines and nothing else."""

import logging
import os
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest

from c2cserve.server.access.usage_log import UsageLine, UsageLog, sum_lines


def line(number: int, key: str = "a") -> UsageLine:
    return UsageLine(
        datetime.now(UTC), f"r{number}", key, "tenant", "org/m", 2, 10, 4, 3, {"stop": 2}
    )


def ids(path: Path) -> list[str]:
    return [msgspec.json.decode(text)["request_id"] for text in path.read_bytes().splitlines()]


def wait_until(check: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 10
    while not check():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def test_lines_in_their_order(tmp_path: Path) -> None:
    path = tmp_path / "usage.jsonl"
    for begin in (0, 1000):
        log = UsageLog(path)
        for number in range(begin, begin + 1000):
            log.write(line(number))
        log.close()
        assert log.lost == 0
    assert ids(path) == [f"r{number}" for number in range(2000)]
    assert path.stat().st_mode & 0o777 == 0o600
    rows, broken = sum_lines(path)
    assert broken == 0
    assert rows == [
        {
            "key": "a", "tenant": "tenant", "model": "org/m", "requests": 2000,
            "prompt_tokens": 20_000, "cached_tokens": 8000, "output_tokens": 6000,
        }
    ]  # fmt: skip


def test_a_torn_line_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "usage.jsonl"
    path.write_bytes(msgspec.json.encode(line(1))[:-5])
    log = UsageLog(path)
    log.write(line(2))
    log.close()
    rows, broken = sum_lines(path)
    assert broken == 1
    assert rows[0]["requests"] == 1


def test_a_full_disk_is_logged_once_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "usage.jsonl"
    path.symlink_to("/dev/full")
    log = UsageLog(path)
    with caplog.at_level(logging.WARNING):
        for number in range(5):
            log.write(line(number))
            wait_until(lambda number=number: log.lost == number + 1)
        path.unlink()
        log.reopen()
        log.write(line(9))
        log.close()
    (failed, again) = [record.getMessage() for record in caplog.records]
    assert "No space left on device" in failed
    assert "5 lines were lost" in again
    assert ids(path) == ["r9"]


def test_part_of_a_write_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk takes one line and a half, then nothing, then everything."""
    path = tmp_path / "usage.jsonl"
    log = UsageLog(path)
    write, budget = os.write, [len(msgspec.json.encode(line(0))) * 3 // 2]

    def short(file: int, data: memoryview) -> int:
        if budget[0] <= 0:
            raise OSError(28, "No space left on device")
        done = write(file, data[: budget[0]])
        budget[0] -= done
        return done

    monkeypatch.setattr(os, "write", short)
    for number in range(4):
        log.write(line(number))
    wait_until(lambda: log.lost == 3)
    monkeypatch.undo()
    log.write(line(7))
    log.close()
    whole = [text for text in path.read_bytes().splitlines() if text.endswith(b"}")]
    assert [msgspec.json.decode(text)["request_id"] for text in whole] == ["r0", "r7"]
    assert sum_lines(path)[1] == 1


def test_a_slow_disk_delays_no_request(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "usage.jsonl"
    os.mkfifo(path)  # takes 64 KiB, then nothing
    log = UsageLog(path)
    start_s = time.monotonic()
    for number in range(13_000):
        log.write(line(number))
    assert time.monotonic() - start_s < 5
    assert log.lost > 0
    assert len([one for one in caplog.records if "too slow" in one.getMessage()]) == 1
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(path.read_bytes()))
    reader.start()
    log.close()
    reader.join(10)
    assert read[0].count(b"\n") == 13_000 - log.lost


def test_rotation(tmp_path: Path) -> None:
    path = tmp_path / "usage.jsonl"
    log = UsageLog(path)
    log.write(line(1))
    wait_until(lambda: path.stat().st_size > 0)
    path.rename(tmp_path / "old.jsonl")
    log.reopen()
    log.write(line(2))
    log.close()
    assert (ids(tmp_path / "old.jsonl"), ids(path)) == (["r1"], ["r2"])


def test_a_file_that_cannot_be_written_is_an_error_at_once(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="directory"):
        UsageLog(tmp_path)
