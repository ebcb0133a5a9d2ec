"""Prefixes on GPU slices, in HBM and in host memory, are a key's own."""

import json
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from catalogue_files import pick, write_catalogue
from catalogue_server import Server

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]

KEYS = ("key-of-a-5f0c", "key-of-b-91be")
PROMPT = list(range(300, 700))
READY_S = 150.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, str]]:
    """A server of one small model with two keys, and the model's name."""
    folder = tmp_path_factory.mktemp("isolation")
    made = pick(1, 64 << 30, 28, (("llama-3b", 1),))
    arguments = [
        "--gpu-slices", "whole", "--gpu-kv-bytes", str(2 << 30), "--gpu-profile", "assumed",
        "--host-kv-bytes", str(1 << 30), "--pool-bytes", str(made.bytes + (256 << 20)),
        *(part for key in KEYS for part in ("--api-key", key)),
    ]  # fmt: skip
    process = Server(write_catalogue(folder, made), folder / "server.log", arguments)
    with process:
        process.wait_ready(READY_S, print)
        yield process, made.entries[0].id


def cached(server: tuple[Server, str], key: str, salt: str | None = None) -> int:
    """Prompt tokens that the server says it has reused."""
    process, model = server
    body = {"model": model, "prompt": PROMPT, "max_tokens": 1, "temperature": 0}
    if salt is not None:
        body["cache_salt"] = salt
    request = urllib.request.Request(
        f"{process.url}/v1/completions", json.dumps(body).encode(),
        {"content-type": "application/json", "authorization": f"Bearer {key}"},
    )  # fmt: skip
    with urllib.request.urlopen(request, timeout=60) as answer:
        usage = json.load(answer)["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def test_a_guess_at_another_key_s_prompt_shows_nothing(server: tuple[Server, str]) -> None:
    one, two = KEYS
    assert cached(server, one) == 0
    assert cached(server, two) == 0
    assert cached(server, one) > 0
    assert cached(server, one, "salt") == 0
    assert cached(server, two, "salt") == 0
    assert cached(server, one, "salt") > 0
    assert cached(server, two) > 0
