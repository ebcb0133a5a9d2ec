"""The catalogue while it is served: listing, adding, removing, reloading, evicting."""

import json
import shutil
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import openai
import pytest
from server_process import SPECIALISTS, ServerProcess, paused, run_cli, wait_until


def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def ask(server: ServerProcess, model: str, prompt: str = "sort: dcba =>") -> str:
    with client(server) as api:
        answer = api.completions.create(model=model, prompt=prompt, temperature=0, max_tokens=20)
    return answer.choices[0].text


def call(server: ServerProcess, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    data = None if body is None else json.dumps(body).encode()
    json_type = {"content-type": "application/json"}
    request = urllib.request.Request(server.url + path, data, json_type, method=method)
    try:
        with urllib.request.urlopen(request, timeout=90) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def test_add_use_remove_while_serving(server: ServerProcess) -> None:
    entry = {"id": "org/second", "aliases": ["s2"], "path": str(SPECIALISTS / "sorter-llama")}
    assert call(server, "POST", "/admin/models", entry)[0] == 201
    assert ask(server, "s2") == "abcd", "usable at once: it loads on demand"
    assert call(server, "POST", "/admin/models", entry)[0] == 409
    with client(server) as api:
        assert {"org/second", "sorter-llama"} <= {model.id for model in api.models.list()}
        assert api.models.retrieve("org/second").id == "org/second"
    status, reloaded = call(server, "POST", "/admin/models/org/second/reload")
    assert (status, reloaded["id"]) == (200, "org/second")
    assert ask(server, "org/second") == "abcd"
    assert call(server, "DELETE", "/admin/models/org/second")[0] == 200
    with pytest.raises(openai.NotFoundError):
        ask(server, "s2")
    assert not [name for name in server.leftovers() if "second" in name]
    done = run_cli("models", "list", "--url", server.url, "--json")
    assert done.returncode == 0, done.stderr
    assert "sorter-llama" in done.stdout


def test_a_bad_entry_is_refused_and_says_why(server: ServerProcess) -> None:
    for entry, says in (
        ({"id": "x", "path": "/nowhere"}, "/nowhere"),
        ({"id": "x", "pth": "/nowhere"}, "pth"),
        ({"path": "/nowhere"}, "id"),
    ):
        status, answer = call(server, "POST", "/admin/models", entry)
        assert status == 400
        assert says in answer["error"]["message"]


def test_removing_drains_first(server: ServerProcess) -> None:
    entry = {"id": "leaving", "path": str(SPECIALISTS / "sorter-llama")}
    assert call(server, "POST", "/admin/models", entry)[0] == 201
    with client(server) as api:
        stream = api.completions.create(
            model="leaving", prompt="sort: dcba =>", temperature=0, max_tokens=300, stream=True,
            extra_body={"ignore_eos": True}, stream_options={"include_usage": True},
        )  # fmt: skip
        next(iter(stream))
        removed: list[int] = []
        remover = threading.Thread(
            target=lambda: removed.append(call(server, "DELETE", "/admin/models/leaving")[0])
        )
        with paused(server.worker_pids()):  # else the stream may be over before anything is seen
            remover.start()
            wait_until(
                lambda: "draining" in [m["state"] for m in server.state()["models"]], 60, "draining"
            )
            with pytest.raises(openai.NotFoundError):
                ask(server, "leaving")
        used = [chunk.usage.completion_tokens for chunk in stream if chunk.usage is not None]
        assert used == [300]
        remover.join(60)
        assert removed == [200]


def in_state(server: ServerProcess, state: str) -> list[str]:
    return [model["id"] for model in server.state()["models"] if model["state"] == state]


def test_more_models_than_the_pool_holds(tmp_path: Path) -> None:
    """Least recently used models leave the pool and come back; every answer stays right."""
    catalog = tmp_path / "catalog.toml"
    names = [f"m{i}" for i in range(6)]
    for name in names:
        shutil.copytree(SPECIALISTS / "sorter-llama", tmp_path / name)
    catalog.write_text("".join(f'[[models]]\nid = "{n}"\npath = "{n}"\n' for n in names))
    pool = tmp_path / "pool"
    args = ("--pool-bytes", str(4_000_000))
    with ServerProcess(*args, catalog=catalog, directory=pool, slices=1, settled=False) as server:
        for _ in range(2):
            for name in names:
                assert ask(server, name) == "abcd"
        # An answer may be there before the last check of the files it was made with.
        wait_until(lambda: not in_state(server, "loading"), 60, "all loads are complete")
        state = server.state()
        assert state["pool_used_bytes"] <= 4_000_000
        assert state["counters"]["model_evictions"] >= 6
        assert in_state(server, "ready") == ["m3", "m4", "m5"]
        segments = [n for n in server.leftovers() if n.split(".")[2][0] == "m" and ".ctl" not in n]
        assert len(segments) == 3


def test_a_model_outside_of_a_pool_of_busy_models_gets_its_turn(tmp_path: Path) -> None:
    """Clients ask for one model without a break. It leaves for another one, and comes back."""
    catalog = tmp_path / "catalog.toml"
    for name in ("busy", "quiet"):
        shutil.copytree(SPECIALISTS / "sorter-llama", tmp_path / name)
    catalog.write_text(
        "".join(f'[[models]]\nid = "{n}"\npath = "{n}"\n' for n in ("busy", "quiet"))
    )
    answers, over = list[str](), threading.Event()

    def keep_asking(tokens: int) -> None:
        with client(server) as api:
            while not over.is_set():
                answer = api.completions.create(
                    model="busy", prompt="sort: dcba =>", temperature=0, max_tokens=tokens,
                    extra_body={"ignore_eos": True},
                )  # fmt: skip
                answers.append(answer.choices[0].text[:4])

    args = ("--pool-bytes", str(1_500_000))
    pool = tmp_path / "pool"
    with ServerProcess(*args, catalog=catalog, directory=pool, slices=1, settled=False) as server:
        users = [threading.Thread(target=keep_asking, args=(150 + 30 * i,)) for i in range(4)]
        for user in users:
            user.start()
        try:
            wait_until(lambda: len(answers) > 5, 60, "busy is asked for")
            for _ in range(3):
                began = time.monotonic()
                assert ask(server, "quiet") == "abcd"
                assert time.monotonic() - began < 10.0
                # Else it may still be there when it is asked for again. Each user may have an
                # answer that came before.
                back = len(answers) + len(users) + 1
                wait_until(lambda back=back: len(answers) >= back, 60, "busy has come back")
        finally:
            over.set()
            for user in users:
                user.join(60)
        assert server.state()["counters"]["model_evictions"] >= 5
    assert set(answers) == {"abcd"}


def test_workers_share_one_copy_of_the_weights(server: ServerProcess) -> None:
    """Summed over all processes, the proportional size of the segments is one copy of them."""
    for name in ("sort", "add", "reverse", "chat"):
        ask(server, name)
    state = server.state()
    pids = [server.process.pid, *server.worker_pids()]
    shared = sum(proportional_bytes(pid, str(server.directory)) for pid in pids)
    assert shared <= 1.05 * state["pool_used_bytes"]


def proportional_bytes(pid: int, directory: str) -> int:
    total, inside = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            inside = directory in line
        elif inside and line.startswith("Pss:"):
            total += int(line.split()[1]) * 1024
    return total


@pytest.mark.alone
def test_a_client_that_leaves_frees_its_request(server: ServerProcess) -> None:
    with client(server) as api:
        stream = api.completions.create(
            model="sort", prompt="sort: dcba =>", max_tokens=480, stream=True,
            extra_body={"ignore_eos": True, "min_tokens": 480},
        )  # fmt: skip
        next(iter(stream))
        started = time.monotonic()
        stream.close()
    wait_until(lambda: server.state()["running"] == 0, 2, "the request is gone", poll_s=0.005)
    assert time.monotonic() - started < 1.0
    wait_until(
        lambda: all(s["kv_used_bytes"] == 0 for s in server.state()["slices"]), 2, "its KV is free"
    )
