"""The limits of a key, and its use of them. The functions are pure: callers pass the time."""

import math
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated

import msgspec

from c2cserve.server.access.buckets import TokenBucket

Count = Annotated[int, msgspec.Meta(ge=1, le=10**9)]
Milliseconds = Annotated[float, msgspec.Meta(gt=0, le=1e9)]
Pattern = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]

LIMITS = (
    "requests_per_minute", "tokens_per_minute", "concurrency", "models", "max_priority",
    "min_ttft_ms", "min_tpot_ms",
)  # fmt: skip
"""The limits that can refuse a request: the fields of `KeyLimits`."""
_FREED_S = 1.0
"""A guess for `Retry-After`: nothing says when a place of `concurrency` will be free."""


class KeyLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The limits of one key. None: the server's own limits alone apply."""

    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    """Prompt and output tokens, as `usage` counts them."""
    concurrency: Count | None = None
    """Choices in flight."""
    models: tuple[Pattern, ...] | None = None
    """Patterns of model ids, as shells have them (`org/*`)."""
    max_priority: Annotated[int, msgspec.Meta(ge=-100, le=100)] | None = None
    """The highest `priority` that a request may ask for."""
    min_ttft_ms: Milliseconds | None = None
    """The tightest target that the header `x-slo-ttft-ms` may ask for."""
    min_tpot_ms: Milliseconds | None = None
    """The tightest target that the header `x-slo-tpot-ms` may ask for."""

    def allows_model(self, model: str) -> bool:
        """Return whether the key may use a model. `model`: an id of the catalogue, not an alias."""
        return self.models is None or any(fnmatchcase(model, one) for one in self.models)


@dataclass(frozen=True, slots=True)
class Exceeded:
    """A limit that a request would exceed now."""

    limit: str
    allowed: int
    asked: int
    """What the request would have taken."""
    wait_s: float
    """The seconds until it may fit; infinite for a request that never will."""


@dataclass(frozen=True, slots=True)
class Rate:
    """A bucket as response headers show it."""

    limit: int
    remaining: int
    full_in_s: float


class Quota:
    """The counters of one key. They outlive changes of its limits."""

    def __init__(self, limits: KeyLimits, now: float) -> None:
        self.limits = limits
        self.running = 0
        """Places of `concurrency` that are taken."""
        self.running_elsewhere = 0
        """Places that are taken at other fronts of a cluster."""
        self.requests = self.tokens = 0
        """What was taken here so far. It falls when tokens are given back."""
        self._requests = _bucket(None, limits.requests_per_minute, now)
        self._tokens = _bucket(None, limits.tokens_per_minute, now)

    def change(self, limits: KeyLimits, now: float) -> None:
        self.limits = limits
        self._requests = _bucket(self._requests, limits.requests_per_minute, now)
        self._tokens = _bucket(self._tokens, limits.tokens_per_minute, now)

    def arrive(self, now: float) -> Exceeded | None:
        """Count a request and take a place for it, unless a limit is exceeded. A key without any
        token left is refused here, before the request is tokenized."""
        exceeded = (
            self._no_room(1)
            or _short("requests_per_minute", self._requests, 1, now)
            or _short("tokens_per_minute", self._tokens, 1, now)
        )
        if exceeded is None:
            self.running += 1
            self.requests += 1
            if self._requests is not None:
                self._requests.take(1, now)
        return exceeded

    def admit(self, held: int, choices: int, prompt_tokens: int, now: float) -> Exceeded | None:
        """Replace the `held` places of a request by one for each choice and charge its prompts'
        tokens, unless a limit is exceeded."""
        exceeded = self._no_room(choices, held) or _short(
            "tokens_per_minute", self._tokens, prompt_tokens, now
        )
        if exceeded is None:
            self.running += choices - held
            self.charge(prompt_tokens, now)
        return exceeded

    def charge(self, tokens: int, now: float) -> None:
        """Charge tokens. Output may bring the key into debt."""
        self.tokens += tokens
        if self._tokens is not None:
            self._tokens.take(tokens, now)

    def give_back(self, tokens: int, now: float) -> None:
        self.tokens -= tokens
        if self._tokens is not None:
            self._tokens.give_back(tokens, now)

    def taken_elsewhere(self, requests: int, tokens: int, now: float) -> None:
        """Charge what another front let in. It may bring the key into debt. Negative tokens were
        given back there."""
        if self._requests is not None:
            self._requests.take(requests, now)
        if self._tokens is not None and tokens >= 0:
            self._tokens.take(tokens, now)
        elif self._tokens is not None:
            self._tokens.give_back(-tokens, now)

    def leave(self, places: int) -> None:
        self.running -= places

    def rates(self, now: float) -> dict[str, Rate]:
        """Return the refilling limits: `requests` and `tokens` -> the state of the bucket."""
        buckets = {"requests": self._requests, "tokens": self._tokens}
        return {
            name: Rate(
                bucket.per_minute, bucket.remaining(now), bucket.wait_s(bucket.per_minute, now)
            )
            for name, bucket in buckets.items()
            if bucket is not None
        }

    def _no_room(self, places: int, held: int = 0) -> Exceeded | None:
        allowed = self.limits.concurrency
        taken = self.running + self.running_elsewhere - held
        if allowed is None or taken + places <= allowed:
            return None
        wait_s = math.inf if places > allowed else _FREED_S
        return Exceeded("concurrency", allowed, places, wait_s)


def _bucket(bucket: TokenBucket | None, per_minute: int | None, now: float) -> TokenBucket | None:
    """Return `bucket` resized to a limit that may have changed. A new limit gets a full bucket."""
    if per_minute is None:
        return None
    if bucket is None:
        return TokenBucket(per_minute, now)
    if per_minute != bucket.per_minute:
        bucket.resize(per_minute, now)
    return bucket


def _short(limit: str, bucket: TokenBucket | None, amount: int, now: float) -> Exceeded | None:
    if bucket is None or (wait_s := bucket.wait_s(amount, now)) == 0.0:
        return None
    return Exceeded(limit, bucket.per_minute, amount, wait_s)
