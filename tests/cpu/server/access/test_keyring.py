"""Which key a request has, and what that may not depend on."""

import hmac
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from c2cserve.server.access.keyfile import KeyRecord
from c2cserve.server.access.keyring import Denied, Key, Keyring, bearer
from c2cserve.server.access.quota import KeyLimits
from c2cserve.server.access.secret import NewKey, make_key

NOW = datetime.now(UTC)


def made(name: str, **fields: Any) -> tuple[NewKey, KeyRecord]:
    new = make_key()
    record = KeyRecord(
        id=new.id, name=name, salt=new.salt, sha256=new.sha256, created=NOW, **fields
    )
    return new, record


def name_of(found: Key | Denied) -> str:
    assert isinstance(found, Key), found
    return found.name


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER", "bEaReR"])
def test_the_scheme_in_any_case(scheme: str) -> None:
    assert bearer(f"{scheme} abc") == b"abc"
    assert bearer(f"{scheme}   abc ") == b"abc"


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer ", "Basic abc", "abc", "Bearerabc"])
def test_what_is_no_bearer_token(header: str | None) -> None:
    assert bearer(header) is None


def test_a_header_of_spaces_is_read_at_once() -> None:
    start_s = time.monotonic()
    assert bearer("Bearer x" + " " * 60_000 + "y") is not None
    assert bearer("Bearer" + " " * 60_000) is None
    assert time.monotonic() - start_s < 0.2


def test_without_keys_every_request_passes() -> None:
    found = Keyring((), from_file=False).find(None)
    assert isinstance(found, Key)
    assert (found.name, found.tenant) == ("", "")


def test_a_keys_file_without_keys_lets_no_request_in() -> None:
    found = Keyring((), from_file=True).find(None)
    assert isinstance(found, Denied)


def test_an_empty_key_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="empty"):
        Keyring(("a", ""), from_file=False)


def test_keys_of_options_are_tenants() -> None:
    ring = Keyring(("one", "two", "ключ", "one"), from_file=False)
    names = {name_of(ring.find(f"Bearer {key}")) for key in ("one", "two", "Ð\xba")[:2]}
    names.add(name_of(ring.find("Bearer " + "ключ".encode().decode("latin-1"))))
    assert len(names) == len(ring.present()) == 3
    assert not any(key in name for name in names for key in ("one", "two"))
    first = ring.find("Bearer one")
    assert isinstance(first, Key)
    assert first.tenant == first.name
    assert ring.find("bearer one") is first
    other = Keyring(("one",), from_file=False).find("Bearer one")
    assert name_of(other) != first.name, "labels of low-entropy keys cannot be looked up in a table"


def test_keys_of_the_file() -> None:
    ring = Keyring(("simple",), from_file=True)
    (new, record), (late, expired) = made("a", tenant="t"), made("late", expires=NOW)
    gone, revoked = made("gone", revoked=NOW - timedelta(days=1))
    ring.replace([record, expired, revoked])
    found = ring.find(f"Bearer {new.text}")
    assert isinstance(found, Key)
    assert (found.name, found.tenant) == ("a", "t")
    assert name_of(ring.find("Bearer simple")).startswith("option:")
    for text, says in (
        (late.text, "'late' is expired"),
        (gone.text, "'gone' is revoked"),
        (new.text[:-1] + ("0" if new.text[-1] != "0" else "1"), "Incorrect"),
        (gone.text[:-1] + ("0" if gone.text[-1] != "0" else "1"), "Incorrect"),
        (f"c2c_{late.id}_{new.text[-48:]}", "Incorrect"),
        (f"c2c_{'0' * 12}_{new.text[-48:]}", "Incorrect"),
        (record.sha256, "Incorrect"),
        ("simple2", "Incorrect"),
    ):
        denied = ring.find(f"Bearer {text}")
        assert isinstance(denied, Denied)
        assert says in denied.message
        assert denied.code == "invalid_api_key"
        assert text not in denied.message


def test_counters_outlive_a_reload() -> None:
    ring = Keyring((), from_file=True)
    new, record = made("a", limits=KeyLimits(requests_per_minute=5))
    ring.replace([record])
    before = ring.find(f"Bearer {new.text}")
    assert isinstance(before, Key)
    assert before.quota.arrive(0.0) is None
    ring.replace([made("b")[1], record])
    after = ring.find(f"Bearer {new.text}")
    assert isinstance(after, Key)
    assert after.quota is before.quota
    assert after.quota.running == 1
    ring.replace([])
    assert isinstance(ring.find(f"Bearer {new.text}"), Denied)


def test_every_key_takes_one_look_up_and_one_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compared does not depend on the number of keys, nor on how much of one is right."""
    ring = Keyring((), from_file=True)
    several = [made(f"k{i}") for i in range(100)]
    ring.replace([record for _, record in several])
    compared: list[tuple[int, int]] = []
    compare: Callable[[str, str], bool] = hmac.compare_digest

    def counting(a: str, b: str) -> bool:
        compared.append((len(a), len(b)))
        return compare(a, b)

    monkeypatch.setattr(hmac, "compare_digest", counting)
    right = several[70][0].text
    for text in (right, right[:-1] + "x", f"c2c_{'f' * 12}_{'0' * 48}", "x", right[:30]):
        ring.find(f"Bearer {text}")
    assert compared == [(64, 64)] * 5
