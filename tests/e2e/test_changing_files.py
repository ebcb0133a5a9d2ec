"""What happens when checkpoints are added twice, replaced under the server, reloaded or broken."""

import json
import shutil
import threading
import urllib.error
import urllib.request
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from server_process import SPECIALISTS, ServerProcess, free_port, run_cli, wait_until

PROMPT = "sort: dcba =>"
ONE_MODEL_BYTES = 1_500_000
"""A pool that holds any one of the specialists but one, and no two of them."""
CHANGED = ("model.safetensors", "tokenizer.json", "config.json")
BROKEN = ("weights", "config", "tokenizer")


def call(server: ServerProcess, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    data = None if body is None else json.dumps(body).encode()
    json_type = {"content-type": "application/json"}
    request = urllib.request.Request(server.url + path, data, json_type, method=method)
    try:
        with urllib.request.urlopen(request, timeout=90) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def ask(server: ServerProcess, model: str, prompt: str = PROMPT) -> tuple[int, str]:
    """Status, and the text or the reason."""
    body = {"model": model, "prompt": prompt, "temperature": 0, "max_tokens": 20}
    status, answer = call(server, "POST", "/v1/completions", body)
    return status, answer["choices"][0]["text"] if status == 200 else answer["error"]["message"]


def copy(root: Path, name: str, of: str = "sorter-llama") -> Path:
    return Path(shutil.copytree(SPECIALISTS / of, root / name))


def scramble(directory: Path) -> None:
    """Replace the weights by others of the same shapes, as a new file of the same name."""
    path = directory / "model.safetensors"
    data = bytearray(path.read_bytes())
    begin = 8 + int.from_bytes(data[:8], "little")
    data[begin + 1 :: 2] = bytes(byte ^ 0x80 for byte in data[begin + 1 :: 2])  # signs, of bfloat16
    fresh = directory / "fresh"
    fresh.write_bytes(data)
    fresh.rename(path)


def write_catalog(tmp_path: Path, *names: str) -> Path:
    path = tmp_path / "catalog.toml"
    path.write_text("".join(f'[[models]]\nid = "{name}"\npath = "{name}"\n' for name in names))
    return path


def status_of(server: ServerProcess, name: str) -> dict[str, Any]:
    return next(model for model in server.state()["models"] if model["id"] == name)


@dataclass(frozen=True)
class Home:
    """A server, and the directory of its catalogue with a model in each folder. Each test has
    models of its own in it, and leaves the others alone."""

    server: ServerProcess
    root: Path


@contextmanager
def serving(
    root: Path, *names: str, args: tuple[str, ...] = (), settled: bool = False
) -> Generator[Home]:
    catalog = write_catalog(root, *names)
    with ServerProcess(
        *args, catalog=catalog, directory=root / "pool", slices=1, settled=settled
    ) as server:
        yield Home(server, root)


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    """Its pool holds one model at a time."""
    root = tmp_path_factory.mktemp("narrow")
    names = ["added", "in-turn", *CHANGED, "other"]
    for name in names:
        copy(root, name)
    with serving(root, *names, args=("--pool-bytes", str(ONE_MODEL_BYTES))) as home:
        yield home


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    """Its pool holds all of them."""
    root = tmp_path_factory.mktemp("roomy")
    names = ["beside", *BROKEN, "turns"]
    for name in names:
        copy(root, name)
    with serving(root, *names, settled=True) as home:
        yield home


# ---- adding twice -------------------------------------------------------------------------------


def test_a_duplicate_add_leaves_the_models_files_alone(narrow: Home) -> None:
    server = narrow.server
    scrambled = copy(narrow.root, "scrambled")
    scramble(scrambled)
    assert ask(server, "added") == (200, "abcd")
    entry = {"id": "added", "path": str(scrambled)}
    status, answer = call(server, "POST", "/admin/models", entry)
    assert status == 409, answer
    assert ask(server, "other") == (200, "abcd"), "this evicts the first one"
    assert ask(server, "added") == (200, "abcd")


def test_of_many_adds_at_once_one_wins_and_its_weights_answer(roomy: Home) -> None:
    server = roomy.server
    wrong = copy(roomy.root, "wrong")
    scramble(wrong)
    copy(roomy.root, "right")
    for round_ in range(3):
        name = f"raced-{round_}"
        answers: list[tuple[int, str]] = []

        def add(path: str, name: str = name, answers: list[Any] = answers) -> None:
            entry = {"id": name, "path": str(roomy.root / path)}
            answers.append((call(server, "POST", "/admin/models", entry)[0], path))

        paths = ["right", "wrong"] * 3
        threads = [threading.Thread(target=add, args=(path,)) for path in paths]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(status for status, _ in answers) == [201] + [409] * 5
        winner = next(path for status, path in answers if status == 201)
        status, text = ask(server, name)
        assert status == 200
        assert (text == "abcd") == (winner == "right")
        assert call(server, "DELETE", f"/admin/models/{name}")[0] == 200
        assert ask(server, name)[0] == 404


# ---- files replaced under the server ------------------------------------------------------------


@pytest.mark.parametrize("changed", CHANGED)
def test_files_replaced_while_cold_are_noticed(narrow: Home, changed: str) -> None:
    server, name, cold = narrow.server, changed, narrow.root / changed
    noticed = server.metric(r"c2cserve:model_files_changed_total")
    logged = len(server.logs())
    assert ask(server, name) == (200, "abcd")
    assert ask(server, "other") == (200, "abcd"), "this evicts the first one"
    if changed == "model.safetensors":
        scramble(cold)
    else:
        fields = json.loads((cold / changed).read_text())
        (cold / changed).write_text(json.dumps(fields, indent=7))
    status, reason = ask(server, name)
    assert status == 503, reason
    assert "changed on disk" in reason
    assert f"/admin/models/{name}/reload" in reason
    assert status_of(server, name)["state"] == "failed"
    assert "changed on disk" in status_of(server, name)["error"]
    assert server.metric(r"c2cserve:model_files_changed_total") >= noticed + 1
    assert any("changed on disk" in line["message"] for line in server.logs()[logged:])
    assert ask(server, "other") == (200, "abcd")
    assert call(server, "POST", f"/admin/models/{name}/reload")[0] == 200
    status, text = ask(server, name)
    assert status == 200
    assert (text == "abcd") == (changed != "model.safetensors")


# ---- reloading ----------------------------------------------------------------------------------


class Users(threading.Thread):
    """Ask again and again, and keep what was answered."""

    def __init__(self, server: ServerProcess, model: str) -> None:
        super().__init__()
        self.answers: list[tuple[int, str]] = []
        self._server, self._model = server, model
        self._stop_now = threading.Event()

    def run(self) -> None:
        while not self._stop_now.is_set():
            self.answers.append(ask(self._server, self._model))

    def end(self) -> None:
        self._stop_now.set()
        self.join()


@contextmanager
def users(server: ServerProcess, model: str, count: int) -> Generator[list[Users]]:
    threads = [Users(server, model) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield threads
    finally:
        for thread in threads:
            thread.end()


def stream(server: ServerProcess, model: str, tokens: int, first: threading.Event) -> list[str]:
    body = {
        "model": model, "prompt": PROMPT, "temperature": 0, "max_tokens": tokens, "stream": True,
        "ignore_eos": True,
    }  # fmt: skip
    request = urllib.request.Request(
        server.url + "/v1/completions", json.dumps(body).encode(),
        {"content-type": "application/json"},
    )  # fmt: skip
    pieces: list[str] = []
    with urllib.request.urlopen(request, timeout=60) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                first.set()
                pieces.append(json.loads(line[6:])["choices"][0]["text"])
    return pieces


def all_have_asked_again(asking: list[Users]) -> None:
    """Wait until each has two more answers: the second one's request was sent since the call."""
    before = [len(user.answers) for user in asking]
    wait_until(
        lambda: all(
            len(user.answers) >= count + 2 for user, count in zip(asking, before, strict=True)
        ),
        60, "all have asked again",
    )  # fmt: skip


@pytest.mark.parametrize("name", ["beside", "in-turn"])
def test_no_request_fails_during_a_reload(request: pytest.FixtureRequest, name: str) -> None:
    home: Home = request.getfixturevalue("roomy" if name == "beside" else "narrow")
    server = home.server
    first, pieces = threading.Event(), list[str]()
    models = {model["id"] for model in server.state()["models"]}
    plain = stream(server, name, 400, threading.Event())
    reader = threading.Thread(target=lambda: pieces.extend(stream(server, name, 400, first)))
    with users(server, name, 4) as asking:
        reader.start()
        assert first.wait(60)
        scramble(home.root / name)
        status, answer = call(server, "POST", f"/admin/models/{name}/reload")
        assert (status, answer["id"]) == (200, name)
        new = ask(server, name)
        assert new[0] == 200
        assert new[1] != "abcd", "from the switch on, the new weights answer"
        reader.join()
        all_have_asked_again(asking)
    answers = [answer for user in asking for answer in user.answers]
    assert {status for status, _ in answers} == {200}, answers
    assert {text for _, text in answers} == {"abcd", new[1]}
    assert "".join(pieces) == "".join(plain), "a stream ends on the weights it began with"
    wait_until(lambda: len(segments(server, name)) == 1, 60, "the old weights are gone")
    assert {model["id"] for model in server.state()["models"]} == models


def segments(server: ServerProcess, name: str) -> list[str]:
    files = [file for file in server.leftovers() if not file.endswith(".ctl")]
    return [file for file in files if file.split(".")[2].startswith(name)]


@pytest.mark.parametrize("broken", BROKEN)
def test_a_reload_that_fails_leaves_the_old_model_serving(roomy: Home, broken: str) -> None:
    server, name, directory = roomy.server, broken, roomy.root / broken
    assert ask(server, name) == (200, "abcd")
    if broken == "weights":
        weights = directory / "model.safetensors"
        (directory / "short").write_bytes(weights.read_bytes()[:-100])
        (directory / "short").rename(weights)
    elif broken == "config":
        (directory / "config.json").write_text('{"architectures": 5}')
    else:
        (directory / "tokenizer.json").write_text("{}")
    with users(server, name, 2) as asking:
        status, answer = call(server, "POST", f"/admin/models/{name}/reload")
        all_have_asked_again(asking)
    assert status == 400
    assert len(answer["error"]["message"]) > 20
    assert {answer for user in asking for answer in user.answers} == {(200, "abcd")}
    assert status_of(server, name)["state"] == "ready"


def test_reloads_and_a_removal_of_one_model_take_turns(roomy: Home) -> None:
    server = roomy.server
    statuses: list[int] = []

    def reload() -> None:
        statuses.append(call(server, "POST", "/admin/models/turns/reload")[0])

    threads = [threading.Thread(target=reload) for _ in range(4)]
    with users(server, "turns", 2) as asking:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert statuses == [200] * 4
    assert {answer for user in asking for answer in user.answers} == {(200, "abcd")}
    assert call(server, "DELETE", "/admin/models/turns")[0] == 200
    assert ask(server, "turns")[0] == 404
    entry = {"id": "turns", "path": str(roomy.root / "turns")}
    assert call(server, "POST", "/admin/models", entry)[0] == 201
    assert ask(server, "turns") == (200, "abcd")


# ---- the start ----------------------------------------------------------------------------------


def break_models(tmp_path: Path) -> dict[str, str]:
    """A directory for each way to be broken; what its reason must say."""
    truncated = copy(tmp_path, "truncated") / "model.safetensors"
    truncated.write_bytes(truncated.read_bytes()[:-100])
    (copy(tmp_path, "no-tokenizer") / "tokenizer.json").unlink()
    (copy(tmp_path, "bad-tokenizer") / "tokenizer.json").write_text("{}")
    copy(tmp_path, "too-large", "reverser-moe")
    return {
        "truncated": "truncated", "no-tokenizer": "no such file", "bad-tokenizer": "tokenizer.json",
        "too-large": "pool", "nowhere": "does not exist",
    }  # fmt: skip


def test_a_broken_model_is_failed_and_the_others_serve(tmp_path: Path) -> None:
    copy(tmp_path, "good")
    says = break_models(tmp_path)
    pool = ("--pool-bytes", str(ONE_MODEL_BYTES))
    with serving(tmp_path, "good", *says, args=pool, settled=True) as home:
        server = home.server
        assert ask(server, "good") == (200, "abcd")
        for name, reason in says.items():
            model = status_of(server, name)
            assert (model["state"], reason in model["error"]) == ("failed", True), model
            status, message = ask(server, name)
            assert status == 503
            assert reason in message
            assert any(name in line["message"] and reason in line["message"]
                       for line in server.logs())  # fmt: skip
            assert call(server, "POST", f"/admin/models/{name}/reload")[0] == 400
            labels = rf'\{{model_name="{name}",state="failed"\}}'
            assert server.metric("c2cserve:model_state" + labels) == 1
        listed = json.loads(server.get("/v1/models")[1])["data"]
        assert {card["id"]: card["state"] for card in listed} == {
            "good": "ready", **dict.fromkeys(says, "failed"),
        }  # fmt: skip
        shown = run_cli("models", "list", "--url", server.url)
        assert shown.returncode == 0, shown.stderr
        assert shown.stdout.count("failed: ") == len(says)
        shutil.copy(SPECIALISTS / "sorter-llama" / "tokenizer.json", tmp_path / "no-tokenizer")
        assert call(server, "POST", "/admin/models/no-tokenizer/reload")[0] == 200
        assert ask(server, "no-tokenizer") == (200, "abcd")
        assert call(server, "DELETE", "/admin/models/truncated")[0] == 200
        assert ask(server, "truncated")[0] == 404


def test_strict_ends_with_a_line_for_each_broken_model(tmp_path: Path) -> None:
    copy(tmp_path, "good")
    says = break_models(tmp_path)
    catalog = write_catalog(tmp_path, "good", *says)
    (tmp_path / "pool").mkdir()
    done = run_cli(
        "serve", "--strict", "--catalog", str(catalog), "--port", str(free_port()), "--slices", "1",
        "--pool-dir", str(tmp_path / "pool"), "--pool-bytes", str(ONE_MODEL_BYTES),
        "--gpu-slices", "none",
    )  # fmt: skip
    assert done.returncode == 2
    lines = [line for line in done.stderr.splitlines() if line.startswith("c2cserve: ")]
    assert len(lines) == len(says)
    for line, (name, reason) in zip(lines, says.items(), strict=True):
        assert name in line
        assert reason in line
    assert list((tmp_path / "pool").iterdir()) == []


# ---- sampling defaults --------------------------------------------------------------------------


def test_reload_reads_the_sampling_defaults_again(roomy: Home) -> None:
    directory = copy(roomy.root, "recommending")
    path = directory / "generation_config.json"
    fields = json.loads(path.read_text())
    chat = {"model": "recommending", "messages": [{"role": "user", "content": "sort: dcba"}]}

    def output() -> int:
        status, answer = call(roomy.server, "POST", "/v1/chat/completions", {**chat, **more})
        assert status == 200, answer
        return answer["usage"]["completion_tokens"]

    more = {"ignore_eos": True}
    for tokens in (3, 5):
        path.write_text(json.dumps({**fields, "temperature": 0, "max_new_tokens": tokens}))
        if tokens == 3:
            entry = {"id": "recommending", "path": str(directory)}
            status, answer = call(roomy.server, "POST", "/admin/models", entry)
            assert status == 201, answer
        else:
            status, answer = call(roomy.server, "POST", "/admin/models/recommending/reload")
            assert status == 200, answer
        assert output() == tokens
        said = f"generation_config.json sets temperature 0, max_new_tokens {tokens}"
        assert said in roomy.server.log.read_text()
    path.write_text(json.dumps({**fields, "temperature": "hot"}))
    status, answer = call(roomy.server, "POST", "/admin/models/recommending/reload")
    assert status == 400
    assert "temperature" in answer["error"]["message"]
    assert output() == 5, "the model goes on as before"
