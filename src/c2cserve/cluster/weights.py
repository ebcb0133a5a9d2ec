"""Weights from one node's pool to another's, over TCP connections of their own.

A front that sends a model to a node names another node that has it (`Source`). The key in it is
for one model, and only the two nodes can know it. It follows from the holder's secret, and is
sealed with the receiver's. On each of `STREAMS` connections:

holder   ── nonce ─▶ receiver
receiver ── Fetch ─▶ holder      which part of which weights, a proof that it has the key
holder   ── Offer ─▶ receiver    the other proof, and which bytes; or Sorry, and the connection ends
holder   ── chunks ▶ receiver    CRC-32, bytes; chunk k is sent on connection k % parts

The sums find what the network or memory damaged. They do not stop an attacker between the nodes.
"""

import hashlib
import hmac
import logging
import secrets
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import msgspec

from c2cserve.cluster.messages import HEAD_BYTES, NONCE_BYTES, STRANGER_BYTES_MAX, Source, same

log = logging.getLogger(__name__)

STREAMS = 2
CHUNK_BYTES = 1 << 20
_SUM_BYTES = 4
_SILENCE_S = 5.0
"""A peer that takes or sends nothing for so long is given up."""
_AT_ONCE = 8
"""Connections that a holder serves at the same time; others wait."""


Sum = Callable[[memoryview], int]
"""A CRC-32, as `zlib.crc32`."""


class Fetch(msgspec.Struct, tag=True):
    model: str
    fingerprint: bytes
    """A digest of the layout and of the checkpoint's files: both ends must have the same."""
    part: int
    parts: int
    serial: bytes
    nonce: bytes
    proof: bytes


class Offer(msgspec.Struct, tag=True):
    proof: bytes
    begin: int
    end: int


class Sorry(msgspec.Struct, tag=True):
    reason: str


_answers = msgspec.msgpack.Decoder(Offer | Sorry)
_fetches = msgspec.msgpack.Decoder(Fetch)


class FetchError(Exception):
    """The weights did not come. What was written up to then is right."""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """Weights that are whole, and which bytes of the segment they are."""

    data: memoryview
    begin: int
    end: int


class Incoming(Protocol):
    """Takes weights in. Called on several threads at the same time."""

    begin: int
    end: int

    def write(self, offset: int, data: memoryview) -> None:
        """Take bytes whose sum is right. Raises OSError."""
        ...

    @property
    def cancelled(self) -> bool: ...


def _key(holder_secret: bytes, model: str, serial: bytes) -> bytes:
    return hmac.digest(holder_secret, b"weights/" + serial + model.encode(), hashlib.sha256)


def _sealed(key: bytes, receiver_secret: bytes, serial: bytes) -> bytes:
    """Return the key sealed, or a sealed one opened. A serial is used for one key only."""
    mask = hmac.digest(receiver_secret, b"seal/" + serial, hashlib.sha256)
    return bytes(a ^ b for a, b in zip(key, mask, strict=True))


def _proof(key: bytes, role: str, nonce: bytes) -> bytes:
    return hmac.digest(key, role.encode() + b"/" + nonce, hashlib.sha256)


def source_of(
    host: str, port: int, model: str, *, holder_secret: bytes, receiver_secret: bytes
) -> Source:
    """Return what lets the receiver fetch this model from the holder."""
    serial = secrets.token_bytes(NONCE_BYTES)
    key = _key(holder_secret, model, serial)
    return Source(host, port, model, serial, _sealed(key, receiver_secret, serial))


# ---- the holder ---------------------------------------------------------------------------------


class WeightsPort:
    """Sends weights to other nodes. It has threads of its own, so that no request waits for it."""

    def __init__(
        self, host: str, secret: bytes, find: Callable[[str, bytes], Outgoing | None], crc32: Sum
    ) -> None:
        """`find`: model, fingerprint -> its weights if the pool has all of them, called on a
        thread. Raises OSError if the port cannot be opened."""
        self._secret = secret
        self._find = find
        self._crc32 = crc32
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family)
        self.port: int = self._listener.getsockname()[1]
        self._workers = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="weights")
        threading.Thread(target=self._accept, name="weights-port", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
                self._workers.submit(self._serve, connection)
            except (OSError, RuntimeError):  # closed
                return

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                connection.settimeout(_SILENCE_S)
                # Else the end of each chunk waits for an acknowledgement, which waits 40 ms.
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._send(connection)
            except (OSError, msgspec.MsgspecError, FetchError) as error:
                log.warning("weights were not sent: %s", error)

    def _send(self, connection: socket.socket) -> None:
        nonce = secrets.token_bytes(NONCE_BYTES)
        connection.sendall(nonce)
        asked = _fetches.decode(_read_frame(connection))
        key = _key(self._secret, asked.model, asked.serial)
        if not same(asked.proof, _proof(key, "receiver", nonce)):
            raise FetchError("a peer without this cluster's secret")
        found = self._find(asked.model, asked.fingerprint)
        if found is None or not 0 <= asked.part < asked.parts:
            _write_frame(connection, Sorry("the pool does not have all of these weights"))
            return
        _write_frame(connection, Offer(_proof(key, "holder", asked.nonce), found.begin, found.end))
        step = CHUNK_BYTES * asked.parts
        for begin in range(found.begin + CHUNK_BYTES * asked.part, found.end, step):
            # Two passes over a chunk that fits a core's cache cost less than `sendfile` here.
            chunk = found.data[begin : min(begin + CHUNK_BYTES, found.end)]
            connection.sendall(self._crc32(chunk).to_bytes(_SUM_BYTES, "little"), socket.MSG_MORE)
            connection.sendall(chunk)

    def close(self) -> None:
        # `shutdown` wakes the thread that accepts; closing alone does not.
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._workers.shutdown(wait=False, cancel_futures=True)


# ---- the receiver -------------------------------------------------------------------------------


def fetch(
    source: Source, secret: bytes, fingerprint: bytes, incoming: Incoming, crc32: Sum
) -> None:
    """Get all bytes of a model's weights. `secret`: this node's. Raises FetchError."""
    key = _sealed(source.sealed, secret, source.serial)
    with ThreadPoolExecutor(STREAMS, thread_name_prefix="fetch") as threads:
        parts = [
            threads.submit(_fetch_part, source, key, fingerprint, part, incoming, crc32)
            for part in range(STREAMS)
        ]
    for part in parts:
        if (error := part.exception()) is not None:
            raise FetchError(f"from {source.host}: {error}") from error


def _fetch_part(
    source: Source, key: bytes, fingerprint: bytes, part: int, incoming: Incoming, crc32: Sum
) -> None:
    with socket.create_connection((source.host, source.port), _SILENCE_S) as connection:
        nonce = secrets.token_bytes(NONCE_BYTES)
        proof = _proof(key, "receiver", _read(connection, NONCE_BYTES))
        _write_frame(
            connection,
            Fetch(source.model, fingerprint, part, STREAMS, source.serial, nonce, proof),
        )
        answer = _answers.decode(_read_frame(connection))
        if isinstance(answer, Sorry):
            raise FetchError(answer.reason)
        if not same(answer.proof, _proof(key, "holder", nonce)):
            raise FetchError("a holder without this cluster's secret")
        if (answer.begin, answer.end) != (incoming.begin, incoming.end):
            raise FetchError("its weights lie at other places")
        buffer = memoryview(bytearray(_SUM_BYTES + CHUNK_BYTES))
        step = CHUNK_BYTES * STREAMS
        for begin in range(incoming.begin + CHUNK_BYTES * part, incoming.end, step):
            if incoming.cancelled:
                raise FetchError("cancelled")
            size = min(CHUNK_BYTES, incoming.end - begin)
            _read_into(connection, buffer[: _SUM_BYTES + size])
            data = buffer[_SUM_BYTES : _SUM_BYTES + size]
            if crc32(data) != int.from_bytes(buffer[:_SUM_BYTES], "little"):
                raise FetchError(f"bytes at {begin} were damaged on their way")
            incoming.write(begin, data)


# ---- frames -------------------------------------------------------------------------------------


def _read_into(connection: socket.socket, buffer: memoryview) -> None:
    done = 0
    while done < len(buffer):
        count = connection.recv_into(buffer[done:])
        if count == 0:
            raise FetchError("the connection ended")
        done += count


def _read(connection: socket.socket, count: int) -> bytes:
    data = bytearray(count)
    _read_into(connection, memoryview(data))
    return bytes(data)


def _read_frame(connection: socket.socket) -> bytes:
    size = int.from_bytes(_read(connection, HEAD_BYTES), "little")
    if size > STRANGER_BYTES_MAX:
        raise FetchError(f"a frame of {size} bytes")
    return _read(connection, size)


def _write_frame(connection: socket.socket, message: Fetch | Offer | Sorry) -> None:
    data = msgspec.msgpack.encode(message)
    connection.sendall(len(data).to_bytes(HEAD_BYTES, "little") + data)
