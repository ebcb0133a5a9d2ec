"""`c2cserve keys`: what it prints, what it keeps, and what it refuses in one line."""

import json
import stat
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from c2cserve.cli.keys import app as keys_app
from c2cserve.cli.main import app
from c2cserve.server.access.keyfile import KeyRecord, KeysFile, change_keys, read_keys
from c2cserve.server.access.quota import KeyLimits
from c2cserve.server.access.secret import is_secret, split_key


def run(*args: str) -> int:
    with pytest.raises(SystemExit) as done:
        app(["keys", *args])
    assert isinstance(done.value.code, int)
    return done.value.code


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def test_the_key_is_shown_once(path: Path, capsys: Any) -> None:
    assert run("add", "team-a", "--keys", str(path)) == 0
    out, err = capsys.readouterr()
    text = out.strip()
    assert out == f"{text}\n", "stdout has the key alone: it can be piped into a secret store"
    assert text not in err
    id_, secret = split_key(text.encode()) or ("", b"")
    (record,) = read_keys(path).keys
    assert record.id == id_
    assert is_secret(secret, record.salt, record.sha256)
    assert secret.decode() not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for args in (("list",), ("list", "--json")):
        assert run(*args, "--keys", str(path)) == 0
        shown = capsys.readouterr().out
        assert "team-a" in shown
        assert record.sha256 not in shown
        assert record.salt not in shown


def test_every_limit_is_kept(path: Path, capsys: Any) -> None:
    code = run(
        "add", "a", "--keys", str(path), "--tenant", "t", "--expires", "30d", "--cache-group", "g",
        "--requests-per-minute", "60", "--tokens-per-minute", "1000", "--concurrency", "4",
        "--model", "org/*", "--model", "phi", "--max-priority", "-5", "--min-ttft-ms", "50",
        "--min-tpot-ms", "2.5",
    )  # fmt: skip
    assert code == 0
    capsys.readouterr()
    assert run("list", "--json", "--keys", str(path)) == 0
    (shown,) = json.loads(capsys.readouterr().out)
    assert shown["limits"] == {
        "requests_per_minute": 60, "tokens_per_minute": 1000, "concurrency": 4,
        "models": ["org/*", "phi"], "max_priority": -5, "min_ttft_ms": 50, "min_tpot_ms": 2.5,
    }  # fmt: skip
    assert (shown["tenant"], shown["cache_group"], shown["state"]) == ("t", "g", "active")
    lasts = datetime.fromisoformat(shown["expires"]) - datetime.now(UTC)
    assert 29.9 < lasts.total_seconds() / 86400 <= 30


def test_revoke_by_name_or_id(path: Path, capsys: Any) -> None:
    for name in ("a", "b", "c"):
        assert run("add", name, "--keys", str(path)) == 0
    assert run("revoke", "a", "--keys", str(path)) == 0
    assert run("revoke", read_keys(path).keys[1].id, "--keys", str(path)) == 0
    first = read_keys(path).keys[0].revoked
    assert run("revoke", "a", "--keys", str(path)) == 0, "twice is no error"
    assert read_keys(path).keys[0].revoked == first
    now = datetime.now(UTC)
    assert [key.state(now) for key in read_keys(path).keys] == ["revoked", "revoked", "active"]
    assert run("revoke", "none", "--keys", str(path)) == 1
    assert "no key 'none'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("add", "a b"), "NAME has to be 1 to 64 letters"),
        (("add", "a,b"), "NAME has to be"),
        (("add", "option:1"), "NAME has to be"),
        (("add", "a", "--tenant", ""), "--tenant has to be 1 to 64 letters"),
        (("add", "a", "--concurrency", "0"), "--concurrency has to be a whole number from 1"),
        (("add", "a", "--requests-per-minute", "-1"), "--requests-per-minute has to be"),
        (
            ("add", "a", "--max-priority", "101"),
            "--max-priority has to be a whole",
        ),
        (("add", "a", "--min-ttft-ms", "nan"), "--min-ttft-ms has to be"),
        (("add", "a", "--model", ""), "--model has to be"),
        (("add", "a", "--expires", "tomorrow"), "'tomorrow'"),
        (("add", "a", "--expires", "2030-01-01"), "2030-01-01"),
        (("add", "zoë"), "letters (A to Z, a to z)"),
        (("add", "a", "--expires", "999999w"), "999999w"),
        (("add", "a", "--expires", "0d"), "has passed"),
        (("add", "a", "--expires", "2020-01-01T00:00:00+00:00"), "has passed"),
    ],
)
def test_wrong_fields_are_named_and_change_nothing(
    path: Path, capsys: Any, args: tuple[str, ...], says: str
) -> None:
    assert run(*args, "--keys", str(path)) == 2
    err = capsys.readouterr().err
    assert says in err
    assert len(err.splitlines()) == 1
    assert not path.exists()


def test_what_cannot_be_used_is_one_line(path: Path, capsys: Any) -> None:
    assert run("list", "--keys", str(path)) == 1
    assert "No such file" in capsys.readouterr().err
    assert run("add", "a", "--keys", str(path)) == 0
    assert run("add", "a", "--keys", str(path)) == 1
    assert "has a key 'a'" in capsys.readouterr().err
    path.chmod(0o644)
    for args in (("list",), ("add", "b"), ("revoke", "a")):
        assert run(*args, "--keys", str(path)) == 1
        assert f"chmod 600 {path}" in capsys.readouterr().err


def test_the_file_may_be_named_by_a_variable(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("C2CSERVE_KEYS_FILE", str(path))
    assert run("add", "a") == 0
    assert run("list") == 0
    assert "a" in capsys.readouterr().out


def test_a_usage_log_is_summed_up(tmp_path: Path, capsys: Any) -> None:
    log = tmp_path / "usage.jsonl"
    line = {
        "time": "2030-01-01T00:00:00Z", "request_id": "r", "key": "a", "tenant": "t", "model": "m",
        "choices": 1, "prompt_tokens": 5, "cached_tokens": 2, "output_tokens": 7,
        "finish": {"stop": 1},
    }  # fmt: skip
    log.write_text(f"{json.dumps(line)}\n{json.dumps(line)}\n{json.dumps(line)[:20]}\n")
    assert run("usage", "--log", str(log), "--csv") == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[1] == "a,t,m,2,10,4,14"
    assert "1 line is" in err
    assert run("usage", "--log", str(log), "--json") == 0
    assert json.loads(capsys.readouterr().out)["usage"][0]["requests"] == 2
    assert run("usage", "--log", str(log)) == 0
    assert "14" in capsys.readouterr().out
    assert run("usage", "--log", str(tmp_path / "none")) == 1


@pytest.mark.parametrize("content", [b"{}\n[]\n", b"\xff\x00", b'{"version": 1, "keys": []}'])
def test_what_is_no_usage_log_is_said(tmp_path: Path, capsys: Any, content: bytes) -> None:
    """Also where its figures would be taken for those of no requests."""
    log = tmp_path / "keys.json"
    log.write_bytes(content)
    for form in ((), ("--csv",), ("--json",)):
        assert run("usage", "--log", str(log), *form) == 1
        out, err = capsys.readouterr()
        assert out == ""
        assert f"{log} is not a usage log" in err


def test_a_usage_log_of_no_requests_is_one(tmp_path: Path, capsys: Any) -> None:
    log = tmp_path / "usage.jsonl"
    log.touch()
    assert run("usage", "--log", str(log), "--csv") == 0
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_usage_has_one_form(tmp_path: Path, capsys: Any) -> None:
    assert run("usage", "--log", str(tmp_path / "none"), "--csv", "--json") == 2
    assert "--csv or --json" in capsys.readouterr().err


def test_a_broken_keys_file_is_said_in_words(path: Path, capsys: Any) -> None:
    path.write_text('{"version": 1, "keys": [{"id": 3}]}')
    path.chmod(0o600)
    for args in (("list",), ("add", "b"), ("revoke", "a")):
        assert run(*args, "--keys", str(path)) == 1
        err = capsys.readouterr().err
        assert "keys[0].id is not 12 hexadecimal digits" in err
        assert len(err.splitlines()) == 1


def test_commands() -> None:
    names = {command.name for command in keys_app.registered_commands}
    assert names == {"add", "list", "revoke", "reload", "usage"}


def test_ten_thousand_keys_are_listed_in_a_second_of_processor_time(
    path: Path, capsys: Any
) -> None:
    created = datetime(2026, 1, 1, tzinfo=UTC)
    records = tuple(
        KeyRecord(
            id=f"{number:012x}", name=f"team-{number}", salt="0" * 32, sha256="0" * 64,
            created=created, limits=KeyLimits(models=("org/*\x1b[2J",)),
        )
        for number in range(10_000)
    )  # fmt: skip
    change_keys(path, lambda file: KeysFile(file.version, records))
    for args in (("list",), ("add", "more"), ("revoke", "team-9999")):
        began_s = time.process_time()
        assert run(*args, "--keys", str(path)) == 0
        assert time.process_time() - began_s < 1.0, args
    assert run("list", "--keys", str(path)) == 0
    shown = capsys.readouterr().out
    assert all(f" {number:012x} " in shown for number in (0, 9_999))
    assert "\x1b" not in shown
