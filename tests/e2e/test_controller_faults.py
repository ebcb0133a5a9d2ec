"""The controller fails in a server whose workers are sound: at one request, or as a whole.

The server is a real one; it fails as files say (controller_faults/).
"""

import asyncio
import json
import signal
import urllib.error
import urllib.request
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from injected import Undisturbed, during, inject, recorded
from server_process import ServerProcess, wait_until
from streams import all_streams

FAULTS = Path(__file__).parent / "controller_faults"
MARK = 7
"""A token that no other prompt here has: that of "!"."""
MARKED = "sort: dcba!"
LENGTH = 13
"""Tokens that no other request here asks for."""
COUNTERS = ("controller_request_failures", "controller_restarts")


class Bench:
    """A server whose controller fails as it is told. Counters and logs are those since the bench
    was made: several tests may use the server."""

    def __init__(self, server: ServerProcess, faults: Path) -> None:
        self.server = server
        self.faults = faults
        self._counted = {name: self._metric(name) for name in COUNTERS}
        self._lines = len(server.logs())

    def fail(self, fault: str) -> None:
        (self.faults / fault).touch()

    def ask(self, prompt: str = "sort: dcba", tokens: int = 4) -> tuple[int, str]:
        """Status, and text or error, of one request."""
        body = {
            "model": "sorter-llama", "prompt": prompt, "max_tokens": tokens, "temperature": 0
        }  # fmt: skip
        request = urllib.request.Request(
            f"{self.server.url}/v1/completions", json.dumps(body).encode(),
            {"content-type": "application/json"},
        )  # fmt: skip
        try:
            with urllib.request.urlopen(request, timeout=90) as answer:
                return answer.status, json.load(answer)["choices"][0]["text"]
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)["error"]["message"]

    def counter(self, name: str) -> float:
        return self._metric(name) - self._counted[name]

    def _metric(self, name: str) -> float:
        return self.server.metric(f"c2cserve:{name}_total")

    def logged(self, words: str) -> list[dict[str, object]]:
        lines = self.server.logs()[self._lines :]
        return [line for line in lines if words in str(line.get("message"))]


@dataclass(frozen=True)
class Shared:
    """A server that outlives its faults, for several tests."""

    server: ServerProcess
    faults: Path
    undisturbed: Undisturbed

    def bench(self) -> Bench:
        """A bench without the faults of an earlier one."""
        for fault in self.faults.iterdir():
            fault.unlink()
        return Bench(self.server, self.faults)


@contextmanager
def failing(directory: Path, slices: int) -> Generator[Shared]:
    faults = directory / "faults"
    with pytest.MonkeyPatch.context() as monkeypatch:
        inject(monkeypatch, FAULTS, faults)
        with recorded(directory=directory, slices=slices) as (server, _):
            yield Shared(server, faults, Undisturbed(server))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    with failing(tmp_path_factory.mktemp("pair"), slices=2) as shared:
        yield shared


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Shared]:
    """A server of one slice, for one test."""
    with failing(tmp_path, slices=1) as shared:
        yield shared


@pytest.mark.parametrize("fault", ["encode", "receive"])
def test_a_request_that_cannot_be_handled_fails_alone(pair: Shared, fault: str) -> None:
    bench, undisturbed = pair.bench(), pair.undisturbed(16)
    bench.fail(f"{fault}-{MARK}")
    answers: list[tuple[int, str]] = []

    def strike() -> None:
        answers.extend(bench.ask(MARKED) for _ in range(2))

    assert during(bench.server.url, 16, strike) == undisturbed
    assert [status for status, _ in answers] == [500, 500]
    assert f"an injected fault: {fault}" in answers[0][1]
    assert bench.counter("controller_request_failures") == 2
    assert bench.counter("controller_restarts") == 0
    lines = bench.logged("cannot be handled")
    assert len(lines) == 2
    for line in lines:
        assert str(line["job"]) in str(line["message"])
        assert f"an injected fault: {fault}" in str(line["exception"])
    assert bench.server.state()["slices"][0]["restarts"] == 0
    wait_until(lambda: bench.server.state()["running"] == 0, 60, "nothing is left of them")


@pytest.mark.parametrize("slices", [pytest.param("alone", marks=pytest.mark.slow), "pair"])
def test_a_loop_that_breaks_starts_anew_and_loses_no_token(
    request: pytest.FixtureRequest, slices: str
) -> None:
    shared: Shared = request.getfixturevalue(slices)
    bench, undisturbed = shared.bench(), shared.undisturbed(24)
    pids = bench.server.worker_pids()

    def strike() -> None:
        for _ in range(2):
            bench.fail("decide")
            assert bench.ask()[0] == 200

    assert during(bench.server.url, 24, strike) == undisturbed
    assert bench.counter("controller_restarts") == 2
    assert bench.server.worker_pids() == pids, "workers live on"
    state = bench.server.state()
    assert state["counters"]["model_loads"] == len(state["models"]), "and so do weights"
    assert all(one["state"] == "ready" for one in state["models"])
    assert bench.counter("controller_request_failures") == 0
    moved = [line["jobs"] for line in bench.logged("the controller's loop started anew;")]
    assert any(moved), "it hit nothing in flight"
    assert bench.ask()[0] == 200
    assert bench.server.get("/health")[0] == bench.server.get("/ready")[0] == 200


def test_a_request_that_breaks_the_loop_is_found_and_fails(pair: Shared) -> None:
    bench, undisturbed = pair.bench(), pair.undisturbed(8)
    bench.fail(f"arrive-{LENGTH}")

    def strike() -> None:
        for _ in range(6):  # more often than a loop may break by itself
            status, reason = bench.ask(tokens=LENGTH)
            assert status == 500, reason
            assert "broke when it was told of this request" in reason

    assert during(bench.server.url, 8, strike) == undisturbed
    assert bench.counter("controller_request_failures") == 6
    assert bench.counter("controller_restarts") == 12
    assert bench.server.worker_pids()


def streams_in(bench: Bench) -> int:
    state = bench.server.state()
    return state["running"] + state["waiting"]


def test_a_model_that_is_removed_while_the_loop_breaks_is_gone(alone: Shared) -> None:
    bench = alone.bench()

    def strike() -> None:
        request = urllib.request.Request(
            f"{bench.server.url}/admin/models/sorter-llama", method="DELETE"
        )
        # What comes after the removal finds no model.
        wait_until(lambda: streams_in(bench) == 8, 60, "all streams are in", poll_s=0.005)
        bench.fail("decide")
        with urllib.request.urlopen(request, timeout=90) as answer:
            assert answer.status == 200

    assert all(during(bench.server.url, 8, strike, tokens=400))
    assert "sorter-llama" not in {one["id"] for one in bench.server.state()["models"]}
    assert bench.ask()[0] == 404


def test_a_drain_outlives_the_loop(alone: Shared) -> None:
    bench = alone.bench()
    undisturbed = asyncio.run(all_streams(bench.server.url, 8, 400))

    def strike() -> None:
        # A drain refuses what comes later.
        wait_until(lambda: streams_in(bench) == 8, 60, "all streams are in", poll_s=0.005)
        bench.fail("decide")
        bench.server.signal(signal.SIGTERM)

    assert during(bench.server.url, 8, strike, tokens=400) == undisturbed
    assert bench.server.wait(200) == 0
    assert bench.logged("starts anew")
    assert bench.server.leftovers() == []


def test_a_loop_that_breaks_again_and_again_ends_the_server(alone: Shared) -> None:
    bench = alone.bench()
    bench.fail("decides")
    bench.ask()
    assert bench.server.wait(60) == 1
    last = bench.server.log.read_text().splitlines()[-1]
    assert "the controller's loop broke 5 times within 60 s" in last
    assert "an injected fault: decides" in last
    assert bench.server.leftovers() == []
