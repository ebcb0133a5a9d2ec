"""Receiving request bodies within bounds: one for each body, one for all bodies together."""

from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager

from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest

from c2cserve.server.errors import ApiError

_RETRY_S = 1.0


class Bodies:
    """Counts the bytes of bodies that are being received or worked on."""

    def __init__(self, each_bytes: int, all_bytes: int) -> None:
        self._each_bytes = each_bytes
        self._all_bytes = all_bytes
        self.held_bytes = 0

    @asynccontextmanager
    async def receive(self, http: HttpRequest, limit: int | None = None) -> AsyncGenerator[bytes]:
        """Yield the whole body, and count its bytes until the context ends. Raises ApiError: 413
        for a body that is too large, 429 while all bodies together are."""
        limit = self._each_bytes if limit is None else min(limit, self._each_bytes)
        data, counted = bytearray(), 0
        _check(int(http.headers.get("content-length", 0)), limit)
        try:
            async for part in http.stream():
                _check(len(data) + len(part), limit)
                if self.held_bytes + len(part) > self._all_bytes:
                    raise ApiError(
                        429, f"requests with more than {self._all_bytes} bytes are in progress",
                        code="rate_limit_exceeded", retry_after_s=_RETRY_S,
                    )  # fmt: skip
                data += part
                counted += len(part)
                self.held_bytes += len(part)
            body = bytes(data)
            data.clear()
            yield body
        except ClientDisconnect as error:
            raise ApiError(400, "the client left before its request was complete") from error
        finally:
            self.held_bytes -= counted

    @contextmanager
    def hold(self, body: bytes) -> Generator[None]:
        """Count a body that is worked on again."""
        self.held_bytes += len(body)
        try:
            yield
        finally:
            self.held_bytes -= len(body)


def _check(size: int, limit: int) -> None:
    if size > limit:
        raise ApiError(
            413, f"the request body is larger than {limit} bytes, this server's limit"
            " (--max-body-bytes)", code="limit_exceeded",
        )  # fmt: skip
