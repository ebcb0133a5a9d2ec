"""A server that hostile checkpoints are added to says no, and otherwise goes on as if nothing was.

One server for all cases: what one of them breaks, the next ones see.
"""

import json
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hostile_checkpoints import Generator, deep
from server_process import SPECIALISTS, ServerProcess

SEED = int(os.environ.get("HOSTILE_SEED", "0"))
PROMPT = "sort: dcba =>"


def send(server: ServerProcess, method: str, path: str, data: bytes | None) -> tuple[int, Any]:
    json_type = {"content-type": "application/json"}
    request = urllib.request.Request(server.url + path, data, json_type, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def ask(server: ServerProcess, model: str, prompt: Any = PROMPT) -> tuple[int, str]:
    body = {"model": model, "prompt": prompt, "temperature": 0, "max_tokens": 8}
    status, answer = send(server, "POST", "/v1/completions", json.dumps(body).encode())
    return status, answer["choices"][0]["text"] if status == 200 else answer["error"]["message"]


class HealthChecks(threading.Thread):
    """Ask for the server's health all the time; keep what was late or not well."""

    def __init__(self, server: ServerProcess, limit_s: float) -> None:
        super().__init__()
        self._limit_s = limit_s
        self.problems: list[str] = []
        self.asked = 0
        self._server = server
        self.ended = threading.Event()

    def run(self) -> None:
        while not self.ended.wait(0.02):
            began = time.monotonic()
            try:
                status, _ = self._server.get("/health", timeout_s=60)
            except OSError as error:
                status = str(error)
            took_s = time.monotonic() - began
            self.asked += 1
            if status != 200 or took_s > self._limit_s:
                self.problems.append(f"{status} after {took_s:.2f} s")


@pytest.fixture(scope="module")
def victim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    directory = tmp_path_factory.mktemp("hostile")
    catalog = directory / "catalog.toml"
    catalog.write_text(f'[[models]]\nid = "good"\npath = "{SPECIALISTS / "sorter-llama"}"\n')
    roots = ("--model-root", str(tmp_path_factory.getbasetemp()))
    args = ("--pool-bytes", str(64 << 20), "--kv-bytes", str(100 << 20), *roots)
    with ServerProcess(*args, catalog=catalog, directory=directory / "pool", slices=1) as server:
        yield server


@pytest.mark.parametrize(
    ("every", "health_s"), [(5, 10.0), pytest.param(1, 1.0, marks=pytest.mark.slow)]
)
def test_no_checkpoint_harms_a_running_server(
    victim: ServerProcess, tmp_path: Path, every: int, health_s: float
) -> None:
    """One checkpoint in `every` of those that the seed makes. Health answers within `health_s`,
    which is generous where other tests have the cores."""
    made = Generator(tmp_path, SPECIALISTS / "adder-qwen", SEED).cases()
    cases = islice(made, 0, None, every)
    pids = victim.worker_pids()
    health = HealthChecks(victim, health_s)
    health.start()
    problems: list[str] = []
    added = refused = 0
    try:
        for what, entry in cases:
            body = json.dumps(entry).encode()
            late = len(health.problems)
            status, answer = send(victim, "POST", "/admin/models", body)
            if status == 201:
                added += 1
                problems += try_model(victim, what, entry["id"])
            else:
                refused += 1
                message = answer["error"]["message"]
                if status != 400 or "internal" in message or not 10 < len(message) < 3000:
                    problems.append(f"{what}: {status} {message[:300]}")
            if ask(victim, "good") != (200, "abcd"):
                problems.append(f"{what}: the good model does not answer as before")
            problems += [f"{what}: health {one}" for one in health.problems[late:]]
    finally:
        health.ended.set()
        health.join()
    assert not problems, "\n".join(problems)
    assert victim.worker_pids() == pids, "a worker died"
    assert refused >= 200 // every
    assert added >= 10 // every
    assert health.asked > 100 // every
    assert [model["id"] for model in victim.state()["models"]] == ["good"]
    tracebacks = [text for line in victim.logs() if "Traceback" in (text := json.dumps(line))]
    assert not tracebacks, tracebacks[0]


def try_model(server: ServerProcess, what: str, name: str) -> list[str]:
    """What is wrong with how an odd model that was taken answers."""
    problems: list[str] = []
    for prompt in (PROMPT, [1, 5, 9]):
        status, text = ask(server, name, prompt)
        if status == 500 and "values that are not numbers" in text and "weights of" in what:
            continue  # it says what is wrong with the weights
        if status not in (200, 400) or "internal" in text:
            problems.append(f"{what}: it answered {status} {text[:300]}")
        elif text == "abcd":
            problems.append(f"{what}: another model's weights answered")
    status, _ = send(server, "DELETE", f"/admin/models/{name}", None)
    return problems if status == 200 else [*problems, f"{what}: removing it answered {status}"]


@pytest.mark.parametrize(
    "body",
    [
        b"", b"null", b"[]", b"7", b"{", deep(100_000), deep(900, "{"), b'{"id": 5}', b"\xff\xfe",
        b'{"id": "x", "path": "\\ud800"}', b'{"id": "x", "path": ' + b"9" * 5000 + b"}",
        b'{"id": "x", "path": "' + b"p" * 1_000_000 + b'"}',
    ],
    ids=range(12),
)  # fmt: skip
def test_bodies_that_are_no_entries_are_refused(victim: ServerProcess, body: bytes) -> None:
    status, answer = send(victim, "POST", "/admin/models", body)
    assert status == 400, answer
    assert "internal" not in answer["error"]["message"]
    assert ask(victim, "good") == (200, "abcd")
