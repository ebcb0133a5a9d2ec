"""Sending a case as a client would, and reading whatever comes back."""

import asyncio
import json
import time
from typing import Any

import aiohttp

from soak.case import CHAT, Case, Reply, Said

_KEPT_S = 2.0
"""How long an idle connection is used again: less than the server keeps it, so that none is closed
under a request."""
_TAIL = 2000
"""Characters of an answer that is none, kept to be shown."""


class Client:
    """One connection pool without limits; within `async with`."""

    def __init__(self, url: str, end_s: float) -> None:
        """`end_s`: how long an answer may take from the moment it is asked for."""
        self._url, self._end_s = url, end_s

    async def __aenter__(self) -> "Client":
        self._session = aiohttp.ClientSession(
            self._url, timeout=aiohttp.ClientTimeout(total=None),
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEPT_S),
            read_bufsize=1 << 22,
        )  # fmt: skip
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def ask(self, case: Case) -> Reply:
        """Whatever happens is in the reply; nothing is raised for it."""
        reply = Reply(time.monotonic())
        leave_s = case.leave.after_s if case.leave is not None else None
        try:
            async with asyncio.timeout(self._end_s if leave_s is None else leave_s):
                await self._exchange(case, reply)
        except TimeoutError:
            reply.end = "no end" if leave_s is None else "left"
        except aiohttp.ClientConnectorError as error:
            reply.end, reply.detail = "no connection", str(error)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            reply.end, reply.detail = "cut", f"{type(error).__name__}: {error}"
        reply.ended_s = time.monotonic()
        return reply

    async def _exchange(self, case: Case, reply: Reply) -> None:
        headers = {"x-request-id": case.id, **case.headers}
        async with self._session.post(case.path, json=case.body, headers=headers) as response:
            reply.status = response.status
            reply.headers = {name.lower(): value for name, value in response.headers.items()}
            if response.status != 200 or not case.streamed:
                self._take_whole(case, reply, await response.read())
                return
            pieces = 0
            async for line in response.content:
                if line.startswith(b"data: "):
                    pieces += self._take_event(case, reply, line[6:].strip())
                if case.leave is not None and case.leave.pieces == pieces:
                    reply.end = "left"
                    response.close()
                    return
        if reply.end == "no end":
            reply.end, reply.detail = "cut", "the stream ended without [DONE] or an error"

    @staticmethod
    def _take_whole(case: Case, reply: Reply, data: bytes) -> None:
        reply.first_s = time.monotonic()
        reply.end = "whole"
        try:
            content: Any = json.loads(data)
        except ValueError:
            reply.end, reply.detail = "cut", f"not JSON: {data[:_TAIL]!r}"
            return
        if reply.status != 200:
            reply.error = content.get("error") if isinstance(content, dict) else content
            return
        reply.usage = content["usage"]
        for choice in content["choices"]:
            _take_choice(case, reply, choice, choice.get("message", choice))

    @staticmethod
    def _take_event(case: Case, reply: Reply, data: bytes) -> bool:
        """Whether it brought a piece of output."""
        if reply.end in ("done", "error event"):
            reply.end, reply.detail = "cut", f"more after the end: {data[:_TAIL]!r}"
            return False
        if data == b"[DONE]":
            reply.end = "done"
            return False
        content: Any = json.loads(data)
        if "error" in content:
            reply.end, reply.error = "error event", content["error"]
            return False
        if content.get("usage") is not None:
            reply.usage = content["usage"]
        if reply.first_s is None:
            reply.first_s = time.monotonic()
        for choice in content["choices"]:
            _take_choice(case, reply, choice, choice.get("delta", choice))
        return bool(content["choices"])


def _take_choice(case: Case, reply: Reply, choice: Any, message: Any) -> None:
    said = reply.choices.setdefault(choice["index"], Said())
    said.text += message.get("content" if case.path == CHAT else "text") or ""
    if choice.get("finish_reason") is not None:
        said.finishes.append(choice["finish_reason"])
    found = choice.get("logprobs")
    if not found:
        return
    if case.path == CHAT:
        said.tokens += [one["token"] for one in found["content"]]
        said.logprobs += [one["logprob"] for one in found["content"]]
    else:
        said.tokens += found["tokens"]
        said.logprobs += found["token_logprobs"]
        said.tops += [top or {} for top in found["top_logprobs"]]
