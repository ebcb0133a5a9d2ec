"""What a worker and its grammar process say to each other, as frames of msgpack.

builds   Build ─▶ ◀─ Built     one at a time
fills    Fill  ─▶ ◀─ Filled    in their order; the masks themselves are in shared memory
"""

import socket

import msgspec

_HEAD_BYTES = 4
_encode = msgspec.msgpack.Encoder().encode


class Output(msgspec.Struct, frozen=True, array_like=True):
    """One output, by the number of its matcher."""

    number: int
    tokens: tuple[int, ...]
    """What it went on by since it was last told of; all of it with a grammar."""
    grammar: str = ""
    """Empty for a matcher that the process has, as in every `Fill`."""


class Build(msgspec.Struct, frozen=True, array_like=True):
    output: Output
    drop: tuple[int, ...] = ()
    """Matchers that are not needed any more."""


class Built(msgspec.Struct, frozen=True, array_like=True):
    failure: str
    """Empty if the matcher is there."""


class Fill(msgspec.Struct, frozen=True, array_like=True):
    offset: int
    """Where the masks begin in the shared memory, in bytes,"""
    ready: int
    """and where 1 is written when they are complete."""
    outputs: tuple[Output, ...]
    drop: tuple[int, ...] = ()


class Filled(msgspec.Struct, frozen=True, array_like=True):
    failures: dict[int, str]
    """Row -> why its matcher cannot go on. Its mask is empty."""


decode_build = msgspec.msgpack.Decoder(Build).decode
decode_built = msgspec.msgpack.Decoder(Built).decode
decode_fill = msgspec.msgpack.Decoder(Fill).decode
decode_filled = msgspec.msgpack.Decoder(Filled).decode


def send(end: socket.socket, message: msgspec.Struct) -> None:
    """Send a frame. Raises OSError."""
    data = _encode(message)
    end.sendall(len(data).to_bytes(_HEAD_BYTES, "little") + data)


def receive(end: socket.socket) -> bytes:
    """Return the next frame's message. Raises OSError, also where the other side has ended."""
    return _exactly(end, int.from_bytes(_exactly(end, _HEAD_BYTES), "little"))


def _exactly(end: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        got = end.recv(size - len(data))
        if not got:
            raise ConnectionResetError("the other side has ended")
        data += got
    return bytes(data)
