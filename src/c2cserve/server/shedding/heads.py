"""Heads of requests: what is read of them once, and how one is known again.

Most clients send the same head each time: the bytes before the body. What differs are the length,
and ids of the request. Equal bytes of the rest mean the same, on whatever connection they come. So
of a request whose head is known, only the body is read.

    POST /v1/completions HTTP/1.1 ... content-length: | 128 | ... x-request-id: | 7 | ... | {...}
    known                                               length                   id         body
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

_HEAD_BYTES_MAX = 4096
"""Longer heads are not held, so that they take little memory."""
_HEADS_MAX = 1024
_DIGITS_MAX = 9
_VARYING = re.compile(
    rb"\r\n(?=[CcXxTtIi])((?i:content-length|x-request-id|traceparent|tracestate|idempotency-key"
    rb"|x-stainless-retry-count|x-stainless-read-timeout)):[ \t]*([!-~]{1,256})(?=\r\n)"
)
"""Fields whose values differ from one request to the next, and decide nothing about a refusal."""
_LENGTH = b"content-length"
_ID = b"x-request-id"
_OTHER_FRAMING = (b"\r\ntransfer-encoding", b"\r\nexpect", b"\r\nupgrade", b"\r\ncontent-length")
_END = b"\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Caller:
    """What the head of a request says about it. All checks that need nothing else are passed."""

    route: str
    headers: Mapping[str, str]
    more: Mapping[str, str]
    """Header fields that each answer to it has."""
    closes: bool = False
    """The connection ends with the answer."""


def first_fields(fields: Sequence[tuple[bytes, bytes]]) -> dict[str, str]:
    """Return header fields by name. Of those with the same name, the first counts."""
    found: dict[str, str] = {}
    for name, value in fields:
        found.setdefault(name.decode("latin-1"), value.decode("latin-1"))
    return found


class KnownRequest(NamedTuple):
    """A whole request whose head is known."""

    caller: Caller
    body: bytes
    id: str
    """What its client calls it; empty: nothing."""


class KnownHeads:
    """The heads of requests that were parsed and refused, of all connections of a server."""

    def __init__(self) -> None:
        self._callers: dict[tuple[bytes, ...], Caller] = {}

    def hold(self, caller: Caller, data: bytes, body_bytes: int) -> None:
        """Hold the head in `data` if that is this one request as a whole. Its body was parsed and
        has `body_bytes`."""
        parts = _parts(data)
        if parts is None or len(parts[1]) != body_bytes:
            return
        fixed = b" ".join(parts[0]).lower()
        if any(name in fixed for name in _OTHER_FRAMING):
            return
        if len(self._callers) >= _HEADS_MAX:
            del self._callers[next(iter(self._callers))]
        self._callers[parts[0]] = caller

    def find(self, data: bytes) -> KnownRequest | None:
        """Return the request in `data`, None unless that is one whole request with a known head."""
        parts = _parts(data)
        if parts is None or (caller := self._callers.get(parts[0])) is None:
            return None
        return KnownRequest(caller, parts[1], parts[2])


def _parts(data: bytes) -> tuple[tuple[bytes, ...], bytes, str] | None:
    """Return what does not vary in the head of a request, its body, and its id. None unless `data`
    is a whole request whose length is given once."""
    end = data.find(_END, 0, _HEAD_BYTES_MAX)
    if end < 0:
        return None
    pieces = _VARYING.split(data[: end + 2])
    names = [name.lower() for name in pieces[1::3]]
    if names.count(_LENGTH) != 1:
        return None
    length = pieces[3 * names.index(_LENGTH) + 2]
    if len(length) > _DIGITS_MAX or not length.isdigit():
        return None
    body = data[end + len(_END) :]
    if len(body) != int(length):
        return None
    given = pieces[3 * names.index(_ID) + 2].decode() if _ID in names else ""
    return (*pieces[::3], *names), body, given
