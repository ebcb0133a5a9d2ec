"""Steps fail inside a worker that lives on: requests are tried again, and the fault is pinned down.

The server is a real one; its workers' steps fail as files say (step_faults/).
"""

import asyncio
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
from injected import Undisturbed, during, inject, recorded
from server_process import ServerProcess, run_cli, wait_until
from streams import all_streams, stream_text

FAULTS = Path(__file__).parent / "step_faults"
MARK = 7
"""A token that no other prompt here has: that of "!"."""
MARKED = "sort: dcba!"
COUNTERS = ("step_failures", "step_retries", "retries_failed", "parts_rebuilt")


class Bench:
    """A server whose steps fail as it is told. Its counters are those since the bench was made:
    several tests may use the server."""

    def __init__(self, server: ServerProcess, faults: Path) -> None:
        self.server = server
        self.faults = faults
        self._counted = dict.fromkeys(COUNTERS, 0.0)
        self._counted = self.counters()

    def fail(self, fault: str) -> None:
        (self.faults / fault).touch()

    def mend(self) -> None:
        for path in self.faults.iterdir():
            path.unlink()

    def counters(self) -> dict[str, float]:
        _, text = self.server.get("/metrics")
        assert all(f"c2cserve:slice_{name}_total" in text for name in COUNTERS)
        return {
            name: self.server.metric(rf"c2cserve:slice_{name}_total{{.*}}") - before
            for name, before in self._counted.items()
        }

    def ask(self, model: str, prompt: object = "x", tokens: int = 4) -> tuple[int, str, str]:
        """Status, text or error, and Retry-After of one request."""
        body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
        request = urllib.request.Request(
            f"{self.server.url}/v1/completions", json.dumps(body).encode(),
            {"content-type": "application/json"},
        )  # fmt: skip
        try:
            with urllib.request.urlopen(request, timeout=90) as answer:
                return answer.status, json.load(answer)["choices"][0]["text"], ""
        except urllib.error.HTTPError as error:
            message = json.load(error)["error"]["message"]
            return error.code, message, error.headers.get("retry-after", "")

    def model(self, name: str) -> dict[str, Any]:
        return next(m for m in self.server.state()["models"] if m["id"] == name)


Start = Callable[..., AbstractContextManager[Bench]]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    faults = tmp_path / "faults"
    inject(monkeypatch, FAULTS, faults)

    @contextmanager
    def started(*args: str, slices: int = 1) -> Iterator[Bench]:
        with recorded(*args, directory=tmp_path, slices=slices) as (server, _):
            yield Bench(server, faults)

    return started


@dataclass(frozen=True)
class Shared:
    """A server of one slice that outlives its faults, for several tests."""

    server: ServerProcess
    faults: Path
    undisturbed: Undisturbed

    @contextmanager
    def bench(self) -> Iterator[Bench]:
        bench = Bench(self.server, self.faults)
        try:
            yield bench
        finally:
            bench.mend()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    directory = tmp_path_factory.mktemp("steps")
    with pytest.MonkeyPatch.context() as monkeypatch:
        inject(monkeypatch, FAULTS, directory / "faults")
        with recorded(directory=directory, slices=1) as (server, _):
            yield Shared(server, directory / "faults", Undisturbed(server))


def test_a_step_that_fails_once_is_not_noticed(shared: Shared) -> None:
    with shared.bench() as bench:
        assert set(bench.counters().values()) == {0.0}
        undisturbed = shared.undisturbed(16)
        assert set(bench.counters().values()) == {0.0}
        assert during(bench.server.url, 16, lambda: bench.fail("once")) == undisturbed
        counters = bench.counters()
        assert counters["step_failures"] == 1
        assert counters["step_retries"] >= 1
        assert counters["retries_failed"] == 0
        state = bench.server.state()
        assert state["slices"][0]["restarts"] == 0
        assert bench.server.get("/health")[0] == 200
        assert all(one["state"] == "ready" for one in state["models"])


def test_a_request_that_always_fails_fails_alone(shared: Shared) -> None:
    with shared.bench() as bench:
        undisturbed = shared.undisturbed(16)
        bench.fail(f"token-{MARK}")
        answers: list[tuple[int, str, str]] = []

        def strike() -> None:
            answers.extend(bench.ask("sorter-llama", MARKED) for _ in range(2))

        assert during(bench.server.url, 16, strike) == undisturbed
        assert [status for status, _, _ in answers] == [500, 500]
        assert "injected fault" in answers[0][1]
        assert bench.counters()["retries_failed"] == 2
        assert bench.model("sorter-llama")["state"] == "ready"
        assert bench.server.state()["slices"][0]["restarts"] == 0


def test_a_stream_that_fails_in_the_middle_says_so(shared: Shared) -> None:
    with shared.bench() as bench:
        undisturbed = shared.undisturbed(8)

        async def marked() -> list[str]:
            async with openai.AsyncOpenAI(
                base_url=f"{bench.server.url}/v1", api_key="none", max_retries=0
            ) as client:
                chunks = await client.completions.create(
                    model="sorter-llama", prompt=MARKED, max_tokens=200, stream=True,
                    temperature=0, extra_body={"ignore_eos": True},
                )  # fmt: skip
                parts: list[str] = []
                error = ""
                try:
                    async for chunk in chunks:
                        parts += [choice.text for choice in chunk.choices]
                        if len(parts) == 5:
                            bench.fail(f"token-{MARK}")
                except openai.APIError as caught:
                    error = str(caught)
                assert "injected fault" in error
                return parts

        async def scenario() -> tuple[list[str], list[str]]:
            return await asyncio.gather(marked(), all_streams(bench.server.url, 8, 200))

        parts, texts = asyncio.run(scenario())
        assert len(parts) >= 5
        assert texts == undisturbed


@pytest.mark.parametrize("slices", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_model_that_always_fails_is_given_up_and_tried_again(start: Start, slices: int) -> None:
    with start(slices=slices) as bench:
        undisturbed = asyncio.run(all_streams(bench.server.url, 3, 200))
        right = bench.ask("chatter-qwen2", "what is your name?")
        bench.fail("model-chatter-qwen2")
        answers: list[tuple[int, str, str]] = []

        def strike() -> None:
            while not answers or answers[-1][0] != 503:
                answers.append(bench.ask("chatter-qwen2", "what is your name?"))
                assert len(answers) < 20

        async def others() -> list[str]:
            begun = asyncio.Event()
            streams = asyncio.create_task(all_streams(bench.server.url, 3, 200, begun))
            await begun.wait()
            await asyncio.to_thread(strike)
            return await streams

        assert asyncio.run(others()) == undisturbed
        assert {status for status, _, _ in answers[:-1]} == {500}
        assert 3 <= len(answers) - 1 <= 3 * slices + 2
        _, reason, retry_after = answers[-1]
        assert "fails on every slice" in reason
        assert "injected fault" in reason
        assert int(retry_after) >= 1
        assert bench.model("chatter-qwen2")["state"] == "failed"
        assert "injected fault" in bench.model("chatter-qwen2")["error"]
        assert "failed" in run_cli("models", "list", "--url", bench.server.url).stdout
        cards = json.loads(bench.server.get("/v1/models")[1])["data"]
        assert {one["id"]: one["state"] for one in cards}["chatter-qwen2"] == "failed"
        status, text = bench.server.get("/health")
        assert status == 200, text
        assert "chatter-qwen2" in text
        assert bench.ask("sorter-llama")[0] == 200
        bench.mend()
        wait_until(lambda: bench.ask("chatter-qwen2", "what is your name?") == right, 60, "back")
        wait_until(lambda: bench.model("chatter-qwen2")["state"] == "ready", 60, "ready", 0.2)


def test_a_slice_on_which_nothing_works_is_replaced(start: Start) -> None:
    with start() as bench:
        right = bench.ask("sorter-llama", "sort: dcba")
        pid = bench.server.worker_pids()[0]
        bench.fail("all")
        seen: set[int] = set()
        over = threading.Event()

        def look() -> None:
            if bench.server.get("/health")[0] == bench.server.get("/ready")[0] == 503:
                seen.add(0)

        def watch() -> None:  # all the time: on a quiet machine it lasts for 20 ms
            while not over.wait(0.001):
                look()

        watching = threading.Thread(target=watch)
        watching.start()
        try:
            deadline = time.monotonic() + 120
            while not (restarts := bench.server.state()["slices"][0]["restarts"]):
                assert time.monotonic() < deadline
                statuses = {bench.ask(model)[0] for model in ("sorter-llama", "adder-qwen")}
                if not bench.server.state()["slices"][0]["restarts"]:
                    seen |= statuses  # a process that has just begun may not have its faults yet
                look()
            wait_until(lambda: 0 in seen, 30, "it is seen while it is down")
        finally:
            over.set()
            watching.join()
        assert {0, 500} <= seen <= {0, 500, 503}
        assert restarts >= 1
        bench.mend()
        wait_until(lambda: bench.ask("sorter-llama", "sort: dcba") == right, 60, "works again")
        assert pid not in bench.server.worker_pids()
        assert bench.server.get("/health")[0] == bench.server.get("/ready")[0] == 200


def test_health_tells_of_a_slice_without_progress(start: Start) -> None:
    with start("--stall-timeout", "1", slices=2) as bench:
        bench.fail("slow")

        async def scenario() -> None:
            stream = asyncio.create_task(stream_text(bench.server.url, 0, 2))

            def slices() -> dict[str, dict[str, str]]:
                status, text = bench.server.get("/health")
                assert status == 200, "the other slice is sound"
                return json.loads(text)["slices"]

            def stalled() -> bool:
                return any("no step was done" in one["trouble"] for one in slices().values())

            await asyncio.to_thread(wait_until, stalled, 60, "a slice is in trouble")
            bench.mend()
            await stream
            assert not await asyncio.to_thread(stalled)

        asyncio.run(scenario())
