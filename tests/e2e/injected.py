"""Servers whose processes fail as files say, and whose record must replay to the same decisions."""

import asyncio
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from server_process import ServerProcess
from streams import all_streams

from c2cserve.runtime.replay import replay

TESTS = Path(__file__).parents[1]
"""Where `after_import` is."""


def inject(monkeypatch: pytest.MonkeyPatch, code: Path, faults: Path) -> None:
    """Servers started from now on load the `sitecustomize` in `code`, which reads `faults`."""
    faults.mkdir()
    paths = [str(code), str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setenv("C2CSERVE_TEST_FAULTS", str(faults))


@contextmanager
def recorded(*args: str, directory: Path, slices: int) -> Iterator[tuple[ServerProcess, Path]]:
    """A server and its record, which is replayed when the server has ended."""
    record = directory / "record.jsonl"
    with ServerProcess(
        "--record", str(record), *args, directory=directory / "pool", slices=slices
    ) as server:
        yield server, record
    result = replay(record)
    assert result.equal, [stream.difference for stream in result.streams]


class Undisturbed:
    """The streams of a server to which nothing happens, computed once."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        self._texts: list[str] = []

    def __call__(self, count: int) -> list[str]:
        """The texts of the first so many streams: each is its own whatever runs beside it."""
        if count > len(self._texts):
            self._texts = asyncio.run(all_streams(self._server.url, count, 200))
        return self._texts[:count]


def during(url: str, count: int, strike: Callable[[], object], tokens: int = 200) -> list[str]:
    """Streams of all models, and what happens in the middle of them."""

    async def scenario() -> list[str]:
        begun = asyncio.Event()
        streams = asyncio.create_task(all_streams(url, count, tokens, begun))
        await begun.wait()
        await asyncio.to_thread(strike)
        return await streams

    return asyncio.run(scenario())
