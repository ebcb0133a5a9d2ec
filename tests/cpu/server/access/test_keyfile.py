"""The keys file: whole or not at all, for readers and writers."""

import json
import os
import stat
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from c2cserve.server.access.keyfile import (
    KeyRecord,
    KeysFile,
    KeysFileError,
    change_keys,
    read_keys,
)
from c2cserve.server.access.mistakes import requirement
from c2cserve.server.access.quota import KeyLimits
from c2cserve.server.access.secret import hash_secret, is_secret, make_key, split_key

NOW = datetime(2030, 1, 1, tzinfo=UTC)


def record(name: str, **fields: Any) -> KeyRecord:
    new = make_key()
    return KeyRecord(id=new.id, name=name, salt=new.salt, sha256=new.sha256, created=NOW, **fields)


def add(path: Path, *records: KeyRecord) -> None:
    change_keys(path, lambda file: KeysFile(1, (*file.keys, *records)))


def test_a_key_is_found_by_its_id_and_known_by_its_hash() -> None:
    new = make_key()
    id_, secret = split_key(new.text.encode()) or ("", b"")
    assert id_ == new.id
    assert is_secret(secret, new.salt, new.sha256)
    assert not is_secret(secret[:-1] + b"x", new.salt, new.sha256)
    assert hash_secret(make_key().salt, secret) != new.sha256, "each key has a salt of its own"
    assert secret.decode() not in new.salt + new.sha256
    for wrong in (b"", b"c2c_", b"c2c_x_y", new.text.encode() + b"0", b"sk-123"):
        assert split_key(wrong) is None


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    limits = KeyLimits(requests_per_minute=5, models=("org/*",), max_priority=0, min_ttft_ms=50.5)
    first = record("a", limits=limits, tenant="team", cache_group="g")
    second = record("b", expires=NOW + timedelta(days=1), revoked=NOW)
    add(path, first)
    add(path, second)
    assert read_keys(path).keys == (first, second)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path], "nothing is left beside it"


def test_states() -> None:
    key = record("a", expires=NOW + timedelta(hours=1), revoked=NOW + timedelta(hours=2))
    states = [key.state(NOW + timedelta(hours=hours)) for hours in range(3)]
    assert states == ["active", "expired", "revoked"]


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o620, 0o602, 0o777])
def test_files_of_others_are_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "keys.json"
    add(path, record("a"))
    path.chmod(mode)
    with pytest.raises(KeysFileError, match=f"mode is {mode:04o}.*chmod 600"):
        read_keys(path)
    with pytest.raises(KeysFileError, match="chmod 600"):
        add(path, record("b"))
    for fine in (0o600, 0o400, 0o640):
        path.chmod(fine)
        assert len(read_keys(path).keys) == 1


GOOD = {
    "id": "0" * 12, "name": "a", "salt": "0" * 32, "sha256": "0" * 64,
    "created": "2030-01-01T00:00:00Z",
}  # fmt: skip


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("not", "not JSON"),
        ("[]", "not an object with the fields 'version' and 'keys'"),
        ("{}", "the object lacks the field 'version'"),
        ('{"version": 2, "keys": []}', "version is not 1"),
        ('{"version": 1, "keys": {}}', "keys is not a list"),
        ('{"version": 1, "keys": [], "more": 1}', "the object has an unknown field 'more'"),
        ('{"version": 1, "keys": [], "a\\n`": 1}', r"field 'a\\n`'"),
        ([1], r"keys\[0\] is not an object"),
        ([{}], r"keys\[0\] lacks the field 'id'"),
        ([{**GOOD, "limits": {"request_per_minute": 5}}], "unknown field 'request_per_minute'"),
        ([{**GOOD, "limits": []}], "limits is not an object"),
        ([{**GOOD, "limits": {"concurrency": 0}}], r"limits.concurrency is not a whole number"),
        ([{**GOOD, "limits": {"concurrency": "many"}}], r"keys\[0\].limits.concurrency is not"),
        ([{**GOOD, "limits": {"models": ["", "a"]}}], r"limits.models is not a list of patterns"),
        ([{**GOOD, "limits": {"max_priority": 101}}], "max_priority is not .* -100 to 100"),
        ([{**GOOD, "name": "a b"}], r"keys\[0\].name is not 1 to 64 letters"),
        ([{**GOOD, "name": "a\n"}], "name is not 1 to 64 letters"),
        ([GOOD, {**GOOD, "created": "2030-01-01T00:00:00"}], r"keys\[1\].created .* its zone"),
        ([{**GOOD, "sha256": "0"}], "sha256 is not 64 hexadecimal digits"),
        ([GOOD, {**GOOD, "id": "1" * 12}], "two keys have the name 'a'"),
        ([GOOD, {**GOOD, "name": "b"}], "two keys have the id"),
        ("[" * 100_000, "keys file"),
        ("\ud800", "keys file"),
    ],
)
def test_wrong_files_say_where(tmp_path: Path, content: Any, says: str) -> None:
    path = tmp_path / "keys.json"
    if isinstance(content, list):
        content = json.dumps({"version": 1, "keys": content})
    path.write_text(content, errors="surrogatepass")
    path.chmod(0o600)
    with pytest.raises(KeysFileError, match=says) as caught:
        read_keys(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not any(raw in str(caught.value) for raw in ("Expected", "$", "regex", "RFC"))
    with pytest.raises(KeysFileError):
        add(path, record("z"))
    assert path.read_bytes() == content.encode(errors="surrogatepass"), "nothing is lost"


def test_what_every_field_has_to_be_can_be_said() -> None:
    fields = {field for of in (KeysFile, KeyRecord, KeyLimits) for field in of.__struct_fields__}
    assert all(requirement(field) for field in fields)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo", 0o600)
    for path, says in ((tmp_path / "fifo", "regular"), (tmp_path / "none", "No such file")):
        with pytest.raises(KeysFileError, match=says):
            read_keys(path)
    with pytest.raises(KeysFileError):
        read_keys(tmp_path)


def test_nothing_is_lost_when_many_add_at_once(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    threads = [threading.Thread(target=add, args=(path, record(f"k{i}"))) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {key.name for key in read_keys(path).keys} == {f"k{i}" for i in range(16)}


def test_behind_a_link_the_file_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    path, link = tmp_path / "real" / "keys.json", tmp_path / "link.json"
    add(path, record("a"))
    link.symlink_to(path)
    add(link, record("b"))
    assert link.is_symlink()
    assert len(read_keys(path).keys) == 2


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_the_owner_and_the_mode_stay(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    add(path, record("a"))
    os.chown(path, 1234, 1235)
    path.chmod(0o640)
    add(path, record("b"))
    found = path.stat()
    assert (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (1234, 1235, 0o640)


def test_a_disk_that_is_full_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "keys.json"
    add(path, record("a"))
    before = path.read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(KeysFileError, match="No space left"):
        add(path, record("b"))
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
