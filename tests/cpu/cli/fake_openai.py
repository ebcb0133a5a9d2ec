"""An OpenAI server whose timing is known, in a process of its own: what the client measures is
compared with what was configured."""

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def fake_openai(**settings: Any) -> Iterator[str]:
    """Runs the server; yields its URL. Settings are the options of `main`, with underscores."""
    options = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    process = subprocess.Popen(
        [sys.executable, __file__, *options], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


class Server:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.served = 0
        self.last_model = ""
        self.switches = 0
        self.first_s = 0.0

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._request(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        method, path, _ = head[0].split()
        headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        if method == "GET":
            state = self._state(path)
            self._answer(writer, 404 if "error" in state else 200, state)
            return True
        request = json.loads(body)
        options = self.options
        self.served += 1
        self.first_s = self.first_s or time.monotonic()
        if options.stall_s and time.monotonic() - self.first_s > options.stall_after_s:
            stall_s, options.stall_s = options.stall_s, 0.0
            time.sleep(stall_s)
        if options.key and headers.get("authorization") != f"bearer {options.key}":
            self._answer(writer, 401, {"error": {"message": "bad key", "type": "auth"}})
            return True
        if isinstance(request.get("prompt"), list) and not options.ids:
            self._answer(writer, 400, {"error": {"message": "no token ids here"}})
            return True
        if options.refuse_every and self.served % options.refuse_every == 0:
            self._answer(writer, 429, {"error": {"message": "busy"}})
            return True
        if options.break_every and self.served % options.break_every == 0:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n")
            writer.write(b"transfer-encoding: chunked\r\n\r\n")
            await writer.drain()
            return False
        await self._stream(writer, path, request)
        return not (options.close_every and self.served % options.close_every == 0)

    async def _stream(self, writer: asyncio.StreamWriter, path: str, request: Any) -> None:
        options = self.options
        began_s = time.monotonic()
        switched = request["model"] != self.last_model
        self.switches += switched
        self.last_model = request["model"]
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n")
        writer.write(b"transfer-encoding: chunked\r\n\r\n")
        chat = path.endswith("chat/completions")
        if chat:
            self._event(writer, {"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        tokens = request["max_tokens"]
        due_s = began_s + options.ttft_s + (options.switch_s if switched else 0.0)
        for position in range(tokens):
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            piece = {"delta": {"content": "é "}} if chat else {"text": "é "}
            self._event(writer, {"choices": [piece | {"finish_reason": None}]})
            await writer.drain()
            if position + 1 < tokens:
                due_s += options.tpot_s
        last = {"delta": {}} if chat else {"text": ""}
        self._event(writer, {"choices": [last | {"finish_reason": "length"}]})
        if options.usage and request.get("stream_options", {}).get("include_usage"):
            used = {"prompt_tokens": self._length(request), "completion_tokens": tokens}
            self._event(writer, {"choices": [], "usage": used})
        self._event(writer, None)
        writer.write(b"0\r\n\r\n")

    @staticmethod
    def _length(request: Any) -> int:
        """Ids count as they are; a word is two tokens, a chat template adds five."""
        if "messages" in request:
            return 5 + 2 * len(request["messages"][0]["content"].split())
        prompt = request["prompt"]
        return len(prompt) if isinstance(prompt, list) else 2 * len(prompt.split())

    @staticmethod
    def _event(writer: asyncio.StreamWriter, value: Any) -> None:
        data = b"data: " + (json.dumps(value).encode() if value else b"[DONE]") + b"\n\n"
        writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def _state(self, path: str) -> Any:
        if path == "/v1/models":
            return {"data": [{"id": name} for name in self.options.models.split(",")]}
        if path == "/admin/state":
            return {"slices": [{"id": "cpu0", "switches": self.switches}], "models": []}
        return {"error": {"message": "not found"}}

    @staticmethod
    def _answer(writer: asyncio.StreamWriter, status: int, value: Any) -> None:
        data = json.dumps(value).encode()
        writer.write(
            f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\n"
            f"content-length: {len(data)}\r\n\r\n".encode()
            + data
        )


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default="m")
    for name in ("ttft-s", "tpot-s", "switch-s", "stall-s", "stall-after-s"):
        parser.add_argument(f"--{name}", type=float, default=0.0)
    for name in ("refuse-every", "break-every", "close-every"):
        parser.add_argument(f"--{name}", type=int, default=0)
    parser.add_argument("--ids", type=int, default=1)
    parser.add_argument("--usage", type=int, default=1)
    parser.add_argument("--key", default="")
    server = await asyncio.start_server(Server(parser.parse_args()).connection, "127.0.0.1", 0)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
