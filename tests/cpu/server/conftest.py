import logging
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import openai
import pytest
import uvicorn

sys.path.insert(0, str(Path(__file__).parent))

import small_tokenizers
from fake_gateway import FakeGateway, Play, model_files
from tokenizers import Tokenizer

from c2cserve.core.request import Job
from c2cserve.server.app import create_app
from c2cserve.server.settings import ServerSettings

BYTE, PIECE = "org/byte", "piece"


@pytest.fixture(scope="session")
def byte_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_tokenizers.byte_level(tmp_path_factory.mktemp("byte"))


@pytest.fixture(scope="session")
def piece_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_tokenizers.sentencepiece_like(tmp_path_factory.mktemp("piece"))


class Served:
    """A real uvicorn on a real socket, in a thread of its own."""

    def __init__(self, gateway: FakeGateway, settings: ServerSettings) -> None:
        self.gateway = gateway
        app = create_app(gateway, settings)
        config = uvicorn.Config(
            app, host="127.0.0.1", port=0, log_config=None, access_log=False, lifespan="off",
            http="httptools", timeout_graceful_shutdown=1,
        )  # fmt: skip
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)

    def __enter__(self) -> "Served":
        self._thread.start()
        while not self._server.started:
            assert self._thread.is_alive()
            self._thread.join(0.005)
        self.port = int(self._server.servers[0].sockets[0].getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}"
        self.http = httpx.Client(base_url=self.url)
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()
        self.client.close()
        self._server.should_exit = True
        self._thread.join(10)
        assert not self._thread.is_alive()

    def says(self, tokens: list[int], **how: object) -> None:
        """From now on every job answers with these tokens."""
        self.gateway.play = lambda job: Play(tokens, **how)  # pyright: ignore[reportArgumentType]

    def plays(self, play: Callable[[Job], Play]) -> None:
        self.gateway.play = play

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


@pytest.fixture(scope="module")
def _served(byte_dir: Path, piece_dir: Path) -> Iterator[Served]:
    with Served(make_gateway(byte_dir, piece_dir), ServerSettings()) as served:
        yield served


@pytest.fixture
def served(_served: Served) -> Served:
    """One server per file; every test begins with a gateway that remembers nothing."""
    fresh = FakeGateway(dict(_served.gateway.files), dict(_served.gateway.aliases))
    vars(_served.gateway).update(vars(fresh))
    return _served


@pytest.fixture(scope="session")
def byte(byte_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(byte_dir / "tokenizer.json"))


@pytest.fixture(scope="session")
def piece(piece_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(piece_dir / "tokenizer.json"))


@pytest.fixture(autouse=True)
def _quiet() -> None:
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
