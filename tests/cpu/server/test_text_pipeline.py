"""Text processes are sent requests ahead of their answers, and no request waits for a slow one."""

import asyncio
import errno
import json
import os
import signal
import time
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
import uvloop
from fake_gateway import model_files
from late_loop import LateLoop
from small_tokenizers import sentencepiece_like

from c2cserve.runtime.gateway import ModelFiles
from c2cserve.server.errors import ApiError
from c2cserve.server.settings import RequestLimits, TextSettings
from c2cserve.server.text.claims import PATIENCE_S, Claim
from c2cserve.server.text.messages import FromText, Target, TextRequest, TextResult
from c2cserve.server.text.pipeline import Displaced, TextProcess
from c2cserve.server.text.pool import TextPool
from c2cserve.server.text.start import TEXT_PROCESSES, StartedText

ENDLESS = "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}"
SLOW_OR_ENDLESS = (
    "{% set turns = {'slow': 200, 'endless': 90000}[messages[0].content] | default(1) %}"
    "{% for a in range(turns) %}{% for b in range(90000) %}{% endfor %}{% endfor %}a"
)
"""By the message: half a second, for ever, or no time."""


@pytest.fixture
async def pool(monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[TextPool]:
    """All of its processes are started."""
    monkeypatch.setattr("c2cserve.server.text.pool._ANOTHER_S", 0.0)
    made = TextPool(TextSettings(timeout_s=1.0), 8)
    made.start()
    await asyncio.sleep(0.01)
    assert len(made.pids) == 2
    yield made
    await made.close()


def files_of(folder: Path, name: str) -> ModelFiles:
    return model_files(name, folder, vocab=340)


async def tokenized(pool: TextPool, files: ModelFiles, prompt: str) -> tuple[int, ...]:
    body = json.dumps({"model": "m", "prompt": prompt}).encode()
    work = TextRequest("completions", body, Target.of(files), RequestLimits())
    answer, _ = await pool.work(work, files, "prompt")
    assert isinstance(answer, TextResult)
    return tuple(answer.prompts[0].tokens)


async def chat(pool: TextPool, files: ModelFiles) -> None:
    body = b'{"model":"m","messages":[{"role":"user","content":"a"}]}'
    work = TextRequest("chat", body, Target.of(files), RequestLimits())
    await pool.work(work, files, "messages")


async def test_a_late_loop_does_not_hold_up_a_process(pool: TextPool, byte_dir: Path) -> None:
    """Every turn of the loop takes 10 ms: there are fewer turns than requests."""
    files = files_of(byte_dir, "m")
    await tokenized(pool, files, "a")
    prompts = [str(number) * (number + 1) for number in range(64)]
    async with LateLoop(0.01) as late:
        found = await asyncio.gather(*(tokenized(pool, files, prompt) for prompt in prompts))
    assert late.turns < 64
    alone = [await tokenized(pool, files, prompt) for prompt in prompts]
    assert found == alone, "each has its own answer"
    assert not pool.killed.total()


async def test_what_is_sent_behind_a_slow_request_goes_elsewhere(
    pool: TextPool, byte_dir: Path, tmp_path: Path
) -> None:
    folder = sentencepiece_like(tmp_path)
    (folder / "chat_template.jinja").write_text(ENDLESS)
    slow, quick = files_of(folder, "slow"), files_of(byte_dir, "quick")
    await asyncio.gather(*(tokenized(pool, files, "a") for files in (slow, quick, slow, quick)))
    began_s = time.monotonic()
    endless = asyncio.create_task(chat(pool, slow))
    await asyncio.sleep(0)
    others = [asyncio.create_task(tokenized(pool, quick, str(number))) for number in range(20)]
    await asyncio.gather(*others)
    assert time.monotonic() - began_s < 0.9, "before the slow one's limit"
    with pytest.raises(ApiError, match="took longer than 1 s"):
        await endless
    assert pool.killed == {"timeout": 1, "broken": 0, "cancelled": 0}
    assert await tokenized(pool, slow, "a")


async def test_a_process_that_ends_takes_one_request_with_it(
    pool: TextPool, byte_dir: Path
) -> None:
    files = files_of(byte_dir, "m")
    await tokenized(pool, files, "a")
    asked = [asyncio.create_task(tokenized(pool, files, "word " * 30)) for _ in range(12)]
    await asyncio.sleep(0)
    for pid in pool.pids:
        os.kill(pid, signal.SIGKILL)
    found = await asyncio.gather(*asked, return_exceptions=True)
    failed = [one for one in found if isinstance(one, BaseException)]
    assert {one.status for one in failed if isinstance(one, ApiError)} <= {500}
    assert len(failed) <= 2, "one of each process at most"
    assert await tokenized(pool, files, "a")


async def test_a_process_that_cannot_be_started_is_started_later(
    pool: TextPool, byte_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Descriptors or processes may be used up when one is to be replaced."""
    files = files_of(byte_dir, "m")
    assert await tokenized(pool, files, "a")

    def take(memory_bytes: int) -> StartedText:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as shortage:
        shortage.setattr(TEXT_PROCESSES, "take", take)
        for pid in pool.pids:
            os.kill(pid, signal.SIGKILL)
        asked = asyncio.create_task(tokenized(pool, files, "a"))
        async with asyncio.timeout(20):
            while pool.pids:
                await asyncio.sleep(0.01)
    await asyncio.gather(asked, return_exceptions=True)
    async with asyncio.timeout(20):
        assert await tokenized(pool, files, "a")
        while len(pool.pids) < 2:
            await asyncio.sleep(0.01)


async def test_the_second_process_is_not_started_before_it_is_of_use(
    byte_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would take processor time from the first answer of a server."""
    monkeypatch.setattr("c2cserve.server.text.pool._ANOTHER_S", 600.0)
    pool = TextPool(TextSettings(processes=2), 8)
    pool.start()
    files = files_of(byte_dir, "m")
    try:
        assert await tokenized(pool, files, "a")
        assert len(pool.pids) == 1, "one request at a time"
        await asyncio.gather(*(tokenized(pool, files, "a") for _ in range(2)))
        assert len(pool.pids) == 2, "the first one was busy"
    finally:
        await pool.close()


async def test_the_second_process_is_started_soon(
    byte_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("c2cserve.server.text.pool._ANOTHER_S", 0.01)
    pool = TextPool(TextSettings(processes=2), 8)
    pool.start()
    async with asyncio.timeout(20):
        while len(pool.pids) < 2:
            await asyncio.sleep(0.01)
    await pool.close()


async def test_clients_that_leave_cost_no_process(pool: TextPool, byte_dir: Path) -> None:
    files = files_of(byte_dir, "m")
    await tokenized(pool, files, "a")
    pids = pool.pids
    asked = [asyncio.create_task(tokenized(pool, files, "word")) for _ in range(40)]
    await asyncio.sleep(0.001)
    for one in asked[::2]:
        one.cancel()
    found = await asyncio.gather(*asked, return_exceptions=True)
    assert all(isinstance(one, tuple) for one in found[1::2])
    await asyncio.sleep(0.3)
    assert pool.pids == pids
    assert await tokenized(pool, files, "a")


async def test_an_endless_request_whose_client_left_is_ended(
    pool: TextPool, byte_dir: Path, tmp_path: Path
) -> None:
    folder = sentencepiece_like(tmp_path)
    (folder / "chat_template.jinja").write_text(ENDLESS)
    slow, quick = files_of(folder, "slow"), files_of(byte_dir, "quick")
    await tokenized(pool, slow, "a")
    endless = asyncio.create_task(chat(pool, slow))
    await asyncio.sleep(0.05)
    endless.cancel()
    deadline_s = time.monotonic() + 10
    while not pool.killed["cancelled"]:
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.01)
    assert await tokenized(pool, quick, "a")


async def test_a_request_that_needs_a_process_to_itself_gets_one_in_its_turn(
    pool: TextPool, byte_dir: Path, tmp_path: Path
) -> None:
    """Its tokenizer is loaded nowhere yet, and others never leave a process idle."""
    busy = [files_of(byte_dir, name) for name in ("a", "b")]
    await asyncio.gather(*(tokenized(pool, files, "a") for files in busy))
    answered = 0

    async def flood(files: ModelFiles) -> None:
        nonlocal answered
        while True:
            await tokenized(pool, files, "word " * 20)
            answered += 1

    floods = [asyncio.create_task(flood(files)) for files in busy for _ in range(24)]
    while answered < 50:
        await asyncio.sleep(0)
    async with asyncio.timeout(20):
        assert await tokenized(pool, files_of(sentencepiece_like(tmp_path), "new"), "a")
    for one in floods:
        one.cancel()
    await asyncio.gather(*floods, return_exceptions=True)


async def test_what_is_sent_to_a_stopped_process_goes_elsewhere(
    pool: TextPool, byte_dir: Path
) -> None:
    """What was sent to it goes to the other one, and so does what comes later, until the process is
    replaced."""
    files = [files_of(byte_dir, name) for name in ("a", "b", "c")]
    await asyncio.gather(*(tokenized(pool, one, "a") for one in files))
    await asyncio.gather(*(tokenized(pool, one, "a") for one in files * 8))
    stopped = pool.pids[0]
    os.kill(stopped, signal.SIGSTOP)
    asked = [asyncio.create_task(tokenized(pool, one, "b")) for one in files * 8]
    await asyncio.sleep(0.3)
    asked += [asyncio.create_task(tokenized(pool, one, "c")) for one in files * 8]
    async with asyncio.timeout(20):
        found = await asyncio.gather(*asked, return_exceptions=True)
    failed = [one for one in found if isinstance(one, BaseException)]
    assert len(failed) <= 1, "the one that it worked for took too long"
    assert await tokenized(pool, files[0], "a")
    assert stopped not in pool.pids


async def test_nothing_waits_behind_a_request_whose_asker_has_gone(tmp_path: Path) -> None:
    """A process is slow with one request, so the next one goes elsewhere. The process comes to
    that one all the same, and never ends it: whatever is asked then is sent away."""
    folder = sentencepiece_like(tmp_path)
    (folder / "chat_template.jinja").write_text(SLOW_OR_ENDLESS)
    files = files_of(folder, "slow")
    settings = TextSettings()
    process = TextProcess(settings, lambda *_: None)

    def ask(content: str) -> asyncio.Task[FromText]:
        message = {"model": "m", "messages": [{"role": "user", "content": content}]}
        work = TextRequest("chat", json.dumps(message).encode(), Target.of(files), RequestLimits())
        claim = Claim("slow", files.key, 100)
        return asyncio.create_task(process.ask(work, claim, 60.0))

    try:
        async with asyncio.timeout(60):
            first = Claim("slow", files.key, 100)
            await process.open(files, first, (), 60.0)
            slow, endless = ask("slow"), ask("endless")
            with pytest.raises(Displaced):
                await endless
            assert isinstance(await slow, TextResult)
            while process.lost is None:
                await asyncio.sleep(0.01)
        with pytest.raises(Displaced):
            async with asyncio.timeout(5):
                await ask("later")
    finally:
        await process.end()


def test_a_very_late_loop_takes_no_process_for_slow(byte_dir: Path) -> None:
    """Every turn of the loop takes longer than a slow request. uvloop calls what is due before it
    reads, so an answer that has been waiting must not count as missing."""

    async def turns() -> int:
        made = TextPool(TextSettings(), 8)
        made.start()
        files = [files_of(byte_dir, name) for name in ("a", "b", "c", "d")]
        for one in files * 2:
            await tokenized(made, one, "a")
        async with LateLoop(1.2 * PATIENCE_S) as late:
            await asyncio.gather(*(tokenized(made, one, "word") for one in files * 32))
        await made.close()
        return late.turns

    assert uvloop.run(turns()) < 32, "one at a time would take 64 on two processes, or more"
