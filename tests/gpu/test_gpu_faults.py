"""A GPU slice fails in the middle of answers: it is rebuilt, and nobody sees more than a pause.

The server is a real one; its workers break a step of their own when told to (faults/).
"""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from catalogue_client import Answer, Client, Compared, Question, question
from catalogue_files import Entry, pick, write_catalogue
from catalogue_server import Server
from gpu_models import config_of

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]

SHAPE, LAYERS_DIVIDED = "llama-3b", 28
PROMPT, TOKENS, HIT_AT = 12, 600, 8
READY_S, BACK_S = 150.0, 90.0
FAULTS, TESTS = Path(__file__).parent / "faults", Path(__file__).parents[1]


class Bench:
    """A server with two models, and the ways to break its slices."""

    def __init__(self, folder: Path, layout: str) -> None:
        made = pick(2, 64 << 30, LAYERS_DIVIDED, ((SHAPE, 1),))
        self.models: tuple[Entry, ...] = made.entries
        self.faults = folder / "faults"
        self.faults.mkdir()
        arguments = ["--gpu-slices", layout, "--gpu-kv-bytes", str(2 << 30), "--gpu-profile"]
        arguments += ["assumed", "--pool-bytes", str(made.bytes + (256 << 20))]
        self.log = folder / "server.log"
        self.server = Server(write_catalogue(folder, made), self.log, arguments)

    def questions(self) -> list[Question]:
        vocab = config_of(SHAPE).vocab
        return [
            question(entry.id, SHAPE, vocab, PROMPT, TOKENS, f"fault {turn}")
            for turn in range(3) for entry in self.models
        ]  # fmt: skip

    def slices(self) -> dict[str, dict[str, Any]]:
        return {one["id"]: one for one in self.server.state()["slices"]}

    def break_step(self, fault: str) -> Callable[[Answer], Awaitable[None]]:
        async def break_it(_: Answer) -> None:
            (self.faults / fault).touch()

        return break_it

    async def kill(self, answer: Answer) -> None:
        await asyncio.to_thread(self.server.kill_worker, answer.slice)


async def all_answers(
    bench: Bench, strike: Callable[[Answer], Awaitable[None]] | None = None
) -> list[Answer]:
    """All questions at once; `strike` in the middle of the first one's answer."""
    first, *others = bench.questions()
    async with Client(bench.server.url) as client:
        return await asyncio.gather(
            client.ask(first, HIT_AT, strike), *(client.ask(one) for one in others)
        )


def check(bench: Bench, strike: Callable[[Answer], Awaitable[None]]) -> dict[str, int]:
    """Every answer is as without the fault. Returns how often each slice that failed was rebuilt,
    all of them in new processes."""
    alone = asyncio.run(all_answers(bench))
    before, counted = bench.slices(), bench.server.metrics()
    struck = asyncio.run(all_answers(bench, strike))
    deadline = time.monotonic() + BACK_S
    while any(one["state"] != "up" for one in bench.slices().values()):
        assert time.monotonic() < deadline, bench.server.last_words()
        time.sleep(0.1)
    compared = Compared()
    for answer, like in zip(struck, alone, strict=True):
        compared.add(answer, like)
    assert compared.equal == len(struck), compared.wrong
    after, now = bench.slices(), bench.server.metrics()
    rebuilt = {
        name: after[name]["restarts"] - before[name]["restarts"]
        for name in before if after[name]["pid"] != before[name]["pid"]
    }  # fmt: skip
    lost, resumed = "c2cserve:slice_lost_total", "c2cserve:resumed_requests_total"
    assert now[lost] - counted.get(lost, 0) >= len(rebuilt)
    assert now[resumed] > counted[resumed], "the fault hit nothing under way"
    assert not list(bench.faults.iterdir()), "the fault was taken"
    assert not any(alive(before[name]["pid"]) for name in rebuilt)
    return rebuilt


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    yield from bench_with(tmp_path_factory.mktemp("whole"), "whole")


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    yield from bench_with(tmp_path_factory.mktemp("parts"), "32x2@0")


def bench_with(folder: Path, layout: str) -> Iterator[Bench]:
    bench = Bench(folder, layout)
    with pytest.MonkeyPatch.context() as patch:
        paths = [str(FAULTS), str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
        patch.setenv("PYTHONPATH", os.pathsep.join(paths))
        patch.setenv("C2CSERVE_TEST_FAULTS", str(bench.faults))
        with bench.server:
            bench.server.wait_ready(READY_S, print)
            yield bench


def test_a_kernel_that_writes_nowhere_ends_its_process(whole: Bench) -> None:
    """The error sticks to the process: it serves no second request. No other slice notices."""
    rebuilt = check(whole, whole.break_step("address"))
    assert list(rebuilt.values()) == [1]
    assert "illegal memory access" in whole.log.read_text()


def test_a_slice_without_memory_is_rebuilt(whole: Bench) -> None:
    rebuilt = check(whole, whole.break_step("memory"))
    assert list(rebuilt.values()) == [1]
    assert "OutOfMemoryError" in whole.log.read_text()


def test_a_killed_worker_loses_no_token(whole: Bench) -> None:
    assert list(check(whole, whole.kill).values()) == [1]


def test_a_server_whose_slices_failed_ends_as_it_should(
    whole: Bench, record_property: Callable[[str, object], None]
) -> None:
    process = whole.server._running
    began_s = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    record_property("seconds from SIGTERM to the end", time.monotonic() - began_s)
    ends = [line for line in whole.log.read_text().splitlines() if "all workers ended" in line]
    assert len(ends) == 1
    record_property("of which for workers", ends[0])


def test_a_capture_that_fails_once_is_not_noticed(tmp_path: Path) -> None:
    """The first graph of a new server is captured with many requests under way. The capture
    fails, its step is launched kernel by kernel, and every answer is as without the fault."""
    with contextmanager(bench_with)(tmp_path, "whole@0") as bench:
        (bench.faults / "capture").touch()
        struck = asyncio.run(all_answers(bench))
        assert not list(bench.faults.iterdir()), "a graph was captured"
        counted = bench.server.metrics()
        alone = asyncio.run(all_answers(bench))
        after = bench.server.metrics()
        restarts = [one["restarts"] for one in bench.slices().values()]
    compared = Compared()
    for answer, like in zip(struck, alone, strict=True):
        compared.add(answer, like)
    assert compared.equal == len(struck), compared.wrong
    failures, graphs = "graph_capture_failures_total", "graph_steps_total"
    log = bench.log.read_text()
    captures = [line for line in log.splitlines() if "capture" in line or "by kernel" in line]
    failed = [each[f"c2cserve:slice_{failures}"] for each in (counted, after)]
    assert failed == [1, 1], "\n".join(captures)
    assert counted["c2cserve:slice_step_failures_total"] == 0
    assert after[f"c2cserve:slice_{graphs}"] > counted[f"c2cserve:slice_{graphs}"] > 0
    assert not any(restarts)
    assert "an injected fault in the middle of a capture" in log


def test_parts_of_a_gpu_fall_and_rise_together(parts: Bench) -> None:
    assert set(check(parts, parts.kill)) == set(parts.slices())
