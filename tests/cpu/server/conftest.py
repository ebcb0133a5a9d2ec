import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import small_tokenizers
from fake_gateway import FakeGateway
from served import Served, make_gateway
from text_forks import TextForks
from tokenizers import Tokenizer

from c2cserve.server.settings import ServerSettings
from c2cserve.server.text.start import TEXT_PROCESSES


@pytest.fixture(scope="session")
def byte_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_tokenizers.byte_level(tmp_path_factory.mktemp("byte"))


@pytest.fixture(scope="session")
def piece_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_tokenizers.sentencepiece_like(tmp_path_factory.mktemp("piece"))


@pytest.fixture(scope="session")
def _text_forks() -> Iterator[TextForks]:
    forks = TextForks()
    forks.start()
    yield forks
    forks.close()


@pytest.fixture(scope="module", autouse=True)
def _forked_texts(_text_forks: TextForks) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TEXT_PROCESSES, "_start", _text_forks.text)
        yield


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
