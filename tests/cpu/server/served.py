"""The HTTP server on a real socket, over the fake gateway."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import openai
import uvicorn
from fake_gateway import FakeGateway, Play, model_files

from c2cserve.core.request import Job
from c2cserve.server.access.gate import Gate
from c2cserve.server.http import http_config
from c2cserve.server.settings import ServerSettings

BYTE, PIECE = "org/byte", "piece"


class Served:
    """A real uvicorn on a real socket, in a thread of its own."""

    def __init__(
        self, gateway: FakeGateway, settings: ServerSettings, gate: Gate | None = None
    ) -> None:
        self.gateway = gateway
        config = http_config(gateway, settings, gate, host="127.0.0.1", port=0)
        config.timeout_graceful_shutdown = 1
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)

    def __enter__(self) -> "Served":
        self._thread.start()
        while not self._server.started:
            assert self._thread.is_alive()
            self._thread.join(0.005)
        self.port = int(self._server.servers[0].sockets[0].getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}"
        json = {"content-type": "application/json"}
        self.http = httpx.Client(base_url=self.url, headers=json, timeout=60)
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()
        self.client.close()
        self._server.should_exit = True
        self._thread.join(10)
        assert not self._thread.is_alive()

    def says(self, tokens: list[int], **how: object) -> None:
        """Make every job answer with these tokens from now on."""
        self.gateway.play = lambda job: Play(tokens, **how)  # pyright: ignore[reportArgumentType]

    def plays(self, play: Callable[[Job], Play]) -> None:
        self.gateway.play = play

    @contextmanager
    def held_up(self) -> Iterator[None]:
        """Hold the server's event loop up: what is sent meanwhile is read in one turn."""
        loop, held, go_on = self._server.servers[0].get_loop(), threading.Event(), threading.Event()

        def hold() -> None:
            held.set()
            go_on.wait(10)

        loop.call_soon_threadsafe(hold)
        assert held.wait(10)
        yield
        go_on.set()

    @property
    def job(self) -> Job:
        """The last job that was submitted."""
        return self.gateway.jobs[-1]


def make_gateway(byte_dir: Path, piece_dir: Path) -> FakeGateway:
    files = {
        BYTE: model_files(BYTE, byte_dir, vocab=400),
        PIECE: model_files(PIECE, piece_dir, vocab=340),
    }
    return FakeGateway(files, {"nick": BYTE})
