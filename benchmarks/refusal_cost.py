"""What a refusal in an overload costs the server's event loop, and what a token that is written.

That is processor time of the server's process, with a gateway that does no work.

python benchmarks/refusal_cost.py [--tree NAME=DIR ...] [--cases kept,tokens] [--rounds 5]
    [--count 4000] [--out FILE]

Each --tree is a checkout of this repository, whose own copy of this script is run. They take turns,
so that a ratio between two is from one run; without any it is this one. The overload is
`policy.cluster.entrance` with a full queue.

| case | requests |
|---|---|
| kept | on kept connections, all with one head: what most clients send |
| other_heads | on kept connections, each with an id of its own |
| connections | each on a connection of its own |
| health | `GET /health` on kept connections: the least that an answer costs |
| tokens | none is refused; answers of 256 tokens, streamed, one token at a time |
| tokens_of_4 | the same, four tokens at a time: as a paced client gets them |
"""

import argparse
import asyncio
import json
import os
import selectors
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvicorn
from report import report
from server_overhead import PROMPT, ROOT, TIMING, InstantGateway

from c2cserve.core.actions import Backlog
from c2cserve.core.request import Delta, FinishReason, Job
from c2cserve.policy.cluster.entrance import Entrance, Newcomer
from c2cserve.runtime.gateway import ModelFiles, Refused
from c2cserve.server.http import http_config
from c2cserve.server.settings import ServerSettings
from c2cserve.serving.controller.inbox import Inbox
from c2cserve.serving.logs import setup_logging

CASES = {
    "refusals": ("kept", "other_heads", "connections", "health"),
    "tokens": ("tokens", "tokens_of_4"),
}
"""The kind of server -> its cases."""
_CONNECTIONS = 16
_TOKENS = 256
_SETTLE_S = 3.0
_FULL = Backlog(100.0, (("", 1000),), ("m",))


class FullGateway(InstantGateway):
    """Refuses as a live gateway does whose queue is full."""

    may_refuse = True

    def __init__(self) -> None:
        super().__init__()
        self._entrance = Entrance(0.25)
        self._inbox = Inbox()

    def overload(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, model: str, tenant: str, ttft_s: float, arrived_s: float,
        preparing: Mapping[str, int],
    ) -> Refused | None:  # fmt: skip
        now = time.monotonic()
        newcomer = Newcomer(model, tenant, ttft_s, now - arrived_s)
        posted = self._inbox.posted()
        found = self._entrance.refusal(_FULL, newcomer, preparing, posted, {}, now)
        return None if found is None else Refused(429, *found)


class TokenGateway(InstantGateway):
    """Yields as many tokens at a time as the model's name says."""

    def resolve(self, name: str) -> ModelFiles | None:
        files = super().resolve("m")
        return None if files is None else replace(files, id=name)

    async def submit(self, jobs: Sequence[Job]) -> AsyncGenerator[Delta, None]:
        job = jobs[0]
        request, at_once = job.request, int(job.request.model)
        tokens = tuple(range(70, 70 + at_once))
        for sent in range(0, request.max_new_tokens, at_once):
            await asyncio.sleep(0)
            ends = sent + at_once >= request.max_new_tokens
            yield Delta(
                request.id, tokens, timing=None if sent else TIMING,
                finish=FinishReason.LENGTH if ends else None,
            )  # fmt: skip


def serve(kind: str, descriptor: int) -> None:
    setup_logging("server", "info", "json")
    gateway = FullGateway() if kind == "refusals" else TokenGateway()
    config = http_config(gateway, ServerSettings())
    uvicorn.Server(config).run([socket.socket(fileno=descriptor)])


class Server:
    """A server of a tree."""

    def __init__(self, kind: str, tree: Path) -> None:
        listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.port = int(listener.getsockname()[1])
        self._process = subprocess.Popen(
            [
                sys.executable, str(tree / "benchmarks" / Path(__file__).name), "--serve", kind,
                "--descriptor", str(listener.fileno()),
            ],
            env={**os.environ, "PYTHONPATH": str(tree / "src")}, pass_fds=[listener.fileno()],
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        listener.close()

    def us_each(self, case: str, count: int) -> float:
        """Return microseconds of processor time for each refusal or token."""
        clients = Clients(case, self.port)
        try:
            clients.run(count // 8)
            before, used_s = clients.done, self._cpu_s()
            clients.run(count)
            return (self._cpu_s() - used_s) / (clients.done - before) * 1e6
        finally:
            clients.close()

    def _cpu_s(self) -> float:
        threads = Path(f"/proc/{self._process.pid}/task").glob("*/schedstat")
        return sum(int(one.read_text().split()[0]) for one in threads) / 1e9

    def end(self) -> None:
        self._process.terminate()
        self._process.wait()


class Clients:
    """A closed loop over some connections. `done` counts refusals, or tokens that were received."""

    def __init__(self, case: str, port: int) -> None:
        self._case = case
        self._port = port
        self._at_once = {"tokens": 1, "tokens_of_4": 4}.get(case, 0)
        self._selector = selectors.DefaultSelector()
        self._sent = 0
        self.done = 0
        for _ in range(_CONNECTIONS):
            self._connect()

    def _connect(self) -> None:
        connection = socket.create_connection(("127.0.0.1", self._port))
        self._selector.register(connection, selectors.EVENT_READ)
        self._send(connection)

    def _send(self, connection: socket.socket) -> None:
        self._sent += 1
        body = {
            "model": str(self._at_once or "m"),
            "prompt": PROMPT,
            "max_tokens": _TOKENS,
            "stream": True,
        }
        more = {
            "other_heads": f"x-request-id: {self._sent}\r\n", "connections": "connection: close\r\n"
        }.get(self._case, "")  # fmt: skip
        data = json.dumps({**body, "temperature": 0}).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n{more}"
            f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        )
        if self._case == "health":
            head, data = "GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n", b""
        connection.sendall(head.encode() + data)

    def run(self, count: int) -> None:
        until = self.done + count
        while self.done < until:
            for key, _ in self._selector.select():
                assert isinstance(key.fileobj, socket.socket)
                self._read(key.fileobj)

    def close(self) -> None:
        for key in list(self._selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
        self._selector.close()

    def _read(self, connection: socket.socket) -> None:
        got = connection.recv(1 << 16)
        if self._at_once:
            self.done += self._at_once * got.count(b'"text":')
            if got.endswith(b"0\r\n\r\n"):
                self._send(connection)
            return
        if self._case == "health":
            if not got.endswith(b"}"):
                return  # its content comes by itself
        else:
            assert got.startswith(b"HTTP/1.1 429"), got
        self.done += 1
        if self._case != "connections":
            self._send(connection)
            return
        self._selector.unregister(connection)
        connection.close()
        self._connect()


def _commit(tree: Path) -> str:
    git = ["git", "-C", str(tree), "rev-parse", "--short", "HEAD"]
    return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tree", action="append", help="NAME=DIR; default: after=this checkout")
    parser.add_argument("--cases", help="some of them, comma-separated; default: all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--count", type=int, default=4000, help="refusals or tokens of each case")
    parser.add_argument("--out", type=Path, help="JSON")
    parser.add_argument("--serve", choices=("refusals", "tokens"), help=argparse.SUPPRESS)
    parser.add_argument("--descriptor", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        return serve(given.serve, given.descriptor)
    named = [one.partition("=") for one in given.tree or [f"after={ROOT}"]]
    trees = {name: Path(folder).resolve() for name, _, folder in named}
    results: dict[str, Any] = {"commits": {name: _commit(one) for name, one in trees.items()}}
    for kind, known in CASES.items():
        cases = [one for one in known if not given.cases or one in given.cases.split(",")]
        servers = {name: Server(kind, tree) for name, tree in trees.items()}
        try:
            for server in servers.values():  # what a start leaves behind is no refusal's cost
                server.us_each(known[0], given.count)
            time.sleep(_SETTLE_S)
            results |= _measure(servers, cases, given.rounds, given.count)
        finally:
            for server in servers.values():
                server.end()
    report(results, given.out, show=False, rounds=given.rounds, count=given.count)
    return None


def _measure(
    servers: Mapping[str, Server], cases: Sequence[str], rounds: int, count: int
) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for case in cases:
        found: dict[str, list[float]] = {name: [] for name in servers}
        for _ in range(rounds):
            for name, server in servers.items():
                found[name].append(round(server.us_each(case, count), 1))
        us = {name: round(statistics.median(values), 1) for name, values in found.items()}
        each = list(us.values())
        rows[case] = {"us": us, "share": round(each[-1] / each[0], 2), "rounds": found}
        print(case, json.dumps(rows[case]), flush=True)
    return rows


if __name__ == "__main__":
    main()
