"""Published systems in a live server: every answer is right, and their decisions replay."""

import asyncio
import json
import time
from collections import Counter
from pathlib import Path
from typing import get_args

import openai
import pytest
from server_process import ServerProcess, paused, run_cli, wait_until
from streams import MODELS, TIMEOUT_S, all_streams, stream_text

from c2cserve.core.policy_names import PolicyName
from c2cserve.runtime.replay import RecordLines, replay

REQUESTS, TOKENS = 16, 60
SINGLE = 1
MOVED = "c2cserve:consolidated_requests_total"
OFTEN = {"slinfer", "serverlessllm", "aegaeon"}
PUBLISHED = [
    pytest.param(name, marks=() if name in OFTEN else pytest.mark.slow)
    for name in get_args(PolicyName) if name != "c2cserve"
]  # fmt: skip


@pytest.fixture(scope="module")
def expected(server: ServerProcess) -> list[str]:
    """The answers of a server with our own policy."""
    return asyncio.run(all_streams(server.url, REQUESTS, TOKENS))


def actions_of(record: Path) -> Counter[str]:
    found: Counter[str] = Counter()
    for _, line in RecordLines(record):
        found.update(kind for kind, _ in line.get("actions", ()))
    return found


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_answer_is_right_and_the_record_replays(
    name: str, expected: list[str], tmp_path: Path
) -> None:
    record = tmp_path / "record.jsonl"
    args = ["--record", str(record)]
    if name == "superinfer":
        args += ["--host-kv-bytes", str(16 << 20)]
    runs = "sllm+c" if name == "serverlessllm" else name
    with ServerProcess(*args, directory=tmp_path / "pool", policy=name) as server:
        assert asyncio.run(all_streams(server.url, REQUESTS, TOKENS)) == expected
        _, metrics = server.get("/metrics")
        assert f'c2cserve:policy_info{{policy="{runs}"}} 1.0' in metrics
        assert server.metric("c2cserve:instances_started_total") >= len(MODELS)
        turns = server.metric(r"c2cserve:slice_turns_total\{.*\}")
        assert (turns > len(MODELS)) == (name == "aegaeon")
        if name in ("slinfer", "sllm+c"):
            # An instance without requests ends by itself.
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline and any(
                one["active_models"] for one in server.state()["slices"]
            ):
                time.sleep(0.1)
            assert not any(one["active_models"] for one in server.state()["slices"])
    result = replay(record)
    assert result.equal, [stream.difference for stream in result.streams]
    done = actions_of(record)
    assert done["Dispatch"] >= REQUESTS
    assert (done["ResizeKv"] > 0) == (name == "slinfer")
    header = json.loads(record.read_text().splitlines()[0])
    assert header["arguments"]["policy"] == runs


async def _crowd(server: ServerProcess) -> list[str]:
    """Return what one stream of a model answers beside a crowd of another model's."""
    async with openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S
    ) as client:
        await client.models.list()
        begun = asyncio.Event()
        single = asyncio.create_task(stream_text(server.url, SINGLE, 400, begun))
        await begun.wait()
        with paused(await asyncio.to_thread(server.worker_pids)):
            crowd = asyncio.create_task(
                client.completions.create(
                    model=MODELS[0], prompt="sort: dcba", n=20, max_tokens=400, temperature=0,
                    extra_body={"ignore_eos": True},
                )
            )  # fmt: skip
            await asyncio.to_thread(
                wait_until, lambda: server.metric(MOVED) > 0, 40, "a request is taken back"
            )
        return [await single, *(choice.text for choice in (await crowd).choices)]


def test_a_request_that_slinfer_moves_loses_and_repeats_nothing(
    server: ServerProcess, tmp_path: Path
) -> None:
    """Two models on a slice, and the memory that its books have is not enough for both."""
    alone = asyncio.run(stream_text(server.url, SINGLE, 400))
    record = tmp_path / "record.jsonl"
    args = ("--record", str(record), "--kv-bytes", str(4 << 20))
    with ServerProcess(*args, directory=tmp_path / "pool", policy="slinfer") as slinfer:
        answers = asyncio.run(_crowd(slinfer))
        moved = slinfer.metric(MOVED)
        assert slinfer.metric("c2cserve:recalled_requests_total") == moved
    assert answers[0] == alone
    assert len(set(answers[1:])) == 1
    assert actions_of(record)["Preempt"] == moved == 1
    assert replay(record).equal


def test_what_a_policy_cannot_do_here_is_said() -> None:
    catalog = str(Path(__file__).parents[2] / "examples" / "specialists" / "catalog.toml")
    base = ("serve", "--catalog", catalog, "--port", "0", "--gpu-slices", "none")
    for args, words in (
        (("--policy", "sllm+c+s"), "sllm+c+s"),
        (("--policy", "slinfer", "--burst", "1"), "--burst"),
        (("--policy", "superinfer"), "--host-kv-bytes"),
    ):
        done = run_cli(*base, *args)
        assert done.returncode == 2, done
        assert words in done.stdout + done.stderr
