"""A conversation whose KV was pushed out of a small arena comes back out of host memory."""

import os
import signal
from pathlib import Path
from random import Random
from typing import Any

import httpx
from server_process import ServerProcess, run_cli, wait_until

MODEL = "sorter-llama"
TURN, NEW = 160, 4
"""Tokens of each turn of a conversation, and of each answer."""


def tokens_of(seed: int, count: int) -> list[int]:
    random = Random(seed)
    return [random.randint(5, 90) for _ in range(count)]


def ask(server: ServerProcess, prompt: list[int], **extra: str) -> tuple[str, int]:
    """Return the answer and the prompt's tokens that were not computed."""
    body: dict[str, Any] = {
        "model": MODEL, "prompt": prompt, "max_tokens": NEW, "temperature": 0.8, "seed": 7,
        "ignore_eos": True, **extra,
    }  # fmt: skip
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).json()
    details = answer["usage"]["prompt_tokens_details"] or {}
    return answer["choices"][0]["text"], details.get("cached_tokens") or 0


def metric(server: ServerProcess, name: str) -> float:
    return server.metric(rf'c2cserve:slice_{name}{{slice="cpu0"}}')


def test_a_conversation_comes_back_after_it_was_pushed_out(
    server: ServerProcess, tmp_path: Path
) -> None:
    """The arena is one slab of 170 blocks; others' prompts come to 12 x 30."""
    record = tmp_path / "record.jsonl"
    tight = ("--kv-bytes", str(2 << 20), "--host-kv-bytes", str(32 << 20), "--record", str(record))
    with ServerProcess(*tight, directory=tmp_path / "tight", slices=1) as small:
        first = tokens_of(1, TURN)
        assert ask(small, first)[1] == 0
        for seed in range(12):
            ask(small, tokens_of(100 + seed, 3 * TURN))
        second = first + tokens_of(2, TURN)
        text, cached = ask(small, second)
        assert cached == TURN, "the first turn came back"
        assert text == ask(server, second)[0]
        assert metric(small, "cached_host_tokens_total") == TURN
        assert metric(small, "prefix_host_hits_total") == 1
        assert metric(small, "prefix_in_bytes_total") > 0
        assert metric(small, "prefix_host_bytes") > metric(small, "kv_total_bytes")
        assert ask(small, second, cache_salt="another")[1] == 0, "it is another's"
        assert metric(small, "prefix_host_hits_total") == 1

        [worker] = small.worker_pids()
        os.kill(worker, signal.SIGKILL)
        wait_until(lambda: small.worker_pids() not in ([], [worker]), 60, "another worker")
        small.wait_ready()
        assert ask(small, second) == (text, 0), "the tier went with its worker"
        assert ask(small, second)[1] > 0
    replayed = run_cli("replay", str(record))
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert '"BringPrefix"' in record.read_text()
