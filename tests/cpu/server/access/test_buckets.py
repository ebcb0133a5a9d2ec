"""The arithmetic of limits: what a bucket and a quota let through over any stretch of time."""

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from c2cserve.server.access.buckets import TokenBucket
from c2cserve.server.access.quota import KeyLimits, Quota

GAPS_S = st.floats(0, 100, allow_nan=False)
AMOUNTS = st.integers(1, 200)
STEPS = st.lists(st.tuples(GAPS_S, AMOUNTS), max_size=60)
SIZES = st.integers(1, 1000)


def taken(bucket: TokenBucket, steps: Sequence[tuple[float, int]]) -> list[tuple[float, int]]:
    """When a caller that asks first takes how much."""
    now, passed = 0.0, list[tuple[float, int]]()
    for gap_s, amount in steps:
        now += gap_s
        if bucket.wait_s(amount, now) == 0.0:
            bucket.take(amount, now)
            passed.append((now, amount))
    return passed


@given(SIZES, STEPS)
def test_no_stretch_of_time_sees_more_than_the_size_and_the_rate(
    size: int, steps: list[tuple[float, int]]
) -> None:
    passed = taken(TokenBucket(size, 0.0), steps)
    for i, (begin_s, _) in enumerate(passed):
        total = 0
        for end_s, amount in passed[i:]:
            total += amount
            assert total <= size * (1 + (end_s - begin_s) / 60) + 1e-3


@given(SIZES, STEPS, AMOUNTS)
def test_the_wait_is_exact(size: int, steps: list[tuple[float, int]], amount: int) -> None:
    bucket = TokenBucket(size, 0.0)
    taken(bucket, steps)
    now = sum(gap_s for gap_s, _ in steps)
    wait_s = bucket.wait_s(amount, now)
    if amount > size:
        assert wait_s == math.inf
        return
    if wait_s > 1e-3:
        assert bucket.wait_s(amount, now + 0.99 * wait_s) > 0.0
    assert bucket.wait_s(amount, now + wait_s) <= 1e-5


@given(SIZES, st.integers(1, 100_000))
def test_a_debt_is_refilled_at_the_rate(size: int, output: int) -> None:
    bucket = TokenBucket(size, 0.0)
    bucket.take(size + output, 10.0)
    assert bucket.remaining(10.0) == 0
    assert bucket.wait_s(1, 10.0) == pytest.approx((output + 1) * 60 / size)
    assert bucket.level(10.0 + output * 60 / size) == pytest.approx(0.0, abs=1e-3)


@given(SIZES, STEPS)
def test_what_is_given_back_was_never_taken(size: int, steps: list[tuple[float, int]]) -> None:
    untouched, bucket, now = TokenBucket(size, 0.0), TokenBucket(size, 0.0), 0.0
    for gap_s, amount in steps:
        now += gap_s
        bucket.take(amount, now)
        bucket.give_back(amount, now)
    assert bucket.level(now) == pytest.approx(untouched.level(now))


@given(SIZES, STEPS, GAPS_S)
def test_time_that_goes_backwards_gives_nothing(
    size: int, steps: list[tuple[float, int]], back_s: float
) -> None:
    bucket = TokenBucket(size, 0.0)
    taken(bucket, steps)
    now = sum(gap_s for gap_s, _ in steps)
    level = bucket.level(now)
    assert bucket.level(now - back_s) == level
    assert bucket.level(now) == level


@given(SIZES, SIZES, STEPS)
def test_a_change_of_size_gives_nothing_away(
    size: int, other: int, steps: list[tuple[float, int]]
) -> None:
    bucket = TokenBucket(size, 0.0)
    taken(bucket, steps)
    now = sum(gap_s for gap_s, _ in steps)
    level = bucket.level(now)
    bucket.resize(other, now)
    assert bucket.level(now) == pytest.approx(min(level, other))
    assert bucket.level(now + 61 * 60) <= other


# ---- quotas -------------------------------------------------------------------------------------

EVENTS = st.lists(
    st.tuples(
        GAPS_S, st.sampled_from(["begin", "output", "end"]), st.integers(1, 8), st.integers(1, 100)
    ),
    max_size=60,
)
ALL_LIMITS = st.builds(
    KeyLimits,
    requests_per_minute=st.none() | SIZES,
    tokens_per_minute=st.none() | SIZES,
    concurrency=st.none() | st.integers(1, 12),
)


@given(ALL_LIMITS, EVENTS)
def test_a_quota_holds_all_its_limits_at_once(
    limits: KeyLimits, events: list[tuple[float, str, int, int]]
) -> None:
    quota, now = Quota(limits, 0.0), 0.0
    running, requests, prompts, outputs = list[int](), 0, 0, 0
    for gap_s, event, choices, tokens in events:
        now += gap_s
        if event == "begin":
            if quota.arrive(now) is not None:
                continue
            requests += 1
            exceeded = quota.admit(1, choices, tokens, now)
            if exceeded is not None:
                quota.leave(1)
                assert exceeded.wait_s > 0
                continue
            running.append(choices)
            prompts += tokens
        elif event == "output" and running:
            quota.charge(tokens, now)
            outputs += tokens
        elif event == "end" and running:
            quota.leave(running.pop())
        assert quota.running == sum(running) <= (limits.concurrency or math.inf)
        if limits.requests_per_minute is not None:
            assert requests <= limits.requests_per_minute * (1 + now / 60) + 1e-3
        if limits.tokens_per_minute is not None:
            assert prompts <= limits.tokens_per_minute * (1 + now / 60) + 1e-3
            if outputs and prompts + outputs > limits.tokens_per_minute * (1 + now / 60) + 1:
                assert quota.arrive(now) is not None, "a debt is paid before the next request"


def test_a_refused_request_takes_nothing() -> None:
    quota = Quota(KeyLimits(requests_per_minute=2, tokens_per_minute=10, concurrency=1), 0.0)
    assert quota.arrive(0.0) is None
    before = quota.rates(0.0)
    exceeded = quota.arrive(0.0)
    assert exceeded is not None
    assert exceeded.limit == "concurrency"
    assert quota.rates(0.0) == before
    assert quota.running == 1
    exceeded = quota.admit(1, 1, 11, 0.0)
    assert exceeded is not None
    assert (exceeded.limit, exceeded.allowed, exceeded.asked) == ("tokens_per_minute", 10, 11)
    assert exceeded.wait_s == math.inf, "more than the bucket holds"
    exceeded = quota.admit(1, 2, 1, 0.0)
    assert exceeded is not None
    assert (exceeded.limit, exceeded.wait_s) == ("concurrency", math.inf)
    assert quota.rates(0.0) == before


def test_changed_limits_keep_what_was_used() -> None:
    quota = Quota(KeyLimits(requests_per_minute=10), 0.0)
    for _ in range(8):
        assert quota.arrive(0.0) is None
    quota.change(KeyLimits(requests_per_minute=60, concurrency=8), 0.0)
    rate = quota.rates(0.0)["requests"]
    assert (rate.limit, rate.remaining, quota.running) == (60, 2, 8)
    assert rate.full_in_s == pytest.approx(58.0)
    quota.change(KeyLimits(), 0.0)
    assert quota.rates(0.0) == {}
    assert quota.arrive(0.0) is None


def test_models_are_patterns_of_ids() -> None:
    limits = KeyLimits(models=("org/*", "phi"))
    assert [limits.allows_model(one) for one in ("org/a", "phi", "phi2", "other/org/a")] == [
        True, True, False, False,
    ]  # fmt: skip
    assert not KeyLimits(models=()).allows_model("phi")
    assert KeyLimits().allows_model("phi")
