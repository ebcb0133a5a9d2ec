"""What the HTTP server itself costs: its CPU time per request and per streamed token, with a
gateway that answers at once. JSON on stdout.

python benchmarks/server_overhead.py [--seconds N] [--connections N]

CPU time of the server's process is what is measured, so neither the client nor the number of
cores distorts it. `floor` is uvicorn answering with constant bytes: what HTTP costs by itself.
"""

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import uvicorn

from c2cserve.core.model import ModelStatus
from c2cserve.core.request import Delta, FinishReason, Job, Timing
from c2cserve.runtime.gateway import ModelFiles, Snapshot
from c2cserve.server.http import http_config
from c2cserve.server.settings import ServerSettings
from c2cserve.serving.logs import setup_logging

ROOT = Path(__file__).parent.parent
MODEL = ROOT / "examples" / "specialists" / "sorter-llama"
TIMING = Timing("cpu0", False, 0.0, 0.0, 0.0, 0.0)
PROMPT = "sort these letters: q w e r t y u i o p. " * 3
STREAM_TOKENS = 100


class InstantGateway:
    """Yields a delta per token without waiting for anything but the event loop."""

    ready = healthy = True
    may_refuse = False

    def __init__(self) -> None:
        self._files = ModelFiles("m", str(MODEL), 4096, 263, (2,), 1.0, 0.1, 0)

    def resolve(self, name: str) -> ModelFiles | None:
        return self._files if name == "m" else None

    def overload(
        self, model: str, tenant: str, ttft_s: float, arrived_s: float,
        preparing: Mapping[str, int],
    ) -> None:  # fmt: skip
        return None

    async def submit(self, jobs: Sequence[Job]) -> AsyncGenerator[Delta, None]:
        job = jobs[0]
        request = job.request
        for i in range(request.max_new_tokens):
            await asyncio.sleep(0)
            last = i == request.max_new_tokens - 1
            yield Delta(
                request.id, (70 + i % 20,), timing=TIMING if i == 0 else None,
                finish=FinishReason.LENGTH if last else None,
            )  # fmt: skip

    def cancel(self, request_id: str) -> None:
        raise AssertionError(f"nobody leaves in this benchmark, yet {request_id} was cancelled")

    def models(self) -> Sequence[ModelStatus]:
        return ()

    def snapshot(self) -> Snapshot:
        return Snapshot("bench", 0.0, False, (), (), 0, 0, 0, 0)

    async def add_model(self, entry: dict[str, object]) -> ModelStatus:
        raise AssertionError("not part of this benchmark")

    async def remove_model(self, name: str) -> None:
        raise AssertionError("not part of this benchmark")

    async def reload_model(self, name: str) -> ModelStatus:
        raise AssertionError("not part of this benchmark")


Send = Callable[[dict[str, Any]], Awaitable[None]]


async def floor(scope: dict[str, Any], receive: Callable[[], Any], send: Send) -> None:
    while (await receive()).get("more_body"):
        pass
    body = b'{"id": "' + b"x" * 400 + b'"}'
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def serve(kind: str, port: int) -> None:
    setup_logging("server", "info", "json")
    if kind != "floor":
        config = http_config(InstantGateway(), ServerSettings(), host="127.0.0.1", port=port)
        uvicorn.Server(config).run()
        return
    uvicorn.run(
        floor, host="127.0.0.1", port=port, log_config=None, access_log=False, lifespan="off",
        http="httptools",
    )  # fmt: skip


def request(path: str, body: dict[str, object]) -> bytes:
    data = json.dumps({"model": "m", "temperature": 0, **body}).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return head.encode() + b"content-length: %d\r\n\r\n" % len(data) + data


async def _one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(data)
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200"), head
    if b"chunked" in head:
        await reader.readuntil(b"0\r\n\r\n")
        return
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    await reader.readexactly(length)


async def load(port: int, data: bytes, seconds: float, connections: int) -> tuple[int, float]:
    """Requests answered and how long it took, closed loop."""
    done = 0
    started = time.perf_counter()

    async def client() -> None:
        nonlocal done
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
        while time.perf_counter() - started < seconds:
            await _one(reader, writer, data)
            done += 1
        writer.close()
        await writer.wait_closed()

    await asyncio.gather(*(client() for _ in range(connections)))
    return done, time.perf_counter() - started


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(kind: str, port: int, data: bytes, seconds: float, connections: int) -> dict[str, Any]:
    process = subprocess.Popen(
        [sys.executable, __file__, "--serve", kind, "--port", str(port)],
        stderr=subprocess.DEVNULL,
    )
    try:
        for _ in range(200):
            try:
                asyncio.run(load(port, data, 1.0, connections))  # also warms the server up
                break
            except OSError:
                time.sleep(0.05)
        before = cpu_s(process.pid)
        done, took_s = asyncio.run(load(port, data, seconds, connections))
        used_s = cpu_s(process.pid) - before
    finally:
        process.terminate()
        process.wait()
    return {
        "requests": done,
        "requests_per_s": done / took_s,
        "cpu_ms_per_request": used_s / done * 1e3,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--port", type=int, default=18473)
    parser.add_argument("--serve", choices=["floor", "server"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        return serve(options.serve, options.port)
    chat = {"messages": [{"role": "user", "content": PROMPT}]}
    bodies = {
        "completion_1_token": ("/v1/completions", {"prompt": PROMPT, "max_tokens": 1}),
        "chat_1_token": ("/v1/chat/completions", {**chat, "max_tokens": 1}),
        "completion_stream": (
            "/v1/completions", {"prompt": PROMPT, "max_tokens": STREAM_TOKENS, "stream": True},
        ),
        "chat_stream": (
            "/v1/chat/completions", {**chat, "max_tokens": STREAM_TOKENS, "stream": True},
        ),
    }  # fmt: skip
    results: dict[str, Any] = {}
    args = (options.seconds, options.connections)
    first = request(*bodies["completion_1_token"])
    results["floor"] = measure("floor", options.port, first, *args)
    for name, (path, body) in bodies.items():
        results[name] = measure("server", options.port, request(path, body), *args)
        if name.endswith("stream"):
            per_token = results[name]["cpu_ms_per_request"] / STREAM_TOKENS
            results[name]["cpu_us_per_token"] = per_token * 1e3
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    machine = {"cores": os.cpu_count(), "python": platform.python_version()}
    print(json.dumps({"commit": commit, "machine": machine, "results": results}, indent=1))
    return None


if __name__ == "__main__":
    main()
