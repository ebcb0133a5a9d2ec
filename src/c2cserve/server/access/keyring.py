"""The keys that a server accepts now. Finding one takes one look-up, however many there are."""

import binascii
import hashlib
import hmac
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from c2cserve.server.access.keyfile import KeyRecord
from c2cserve.server.access.quota import KeyLimits, Quota
from c2cserve.server.access.secret import is_secret, split_key

CHALLENGES = {"dashboard": 'Basic realm="c2cserve", charset="UTF-8"'}
"""What a 401 asks for by the kind of route, where it is not `Bearer`. Browsers know Basic only."""
_OPTION_NAME_BYTES = 4


@dataclass(eq=False, slots=True)
class Key:
    """One caller of the server. Requests in flight keep their key through changes of the file."""

    name: str
    """A label that is safe to show; empty when the server asks for no keys."""
    tenant: str
    """The unit of fair shares and prefix caches; empty when the server asks for no keys."""
    cache_group: str
    quota: Quota
    record: KeyRecord | None = None
    """Its entry in the keys file, for a key that is there."""


@dataclass(frozen=True, slots=True)
class Denied:
    """Why a request is refused."""

    message: str
    code: str | None


_MISSING = Denied(
    "You did not provide an API key: send Authorization: Bearer KEY, or x-api-key", None
)
_WRONG = Denied("Incorrect API key provided", "invalid_api_key")
_NO_KEY = ("0" * 32, "0" * 64)
"""Salt and hash for unknown ids: their refusal takes as long as that of a wrong secret."""


def bearer(header: str | None) -> bytes | None:
    """Return the token of an Authorization header. The scheme's case does not count."""
    scheme, _, token = (header or "").partition(" ")
    # Headers arrive as Latin-1: this gives the bytes that were sent.
    given = token.strip(" ").encode("latin-1")
    return given if given and scheme.lower() == "bearer" else None


def basic_password(header: str | None) -> bytes | None:
    """Return the password of an Authorization header of HTTP's Basic scheme, which browsers ask
    their users for. The user's name does not count."""
    scheme, _, encoded = (header or "").partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        decoded = binascii.a2b_base64(encoded.strip(" ").encode("latin-1"), strict_mode=True)
    except binascii.Error:
        return None
    return decoded.partition(b":")[2] or None


def key_header(headers: Mapping[str, str]) -> str | None:
    """Return a request's key as an Authorization header. Without one, Anthropic's `x-api-key`
    counts."""
    authorization = headers.get("authorization")
    if authorization is None and (key := headers.get("x-api-key")):
        return f"Bearer {key}"
    return authorization


class Keyring:
    """The keys given as options and the keys of the keys file. Without both, every request may
    pass."""

    def __init__(self, simple: Iterable[str], *, from_file: bool) -> None:
        """`from_file`: there is a keys file, so a key is required even while the file has none.
        Raises ValueError for an empty key."""
        now = time.monotonic()
        self._pepper = secrets.token_bytes(32)
        self._simple: dict[bytes, Key] = {}
        for text in simple:
            if not text:
                raise ValueError("an API key is empty")
            digest = self._digest(text.encode())
            # The label distinguishes keys and reveals nothing: its salt is this process's own.
            name = f"option:{digest[:_OPTION_NAME_BYTES].hex()}"
            self._simple[digest] = Key(name, name, "", Quota(KeyLimits(), now))
        self._by_id: dict[str, Key] = {}
        self._anonymous: Key | None = None
        if not self._simple and not from_file:
            self._anonymous = Key("", "", "", Quota(KeyLimits(), now))

    def present(self) -> list[Key]:
        """Return the keys given as options, then those of the file in its order."""
        return [*self._simple.values(), *self._by_id.values()]

    def replace(self, records: Sequence[KeyRecord]) -> None:
        """Use these keys of the file from now on. A key that stays keeps its counters."""
        now, before = time.monotonic(), self._by_id
        self._by_id = {}
        for record in records:
            same = before.get(record.id)
            if same is None:
                quota = Quota(record.limits, now)
            else:
                quota = same.quota
                quota.change(record.limits, now)
            self._by_id[record.id] = Key(
                record.name, record.tenant_name, record.cache_group or "", quota, record
            )

    def find(self, header: str | None) -> Key | Denied:
        """Return the key of an Authorization header, or why there is none. The time that this takes
        depends on no secret."""
        if self._anonymous is not None:
            return self._anonymous
        given = bearer(header)
        if given is None:
            return _MISSING
        # The time of this look-up depends on the digest. That reveals nothing about a key: the
        # digest's salt is secret, so a client cannot choose how its digest begins.
        simple = self._simple.get(self._digest(given))
        if simple is not None:
            return simple
        id_, secret = split_key(given) or ("", given)
        key = self._by_id.get(id_)
        record = None if key is None else key.record
        salt, sha256 = _NO_KEY if record is None else (record.salt, record.sha256)
        if not is_secret(secret, salt, sha256) or key is None or record is None:
            return _WRONG
        state = record.state(datetime.now(UTC))
        if state != "active":
            return Denied(f"The API key {key.name!r} is {state}", "invalid_api_key")
        return key

    def _digest(self, key: bytes) -> bytes:
        return hmac.digest(self._pepper, key, hashlib.sha256)
