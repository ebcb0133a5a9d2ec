"""Keys of a running server: reloads under streams, revocation, usage, and no key in any log."""

import csv
import io
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from server_process import CATALOG, ServerProcess, free_port, run_cli, wait_until

LONG: dict[str, Any] = {
    "model": "chatter-qwen2", "prompt": "what is your name?", "temperature": 0, "max_tokens": 400,
    "extra_body": {"ignore_eos": True},
}  # fmt: skip
SHORT: dict[str, Any] = {"model": "sorter-llama", "prompt": "sort: dcba", "temperature": 0}


class Keys:
    """The keys file of a server, changed by the command line as an operator would."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "keys.json"
        self.log = directory / "usage.jsonl"
        self.texts: dict[str, str] = {}

    def add(self, name: str, *limits: str) -> str:
        done = run_cli("keys", "add", name, "--keys", str(self.path), *limits)
        assert done.returncode == 0, done.stderr
        self.texts[name] = done.stdout.strip()
        return self.texts[name]

    def revoke(self, name: str) -> None:
        assert run_cli("keys", "revoke", name, "--keys", str(self.path)).returncode == 0


class World:
    def __init__(self, server: ServerProcess, keys: Keys) -> None:
        self.server, self.keys = server, keys

    def client(self, name: str) -> openai.OpenAI:
        url, key = f"{self.server.url}/v1", self.keys.texts[name]
        return openai.OpenAI(base_url=url, api_key=key, max_retries=0)

    def reload_by_signal(self) -> None:
        done = self.server.metric(r"c2cserve:keys_reloads_total\{.*\}")
        self.server.signal(signal.SIGHUP)
        metric = self.server.metric
        wait_until(lambda: metric(r"c2cserve:keys_reloads_total\{.*\}") == done + 1, 60, "a reload")

    def reload_by_command(self) -> None:
        done = run_cli("keys", "reload", "--url", self.server.url)
        assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    directory = tmp_path_factory.mktemp("keys")
    keys = Keys(directory)
    keys.add("alice")
    keys.add("bob")
    options = ("--keys", str(keys.path), "--usage-log", str(keys.log), "--log-level", "debug")
    with ServerProcess(*options, directory=directory / "pool") as server:
        yield World(server, keys)


def text_of(stream: openai.Stream[Any]) -> str:
    return "".join(choice.text for chunk in stream for choice in chunk.choices)


@pytest.mark.parametrize("how", ["signal", "command"])
def test_reloads_and_revocation_under_streams(world: World, how: str) -> None:
    name = f"leaver-{how}"
    reload = world.reload_by_signal if how == "signal" else world.reload_by_command
    world.keys.add(name)
    with world.client(name) as leaver, world.client("bob") as bob:
        with pytest.raises(openai.AuthenticationError, match="Incorrect API key"):
            leaver.completions.create(**SHORT)
        reload()
        undisturbed = leaver.completions.create(**LONG).choices[0].text
        streams = [
            one.completions.create(stream=True, **LONG) for one in (leaver, bob) for _ in range(3)
        ]
        begun = [next(iter(stream)).choices[0].text for stream in streams]
        world.keys.revoke(name)
        reload()
        with pytest.raises(openai.AuthenticationError, match=f"'{name}' is revoked") as caught:
            leaver.completions.create(**SHORT)
        assert caught.value.code == "invalid_api_key"
        assert bob.completions.create(**SHORT).choices[0].text
        for first, stream in zip(begun, streams, strict=True):
            assert first + text_of(stream) == undisturbed


def test_a_broken_file_keeps_the_keys(world: World) -> None:
    before = world.keys.path.read_bytes()
    world.keys.path.write_text('{"version": 1, "keys": [{"name": "x"}]}')
    try:
        world.reload_by_signal()
        done = run_cli("keys", "reload", "--url", world.server.url)
        assert done.returncode == 1
        assert "keys[0] lacks the field 'id'" in done.stderr
        assert "stay in force" in done.stderr
        with world.client("alice") as alice:
            assert alice.completions.create(**SHORT).choices
        assert world.server.metric("c2cserve:keys_file_broken") == 1
        errors = [line for line in world.server.logs() if line["level"] == "error"]
        assert any("stay in force" in line["message"] for line in errors)
    finally:
        world.keys.path.write_bytes(before)
    world.reload_by_command()
    assert world.server.metric("c2cserve:keys_file_broken") == 0


def test_limits_of_one_key_are_not_the_others(world: World) -> None:
    world.keys.add(
        "small", "--requests-per-minute", "2", "--model", "sorter-*", "--concurrency", "1"
    )
    world.reload_by_command()
    with world.client("small") as small, world.client("alice") as alice:
        assert [model.id for model in small.models.list()] == ["sorter-llama"]
        assert len(alice.models.list().data) == 4
        with pytest.raises(openai.PermissionDeniedError) as forbidden:
            small.completions.create(**LONG)
        assert forbidden.value.code == "model_not_allowed"
        assert small.completions.create(**SHORT).choices
        with pytest.raises(openai.RateLimitError) as caught:
            small.completions.create(**SHORT)
        assert caught.value.param == "requests_per_minute"
        assert 1 <= int(caught.value.response.headers["retry-after"]) <= 30
        for _ in range(4):
            assert alice.completions.create(**SHORT).choices


def test_usage_is_what_clients_were_told(world: World) -> None:
    world.keys.add("billed")
    world.reload_by_command()
    sums = [0, 0, 0, 0]
    with world.client("billed") as billed:
        for body in (SHORT, {**SHORT, "n": 3}, SHORT, {**LONG, "max_tokens": 50}):
            usage = billed.completions.create(**body).usage
            assert usage is not None
            assert usage.prompt_tokens_details is not None
            cached = usage.prompt_tokens_details.cached_tokens or 0
            told = (1, usage.prompt_tokens, cached, usage.completion_tokens)
            sums = [before + more for before, more in zip(sums, told, strict=True)]
    shown = run_cli("keys", "usage", "--url", world.server.url, "--csv")
    assert usage_of(shown.stdout, "billed") == sums
    wait_until(lambda: world.keys.log.read_text().count('"key":"billed"') == 4, 60, "the usage log")
    logged = run_cli("keys", "usage", "--log", str(world.keys.log), "--csv")
    assert usage_of(logged.stdout, "billed") == sums


def usage_of(text: str, key: str) -> list[int]:
    rows = [row for row in csv.DictReader(io.StringIO(text)) if row["key"] == key]
    fields = ("requests", "prompt_tokens", "cached_tokens", "output_tokens")
    return [sum(int(row[field]) for row in rows) for field in fields]


def test_a_rotated_usage_log(world: World) -> None:
    old = world.keys.log.with_suffix(".1")
    with world.client("alice") as alice:
        alice.completions.create(**SHORT)
        wait_until(lambda: world.keys.log.exists() and world.keys.log.stat().st_size, 60, "a line")
        world.keys.log.rename(old)
        world.reload_by_signal()
        alice.completions.create(**SHORT)
    wait_until(lambda: world.keys.log.exists() and world.keys.log.stat().st_size, 60, "a new file")
    assert json.loads(world.keys.log.read_text().splitlines()[-1])["key"] == "alice"


def test_no_key_is_in_the_log(world: World) -> None:
    wrong = "sk-wrong-0123456789abcdef"
    bodies = [SHORT, {**SHORT, "temperature": 9}, {**SHORT, "model": "none"}, "x" * 100]
    for key in (*world.keys.texts.values(), wrong):
        for body in bodies:
            httpx.post(
                f"{world.server.url}/v1/completions", json=body,
                headers={"authorization": f"Bearer {key}"}, timeout=60,
            )  # fmt: skip
    shown = (
        world.server.log.read_text() + world.keys.log.read_text() + world.server.get("/metrics")[1]
    )
    assert '"key":"alice"' in shown
    for key in (*world.keys.texts.values(), wrong):
        assert key not in shown
        assert key[-20:] not in shown
    for field in ("salt", "sha256"):
        for entry in json.loads(world.keys.path.read_text())["keys"]:
            assert entry[field] not in shown


# ---- the start ----------------------------------------------------------------------------------


def start(tmp_path: Path, *args: str) -> tuple[int, str]:
    done = run_cli(
        "serve", "--catalog", str(CATALOG), "--port", str(free_port()), "--pool-dir",
        str(tmp_path), *args,
    )  # fmt: skip
    return done.returncode, done.stderr.strip()


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--keys", "{}/none.json"), "No such file"),
        (("--keys", "{}/open.json"), "chmod 600"),
        (("--keys", "{}/broken.json"), "broken.json"),
        (("--api-key", ""), "no key"),
        (("--api-key", " , "), "no key"),
        (("--usage-log", "{}"), "--usage-log"),
    ],
)
def test_what_would_leave_the_server_open_or_closed_is_an_error(
    tmp_path: Path, args: tuple[str, str], says: str
) -> None:
    for name, mode in (("open.json", 0o644), ("broken.json", 0o600)):
        path = tmp_path / name
        path.write_text("{")
        path.chmod(mode)
    code, message = start(tmp_path, *(arg.format(tmp_path) for arg in args))
    assert code == 2
    assert says in message
    assert len(message.splitlines()) == 1


@pytest.mark.parametrize("value", ["", " ", ","])
def test_a_variable_without_keys_does_not_open_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("C2CSERVE_API_KEYS", value)
    code, message = start(tmp_path)
    assert code == 2
    assert "C2CSERVE_API_KEYS" in message


def test_simple_keys_by_option_and_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("C2CSERVE_API_KEYS", "key-one, key-two")
    with ServerProcess(directory=tmp_path / "pool", slices=1) as server:
        for key, status in (("key-one", 200), ("key-two", 200), ("key-one, key-two", 401)):
            headers = {"authorization": f"bearer {key}"}
            assert (
                httpx.get(f"{server.url}/v1/models", headers=headers, timeout=60).status_code
                == status
            )
        listed = json.loads(server.get("/admin/keys")[1])["keys"]
        assert [one["source"] for one in listed] == ["option", "option"]
        assert len({one["tenant"] for one in listed}) == 2
        assert "key-one" not in server.log.read_text() + server.get("/admin/keys")[1]
