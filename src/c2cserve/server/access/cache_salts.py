"""Salts of prefix hashes: which requests may reuse each other's KV blocks.

    salt of a request = H(salt of its cache group, its cache_salt)
    salt of a group   = H keyed with a secret of this run (name of the group)

Two requests share KV blocks only if their salts are equal. `cached_tokens` and the time to the
first token reveal whether a prompt is cached. So with an equal salt, one client can test guesses of
another client's prompts. A record of a run (`--record`) holds hashes; without the secret, guesses
cannot be tested against them either.
"""

import hashlib
import secrets

_SALT_BYTES = 16


class CacheSalts:
    """The salts of one run of the server."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(_SALT_BYTES)

    def of_group(self, group: str) -> bytes:
        """Return the salt of a group. `group`: its name by `cache_group`."""
        return hashlib.blake2b(group.encode(), key=self._secret, digest_size=_SALT_BYTES).digest()


def cache_group(tenant: str, shared: str = "") -> str:
    """Return the name of a request's group: the tenant's own, or the group `shared` of several
    tenants. Without keys there is no tenant, and one group for all.

    No tenant's name can equal the name of a shared group."""
    if shared:
        return f"group {shared}"
    return f"tenant {tenant}" if tenant else ""


def request_salt(group_salt: bytes, cache_salt: str | None) -> bytes:
    """Return the salt of a request. `cache_salt`: the one in its body, None without."""
    if cache_salt is None:
        return group_salt
    return hashlib.blake2b(cache_salt.encode(), key=group_salt, digest_size=_SALT_BYTES).digest()
