"""Answers to clients of HTTP/1.0, which has no chunks."""

from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_LENGTH = b"content-length"


def unchunked(cycle: Any, app: ASGIApp) -> ASGIApp:
    """Return `app` for a request of HTTP/1.0. What has no length, such as a stream, ends with its
    connection. In chunks, as uvicorn sends it, such a client would take their lengths for text.

    `cycle`: uvicorn's of the request. It checks that an answer is as long as it was announced, so
    each part of a stream is announced just before it is sent."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        measured = True

        async def send_plain(message: Message) -> None:
            nonlocal measured
            if message["type"] == "http.response.start":
                names = [name.lower() for name, _ in message.get("headers", ())]
                measured = _LENGTH in names
                if not measured:
                    cycle.chunked_encoding = False
            elif not measured:
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_plain)

    return answer
