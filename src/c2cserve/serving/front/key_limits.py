"""Limits of keys over all fronts of a cluster.

Each front tells the others a few times a second what it let in, by way of nodes. Each charges its
own buckets with that. So every front knows the use of all, but for the last moment. The limits hold
over any longer time, because what came too much is a debt.
"""

from dataclasses import dataclass, field

from c2cserve.cluster.messages import KeyUse
from c2cserve.server.access.keyring import Key, Keyring
from c2cserve.server.access.quota import Quota

TELL_S = 0.25
"""How often a front tells the others."""
_GONE_S = 3.0
"""A front that is silent for so long runs nothing any more, as far as others know."""
_FORGOTTEN_S = 60.0
"""What it said last cannot arrive again after so long, by way of a slow node. A front that starts
again has another name."""


@dataclass(slots=True)
class _Other:
    """Another front."""

    number: int
    heard_s: float
    running: dict[str, int] = field(default_factory=dict[str, int])


class KeyLimits:
    """Used on the event loop of the front. Keys of the keys file have limits, others have none."""

    def __init__(self, front: str, keyring: Keyring) -> None:
        self._front = front
        self._keyring = keyring
        self._number = 0
        self._noted: dict[str, tuple[Quota, int, int, int]] = {}
        """Key -> its quota; and what it had used here, and ran, when `news` was asked for last.
        Keys without limits are noted too: a limit counts from when a key gets it."""
        self._others: dict[str, _Other] = {}

    def news(self) -> KeyUse | None:
        """Return what to tell the others, None if nothing has changed and nothing runs."""
        keys: dict[str, tuple[int, int, int]] = {}
        noted, self._noted = self._noted, {}
        for key in self._keyring.present():
            if key.record is None:
                continue
            name, quota = key.record.id, key.quota
            before, requests, tokens, running = noted.get(name, (quota, 0, 0, 0))
            if before is not quota:  # the key was gone for a while, and has begun anew
                requests = tokens = running = 0
            now = quota.requests, quota.tokens, quota.running
            if _shared(key) and (quota.running or now != (requests, tokens, running)):
                keys[name] = quota.requests - requests, quota.tokens - tokens, quota.running
            self._noted[name] = quota, *now
        if not keys:
            return None
        self._number += 1
        return KeyUse(self._front, self._number, keys)

    def _limited(self) -> dict[str, Quota]:
        return {
            key.record.id: key.quota for key in self._keyring.present()
            if key.record is not None and _shared(key)
        }  # fmt: skip

    def take(self, use: KeyUse, now: float) -> None:
        """Charge what another front let in, once however often it is told."""
        other = self._others.get(use.front)
        if use.front == self._front or (other is not None and use.number <= other.number):
            return
        limited = self._limited()
        for name, (requests, tokens, _) in use.keys.items():
            if (quota := limited.get(name)) is not None:
                quota.taken_elsewhere(requests, tokens, now)
        running = {name: count for name, (_, _, count) in use.keys.items() if count}
        self._others[use.front] = _Other(use.number, now, running)
        self._count_running(limited)

    def forget_silent(self, now: float) -> None:
        """Free the places of fronts that are gone."""
        gone = [one for one, other in self._others.items() if now - other.heard_s > _GONE_S]
        freed = any(self._others[one].running for one in gone)
        for one in gone:
            self._others[one].running.clear()
            if now - self._others[one].heard_s > _FORGOTTEN_S:
                del self._others[one]
        if freed:
            self._count_running(self._limited())

    def _count_running(self, limited: dict[str, Quota]) -> None:
        for name, quota in limited.items():
            quota.running_elsewhere = sum(
                other.running.get(name, 0) for other in self._others.values()
            )


def _shared(key: Key) -> bool:
    """Whether the key has a limit that counts."""
    limits = key.quota.limits
    counts = limits.requests_per_minute, limits.tokens_per_minute, limits.concurrency
    return any(one is not None for one in counts)
