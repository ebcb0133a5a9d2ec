"""What a server gives to whom: other tenants' prefixes, administration, files, keys."""

import json
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from server_process import SPECIALISTS, ServerProcess, run_cli, wait_until

PROMPT = "the words that both of them ask for, again and again, " * 2
KEY_A, KEY_B, ADMIN = "key-of-a-5f0c", "key-of-b-91be", "key-of-admin-77d2"
HUB = "token-of-a-hub-3e44"
SECRETS = (KEY_A, KEY_B, ADMIN, HUB)


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("access") / "record.jsonl"


@pytest.fixture(scope="module")
def locked(record: Path) -> Iterator[ServerProcess]:
    """Two keys on the command line, the administrator's and a hub's in the environment; the log
    has all there is to tell."""
    variables = {"C2CSERVE_ADMIN_KEY": ADMIN, "HF_TOKEN": HUB}
    wrapper = ["env", *(f"{name}={value}" for name, value in variables.items())]
    args = ("--api-key", KEY_A, f"--api-key={KEY_B}", "--log-level", "debug")
    with ServerProcess(
        *args, "--record", str(record), directory=record.parent / "pool", slices=1,
        wrapper=wrapper, admin_key=ADMIN,
    ) as server:  # fmt: skip
        yield server


def cached(server: ServerProcess, key: str, prompt: str, **extra: str) -> int:
    """Prompt tokens that the server says it has reused."""
    url = f"{server.url}/v1"
    with openai.OpenAI(base_url=url, api_key=key, max_retries=0) as client:
        answer = client.completions.create(
            model="chatter-qwen2", prompt=prompt, max_tokens=1, temperature=0, extra_body=extra
        )
    assert answer.usage is not None
    details = answer.usage.prompt_tokens_details
    assert details is not None
    return details.cached_tokens or 0


def test_a_guess_at_another_key_s_prompt_shows_nothing(locked: ServerProcess) -> None:
    assert cached(locked, KEY_A, PROMPT) == 0
    assert cached(locked, KEY_B, PROMPT) == 0
    assert cached(locked, KEY_A, PROMPT) > 0
    assert cached(locked, KEY_B, PROMPT) > 0


def test_nor_does_one_at_another_salt_s(locked: ServerProcess) -> None:
    prompt = "users of one application who trust each other less, " * 2
    assert cached(locked, KEY_A, prompt, cache_salt="user-1") == 0
    assert cached(locked, KEY_A, prompt, cache_salt="user-2") == 0
    assert cached(locked, KEY_A, prompt) == 0
    assert cached(locked, KEY_B, prompt, cache_salt="user-1") == 0
    assert cached(locked, KEY_A, prompt, cache_salt="user-1") > 0


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Two keys that share their prefixes, an administrator's key, and metrics for everybody."""
    directory = tmp_path_factory.mktemp("opened")
    path = directory / "admin.key"
    path.write_text(ADMIN + "\n")
    path.chmod(0o600)
    args = ("--api-key", KEY_A, "--api-key", KEY_B, "--shared-cache")
    access = ("--admin-key-file", str(path), "--open-metrics")
    with ServerProcess(
        *args, *access, directory=directory / "pool", slices=1, admin_key=ADMIN
    ) as server:
        yield server


def test_a_shared_cache_is_asked_for(opened: ServerProcess) -> None:
    assert cached(opened, KEY_A, PROMPT) == 0
    assert cached(opened, KEY_B, PROMPT) > 0
    assert cached(opened, KEY_B, PROMPT, cache_salt="x") == 0


# ---- keys ---------------------------------------------------------------------------------------


def test_keys_are_neither_shown_nor_handed_on(locked: ServerProcess) -> None:
    """Not in `ps`, not to children, not in logs, not in shared memory."""
    pids = locked.children()
    assert len(pids) >= 3, "a worker, and text processes"
    for pid in pids:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
        assert b"PATH=" in environment
        assert not [one for one in SECRETS if one.encode() in environment]
    for pid in (locked.process.pid, *pids):
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        assert not [one for one in SECRETS if one.encode() in command]
    command = Path(f"/proc/{locked.process.pid}/cmdline").read_bytes()
    hidden = b"--api-key\0" + b"x" * len(KEY_A) + b"\0--api-key=" + b"x" * len(KEY_B)
    assert hidden + b"\0--log-level\0debug" in command
    for key, status in ((KEY_A, 200), (KEY_B, 200), (ADMIN, 401), (HUB, 401)):
        headers = {"authorization": f"Bearer {key}"}
        answer = httpx.get(f"{locked.url}/v1/models", headers=headers, timeout=60)
        assert answer.status_code == status
    log = locked.log.read_text()
    assert "no place for a key" in log
    assert not [one for one in SECRETS if one in log]
    for file in locked.directory.iterdir():
        assert file.stat().st_mode & 0o077 == 0
        content = file.read_bytes()
        assert not [one for one in SECRETS if one.encode() in content]


def test_a_record_tells_no_prompts(locked: ServerProcess, record: Path) -> None:
    """Lengths, times and salted hashes; of prompts nothing that can be guessed at, and no key."""
    from c2cserve.server.text.tokenizer import Tokenizer

    prompt = "nothing of these words is written down, whatever else is; " * 2
    tokens = Tokenizer(SPECIALISTS / "chatter-qwen2").encode(prompt)
    cached(locked, KEY_A, prompt)
    assert record.stat().st_mode & 0o777 == 0o600
    arrived: list[Any] = []

    def there() -> bool:
        lines = [json.loads(one) for one in record.read_text().splitlines()]
        events = [event for line in lines for event in line.get("events", ())]
        arrived[:] = [fields["request"] for name, fields in events if name == "Arrived"]
        return bool(arrived) and arrived[-1]["prompt_len"] == len(tokens)

    wait_until(there, 60, "the request is recorded")
    text = record.read_text() + locked.log.read_text()
    assert not [one for one in (*SECRETS, "these words") if one in text]
    tokenizer = Tokenizer(SPECIALISTS / "chatter-qwen2", arrived[-1]["model"])
    assert len(arrived[-1]["prefix_hashes"]) == len(tokens) // 16
    assert not set(tokenizer.prefix_hashes(tokens)) & set(arrived[-1]["prefix_hashes"])
    assert ", ".join(map(str, tokens[:6])) not in text
    assert ",".join(map(str, tokens[:6])) not in text


@pytest.mark.parametrize(
    ("content", "mode", "says"),
    [(b"good\n", 0o644, "chmod o-rwx"), (b"", 0o600, "one key"), (b"two keys", 0o600, "one key"),
     (b"\xff", 0o600, "ASCII"), (None, 0o600, "No such file")],
)  # fmt: skip
def test_a_key_file_that_is_none(
    tmp_path: Path, content: bytes | None, mode: int, says: str
) -> None:
    path = tmp_path / "key"
    if content is not None:
        path.write_bytes(content)
        path.chmod(mode)
    done = run_cli(
        "serve", "--catalog", str(SPECIALISTS / "catalog.toml"), "--admin-key-file", str(path)
    )
    assert done.returncode == 2
    assert says in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


# ---- what is open without keys ------------------------------------------------------------------


def address() -> str:
    """This machine's own that is no loopback address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has loopback addresses only")
        return str(probe.getsockname()[0])


def test_all_addresses_without_keys(tmp_path: Path) -> None:
    """A loud warning, once; and other machines see neither /admin nor /metrics."""
    with ServerProcess(
        "--host", "0.0.0.0", directory=tmp_path / "pool", slices=1, settled=False
    ) as server:
        warnings = [line for line in server.logs() if "NO API KEYS" in line["message"]]
        assert len(warnings) == 1
        assert warnings[0]["level"] == "warning"
        outside = f"http://{address()}:{server.port}"
        assert httpx.get(f"{outside}/v1/models", timeout=60).status_code == 200
        for path in ("/admin/state", "/metrics"):
            refused = httpx.get(
                outside + path, headers={"x-forwarded-for": "127.0.0.1"}, timeout=60
            )
            assert refused.status_code == 403, "who is asking is not up to the client"
            refused = httpx.get(outside + path, timeout=60)
            assert refused.status_code == 403
            assert "C2CSERVE_ADMIN_KEY" in refused.json()["error"]["message"]
            assert httpx.get(server.url + path, timeout=60).status_code == 200
        assert httpx.get(f"{outside}/health", timeout=60).status_code == 200


def test_loopback_without_keys_warns_of_nothing(server: ServerProcess) -> None:
    assert not [line for line in server.logs() if "KEYS" in line["message"]]


def test_an_admin_key_from_a_file(opened: ServerProcess) -> None:
    assert httpx.get(f"{opened.url}/admin/state", timeout=60).status_code == 401
    assert httpx.get(f"{opened.url}/metrics", timeout=60).status_code == 200
    headers = {"authorization": f"Bearer {ADMIN}"}
    url = f"{opened.url}/admin/state"
    assert httpx.get(url, headers=headers, timeout=60).status_code == 200


# ---- what other clients send --------------------------------------------------------------------


def curl(server: ServerProcess, *args: str) -> tuple[int, str]:
    """Status and answer of curl with its own defaults."""
    done = subprocess.run(
        ["curl", "-s", "-w", "\n%{http_code}", *args, f"{server.url}/v1/completions"],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    text, _, status = done.stdout.rpartition("\n")
    return int(status), text


def test_curl(server: ServerProcess) -> None:
    body = json.dumps({"model": "sorter-llama", "prompt": "sort: dcba", "max_tokens": 1})
    status, text = curl(server, "-d", body)
    assert status == 415
    assert "-H 'content-type: application/json'" in json.loads(text)["error"]["message"]
    assert curl(server, "-d", body, "-H", "content-type: application/json")[0] == 200
    assert curl(server, "--json", body)[0] == 200


def test_a_page_of_another_origin_adds_no_model(server: ServerProcess) -> None:
    entry = json.dumps({"id": "theirs", "path": str(SPECIALISTS / "sorter-llama")})
    for headers, status in (
        ({"content-type": "text/plain", "origin": "http://evil.example"}, 403),
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "application/json", "origin": "null"}, 403),
        ({"content-type": "application/json", "host": "evil.example"}, 403),
    ):
        answer = httpx.post(
            f"{server.url}/admin/models", content=entry, headers=headers, timeout=60
        )
        assert answer.status_code == status
    assert "theirs" not in [model["id"] for model in server.state()["models"]]


# ---- files --------------------------------------------------------------------------------------


def add(server: ServerProcess, **entry: str) -> tuple[int, str]:
    answer = httpx.post(f"{server.url}/admin/models", json=entry, timeout=60)
    message = "" if answer.status_code == 201 else answer.json()["error"]["message"]
    return answer.status_code, message


def test_added_models_lie_under_the_roots(tmp_path: Path) -> None:
    model = SPECIALISTS / "sorter-llama"
    home, other, store = (tmp_path / name for name in ("home", "other", "store"))
    for folder in (home, other, store):
        shutil.copytree(model, folder / "m")
    catalog = home / "catalog.toml"
    catalog.write_text('[[models]]\nid = "first"\npath = "m"\n')
    args = ("--model-root", str(store))
    with ServerProcess(*args, catalog=catalog, directory=tmp_path / "pool", slices=1) as server:
        assert add(server, id="a", path="m") == (201, "")
        assert add(server, id="b", path=str(store / "m")) == (201, "")
        (home / "link").symlink_to(other / "m")
        refusals = [
            add(server, id="x", path=str(path))
            for path in (
                other / "m", "../other/m", home / "link", other / "nothing", "/etc/passwd", "/"
            )
        ]  # fmt: skip
        for status, message in refusals:
            assert status == 400
            assert "outside the model roots" in message
            assert "--model-root" in message
        assert str(other) not in refusals[2][1], "where a link leads is not told"
        for name in ("config.json", "model.safetensors.index.json"):
            circle = home / f"circle-{name}"
            shutil.copytree(model, circle)
            (circle / name).unlink(missing_ok=True)
            (circle / name).symlink_to(circle / name)
            status, message = add(server, id="x", path=str(circle))
            assert status == 400
            assert name in message
        for name in ("tokenizer_config.json", "config.json", "model.safetensors"):
            inside = home / f"links-{name}"
            shutil.copytree(model, inside)
            (inside / name).unlink()
            (inside / name).symlink_to(other / "m" / name)
            status, message = add(server, id="x", path=str(inside))
            assert status == 400
            assert f"{name} is a link that leads out of the model roots" in message
            (inside / name).unlink()
            (inside / name).symlink_to(store / "m" / name)
            assert add(server, id=name, path=str(inside)) == (201, "")
        (home / "m" / "config.json").rename(other / "moved.json")
        (home / "m" / "config.json").symlink_to(other / "moved.json")
        reload = httpx.post(f"{server.url}/admin/models/a/reload", timeout=60)
        assert reload.status_code == 400, "what was added is held to the roots ever after"
        reload = httpx.post(f"{server.url}/admin/models/first/reload", timeout=60)
        assert reload.status_code == 200, "the catalogue's file is the operator's word"


# ---- as another user ----------------------------------------------------------------------------

_NOBODY = 65534
# The interpreter may lie in a directory of root's: reading it is all that this user may do more.
_AS_NOBODY = [
    "setpriv", f"--reuid={_NOBODY}", f"--regid={_NOBODY}", "--clear-groups", "--no-new-privs",
    "--bounding-set=-all,+dac_read_search", "--inh-caps=-all,+dac_read_search",
    "--ambient-caps=-all,+dac_read_search", "env", "-u", "HOME",
]  # fmt: skip
_READ_ONLY = 'mount -o remount,bind,ro / && cd / && exec "$0" "$@"'


@pytest.mark.skipif(os.geteuid() != 0, reason="another user is taken on by root")
def test_another_user_without_a_home_on_a_read_only_disk(tmp_path: Path) -> None:
    """As a container runs it: only shared memory can be written."""
    probe = ["unshare", "-m", "bash", "-c", _READ_ONLY, "true"]
    if subprocess.run(probe, capture_output=True, check=False).returncode != 0:
        pytest.skip("this machine lets no file system be mounted read-only")
    pool = Path("/dev/shm") / f"c2cserve-test-{os.getpid()}"
    pool.mkdir(mode=0o700)
    os.chown(pool, _NOBODY, _NOBODY)
    wrapper = ["unshare", "-m", "bash", "-c", _READ_ONLY, *_AS_NOBODY]
    try:
        with ServerProcess(
            directory=pool, slices=1, wrapper=wrapper, log=tmp_path / "server.log"
        ) as server:
            status = Path(f"/proc/{server.process.pid}/status").read_text()
            assert f"Uid:\t{_NOBODY}" in status
            assert Path(f"/proc/{server.process.pid}/cwd").readlink() == Path("/")
            assert cached(server, "none", PROMPT) == 0
            assert cached(server, "none", PROMPT) > 0
        assert server.process.returncode == 0
        assert server.leftovers() == []
    finally:
        pool.rmdir()
