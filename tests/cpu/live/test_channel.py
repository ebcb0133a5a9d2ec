"""The channel between controller and worker: whole messages, in order, even to a slow side."""

import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from c2cserve.serving.ipc.channel import Channel

Pair = tuple[Channel, Channel]


@pytest.fixture
def pair() -> Iterator[Pair]:
    one, other = map(Channel, socket.socketpair())
    yield one, other
    one.close()
    other.close()


def framed(message: bytes) -> bytes:
    return len(message).to_bytes(4, "little") + message


@settings(deadline=None)
@given(messages=st.lists(st.binary(max_size=40), max_size=8), data=st.data())
def test_messages_are_whole_however_their_bytes_arrive(
    messages: list[bytes], data: st.DataObject
) -> None:
    stream = b"".join(map(framed, messages))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    raw, end = socket.socketpair()
    channel, got = Channel(end), list[bytes]()
    for begin, stop in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        raw.sendall(stream[begin:stop])
        got += channel.receive()
    raw.close()
    channel.close()
    assert got == messages


def test_a_slow_reader_blocks_no_sender_and_misses_nothing(pair: Pair) -> None:
    one, other = pair
    messages = [bytes([i]) * 300_000 for i in range(20)]
    started = time.monotonic()
    for message in messages:
        one.send(message)
    assert time.monotonic() - started < 60.0, "one that blocks does so for ever: nobody reads"
    got: list[bytes] = []
    while len(got) < len(messages):
        got += other.receive()
        one.wait(0.001)
    assert got == messages
    assert other.receive() == []


def test_waiting_ends_with_a_message_or_with_the_time(pair: Pair) -> None:
    one, other = pair
    started = time.monotonic()
    other.wait(0.02)
    assert time.monotonic() - started >= 0.02
    one.send(b"now")
    other.wait(30.0)
    assert other.receive() == [b"now"]


def test_the_next_message_leaves_those_behind_it(pair: Pair) -> None:
    one, other = pair
    for message in (b"first", b"second", b"third"):
        one.send(message)
    assert other.next() == b"first"
    assert other.receive() == [b"second", b"third"]
    one.close()
    with pytest.raises(EOFError):
        other.next()


def test_the_other_side_is_gone(pair: Pair) -> None:
    one, other = pair
    one.send(b"last words")
    one.close()
    assert other.receive() == [b"last words"]
    assert not other.closed
    assert other.receive() == []
    assert other.closed
    other.send(b"to nobody")
    other.drain(1.0)
    other.wait(0.001)


@pytest.mark.parametrize("somebody_reads", [True, False])
def test_what_is_kept_is_drained(pair: Pair, somebody_reads: bool) -> None:
    one, other = pair
    message = bytes(1 << 20)
    one.send(message)
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(other.next()))
    if somebody_reads:
        reader.start()
    one.drain(10.0 if somebody_reads else 0.01)
    assert one.closed is not somebody_reads
    if somebody_reads:
        reader.join()
        assert got == [message]


def test_what_was_sent_outlives_its_sender() -> None:
    mine, its = socket.socketpair()
    script = (
        "import os, signal, socket; from c2cserve.serving.ipc.channel import Channel;"
        "end = Channel(socket.fromfd(0, socket.AF_UNIX, socket.SOCK_STREAM));"
        "end.next(); end.send(b'token'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    with its:
        process = subprocess.Popen([sys.executable, "-c", script], stdin=its.fileno())
    channel = Channel(mine)
    channel.send(b"go")
    assert process.wait(30) == -signal.SIGKILL
    assert channel.receive() == [b"token"]
    channel.close()
