"""Heads of requests: what is read of them once, and how one is known again.

Clients keep their connections, and most send the same head each time: the bytes before the body.
Equal bytes mean the same. So of a request whose head is known, only the body is read.

    POST /v1/completions HTTP/1.1 ... content-length: | 128 | CRLF ... CRLF CRLF | {"model": ...}
    before                                             length  after               body
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_HEAD_BYTES_MAX = 4096
"""Longer heads are not held, so that many connections take little memory."""
_DIGITS_MAX = 9
_LENGTH = b"\r\ncontent-length:"
_OTHER_FRAMING = (b"transfer-encoding", b"expect", b"upgrade")
_END = b"\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Caller:
    """What the head of a request says about it. All checks that need nothing else are passed."""

    route: str
    headers: Mapping[str, str]
    more: Mapping[str, str]
    """Header fields that each answer to it has."""


def first_fields(fields: Sequence[tuple[bytes, bytes]]) -> dict[str, str]:
    """Return header fields by name. Of those with the same name, the first counts."""
    found: dict[str, str] = {}
    for name, value in fields:
        found.setdefault(name.decode("latin-1"), value.decode("latin-1"))
    return found


class KnownHead:
    """The head of a request that was parsed and refused, without the length of its body."""

    __slots__ = ("_after", "_before", "caller")

    def __init__(self, caller: Caller, before: bytes, after: bytes) -> None:
        self.caller = caller
        self._before = before
        self._after = after

    @classmethod
    def of(cls, caller: Caller, data: bytes, body_bytes: int) -> "KnownHead | None":
        """Return the head in `data`, None unless `data` is this one request as a whole. Its body
        was parsed and has `body_bytes`."""
        end = data.find(_END) + len(_END)
        if end > _HEAD_BYTES_MAX or len(data) - end != body_bytes:
            return None
        head = data[:end].lower()
        if head.count(_LENGTH) != 1 or any(name in head for name in _OTHER_FRAMING):
            return None
        start = head.index(_LENGTH) + len(_LENGTH)
        while head[start : start + 1] == b" ":
            start += 1
        after = head.index(b"\r\n", start)
        length = data[start:after]
        if not length.isdigit() or int(length) != body_bytes:
            return None
        return cls(caller, data[:start], data[after:end])

    def body_in(self, data: bytes) -> bytes | None:
        """Return the body of the request in `data`, None unless that is one whole request with this
        head."""
        before, after = self._before, self._after
        if not data.startswith(before):
            return None
        start = data.find(b"\r\n", len(before), len(before) + _DIGITS_MAX + 1)
        length = data[len(before) : start]
        if start < 0 or not (length.isdigit() and data.startswith(after, start)):
            return None
        start += len(after)
        return data[start:] if len(data) - start == int(length) else None
