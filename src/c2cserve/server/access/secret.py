"""A key's text, `c2c_<id>_<secret>`, and the hash of it that is stored.

The id finds the key's record in one look-up, and is no secret. Of the secret, only a SHA-256 with a
salt of its own is stored. A password needs a slow hash because it can be guessed. These secrets are
192 random bits, which cannot be guessed at any speed. A slow hash would only make each request cost
the server milliseconds, also a request with a wrong key.
"""

import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass

_ID_BYTES = 6
_SECRET_BYTES = 24
_SALT_BYTES = 16
_KEY = re.compile(rb"c2c_([0-9a-f]{12})_([0-9a-f]{48})")


@dataclass(frozen=True, slots=True)
class NewKey:
    id: str
    text: str
    """The whole key, which is shown once."""
    salt: str
    sha256: str


def make_key() -> NewKey:
    id_, secret = secrets.token_hex(_ID_BYTES), secrets.token_hex(_SECRET_BYTES)
    salt = secrets.token_hex(_SALT_BYTES)
    return NewKey(id_, f"c2c_{id_}_{secret}", salt, hash_secret(salt, secret.encode()))


def split_key(given: bytes) -> tuple[str, bytes] | None:
    """Return the id and the secret in a client's token; None if it has not the form of a key."""
    match = _KEY.fullmatch(given)
    return None if match is None else (match[1].decode(), match[2])


def hash_secret(salt: str, secret: bytes) -> str:
    """Return the hexadecimal hash that a keys file holds. `salt` is hexadecimal too."""
    return hashlib.sha256(bytes.fromhex(salt) + secret).hexdigest()


def is_secret(secret: bytes, salt: str, sha256: str) -> bool:
    """Compare in a time that does not reveal how much of the hash is right."""
    return hmac.compare_digest(hash_secret(salt, secret), sha256)
