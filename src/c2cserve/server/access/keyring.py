"""The keys that a server accepts now, found in one look-up, whatever their number."""

import hashlib
import hmac
import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from c2cserve.server.access.keyfile import KeyRecord
from c2cserve.server.access.quota import KeyLimits, Quota
from c2cserve.server.access.secret import is_secret, split_key

_OPTION_NAME_BYTES = 4
_ALL_SIMPLE = "*"
"""The cache group of all keys that are options; no keys file can name it."""


@dataclass(eq=False, slots=True)
class Key:
    """One caller of the server. Requests under way keep theirs through changes of the file."""

    name: str
    """A label that is safe to show; empty when the server asks for no keys."""
    tenant: str
    """Whose work it is, for fair shares and caches; empty when the server asks for no keys."""
    cache_group: str
    quota: Quota
    record: KeyRecord | None = None
    """Its entry in the keys file, for a key that is there."""


@dataclass(frozen=True, slots=True)
class Denied:
    """Why a request is not let in."""

    message: str
    code: str | None


_MISSING = Denied("You did not provide an API key: send Authorization: Bearer KEY", None)
_WRONG = Denied("Incorrect API key provided", "invalid_api_key")
_NOBODY = ("0" * 32, "0" * 64)
"""Salt and hash for ids that no key has: they take as long to refuse as a wrong secret."""


def bearer(header: str | None) -> bytes | None:
    """Return the token of an Authorization header. The scheme's case does not count."""
    scheme, _, token = (header or "").partition(" ")
    # Headers arrive as Latin-1: this gives the bytes that were sent.
    given = token.strip(" ").encode("latin-1")
    return given if given and scheme.lower() == "bearer" else None


class Keyring:
    """Keys given as options, and those of the keys file. Without any of both, everybody may ask."""

    def __init__(self, simple: Iterable[str], *, from_file: bool, share: bool = False) -> None:
        """`from_file`: there is a keys file, so that a key is asked for even while it has none.
        Raises ValueError for a key given as an option that is empty."""
        now = time.monotonic()
        group = _ALL_SIMPLE if share else ""
        self._pepper = secrets.token_bytes(32)
        self._simple: dict[bytes, Key] = {}
        for text in simple:
            if not text:
                raise ValueError("an API key is empty")
            digest = self._digest(text.encode())
            # The label tells keys apart, and nothing about them: its salt is this process's.
            name = f"option:{digest[:_OPTION_NAME_BYTES].hex()}"
            self._simple[digest] = Key(name, name, group, Quota(KeyLimits(), now))
        self._by_id: dict[str, Key] = {}
        self._anonymous: Key | None = None
        if not self._simple and not from_file:
            self._anonymous = Key("", "", "", Quota(KeyLimits(), now))

    def present(self) -> list[Key]:
        """Return those given as options, then those of the file, in its order."""
        return [*self._simple.values(), *self._by_id.values()]

    def replace(self, records: Sequence[KeyRecord]) -> None:
        """Take the file's keys as they are now. A key that was there before keeps its counters."""
        now, before = time.monotonic(), self._by_id
        self._by_id = {}
        for record in records:
            known = before.get(record.id)
            if known is None:
                quota = Quota(record.limits, now)
            else:
                quota = known.quota
                quota.change(record.limits, now)
            self._by_id[record.id] = Key(
                record.name, record.tenant_name, record.cache_group or "", quota, record
            )

    def find(self, header: str | None) -> Key | Denied:
        """`header`: Authorization's value. The time that this takes depends on no secret."""
        if self._anonymous is not None:
            return self._anonymous
        given = bearer(header)
        if given is None:
            return _MISSING
        # Of a digest with a secret salt, a client cannot choose the beginning: that a look-up
        # compares it in a time that depends on it tells nothing about the key.
        simple = self._simple.get(self._digest(given))
        if simple is not None:
            return simple
        id_, secret = split_key(given) or ("", given)
        key = self._by_id.get(id_)
        record = None if key is None else key.record
        salt, sha256 = _NOBODY if record is None else (record.salt, record.sha256)
        if not is_secret(secret, salt, sha256) or key is None or record is None:
            return _WRONG
        state = record.state(datetime.now(UTC))
        if state != "active":
            return Denied(f"The API key {key.name!r} is {state}", "invalid_api_key")
        return key

    def _digest(self, key: bytes) -> bytes:
        return hmac.digest(self._pepper, key, hashlib.sha256)
