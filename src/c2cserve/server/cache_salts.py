"""Salts of prefix hashes: which requests may reuse each other's KV blocks.

    salt of a request = H(salt of its cache group, its cache_salt)
    salt of a group   = H keyed with a secret of this run (name of the group)

Two requests share KV blocks only if their salts are equal. Whether a prompt is cached shows in
`cached_tokens` and in the time to the first token, so an equal salt lets one client test guesses of
another client's prompts. The secret keeps hashes out of reach of guesses too: a record of a run
(`--record`) holds hashes, and without the secret no prompt can be tested against them.
"""

import hashlib
import secrets

_SALT_BYTES = 16


class CacheSalts:
    """The salts of one run of the server."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(_SALT_BYTES)

    def of_group(self, group: str) -> bytes:
        """`group`: as `cache_group` names it."""
        return hashlib.blake2b(group.encode(), key=self._secret, digest_size=_SALT_BYTES).digest()


def cache_group(tenant: str, shared: str = "") -> str:
    """Return the name of the group that a request belongs to: its tenant's own, or the one that
    several tenants `shared`. Without keys there is no tenant, and one group for all.

    The two kinds of names never meet: a tenant cannot call itself as a group is called."""
    if shared:
        return f"group {shared}"
    return f"tenant {tenant}" if tenant else ""


def request_salt(group_salt: bytes, cache_salt: str | None) -> bytes:
    """Return the salt of a request whose body has this `cache_salt`, or none."""
    if cache_salt is None:
        return group_salt
    return hashlib.blake2b(cache_salt.encode(), key=group_salt, digest_size=_SALT_BYTES).digest()
