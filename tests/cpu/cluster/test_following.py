"""What a front does when Ray's head falls silent, ends, or comes back."""

import asyncio
import errno
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from c2cserve.cluster.link import NodeAddress
from c2cserve.cluster.membership import MemberLine
from c2cserve.serving.front.following import follow
from c2cserve.serving.front.server import NO_CLUSTER, FrontServer

ADDRESS = NodeAddress("10.0.0.1", 1, b"secret")


def line(*names: str) -> bytes:
    return msgspec.json.encode(MemberLine(dict.fromkeys(names, ADDRESS))) + b"\n"


async def test_members_are_handed_on_until_the_process_ends() -> None:
    lines, seen = asyncio.StreamReader(), list[Mapping[str, NodeAddress]]()
    lines.feed_data(line("a") + line("a", "b"))
    lines.feed_eof()
    assert await follow(lines, seen.append)
    assert [sorted(one) for one in seen] == [["a"], ["a", "b"]]


async def test_a_process_that_says_nothing_has_not_joined() -> None:
    lines = asyncio.StreamReader()
    lines.feed_eof()
    assert not await follow(lines, lambda _: None)


class Ended:
    """A membership process that found no cluster."""

    returncode = NO_CLUSTER

    def __init__(self) -> None:
        self.stdout = asyncio.StreamReader()
        self.stdout.feed_eof()

    async def wait(self) -> int:
        return self.returncode


async def test_a_membership_process_that_cannot_be_started_is_started_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("c2cserve.serving.front.server._REJOIN_S", 0.01)
    starts = iter([OSError(errno.EMFILE, "Too many open files"), Ended()])

    async def start(_: object) -> Ended:
        if isinstance(found := next(starts), OSError):
            raise found
        return found

    monkeypatch.setattr(FrontServer, "_start_members", start)
    none: Any = None
    front, aborted = FrontServer("head:1", 5.0, none, none, none, none, none), list[str]()
    gateway: Any = SimpleNamespace(abort=aborted.append, members=None)
    async with asyncio.timeout(20.0):
        await front._join(gateway)
    assert "Too many open files" in caplog.text
    assert len(aborted) == 1


async def test_a_silent_head_is_logged_once_and_so_is_its_return(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lines, seen = asyncio.StreamReader(), list[Mapping[str, NodeAddress]]()
    following = asyncio.create_task(follow(lines, seen.append, silent_s=0.02))
    await asyncio.sleep(0.1)
    assert not caplog.records, "it is still starting"
    lines.feed_data(line("a"))
    async with asyncio.timeout(60.0):
        while not caplog.records:
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    assert len(caplog.records) == 1
    assert "serving goes on with known nodes" in caplog.messages[0]
    lines.feed_data(line("a", "b"))
    lines.feed_eof()
    assert await following
    assert caplog.messages[1:] == ["Ray's head answers again"]
    assert [sorted(one) for one in seen] == [["a"], ["a", "b"]]
