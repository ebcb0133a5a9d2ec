"""Refusing in an overload before anything is done for a request."""

from collections.abc import Mapping
from itertools import pairwise
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from c2cserve.core.actions import Backlog
from c2cserve.policy.cluster.admission import Pace
from c2cserve.policy.cluster.entrance import Entrance, Newcomer, RetryTimes
from c2cserve.policy.cluster.feedback import InTimeShare

NONE = Backlog()
LONG = Backlog(100.0, (("A", 80),), ("m",))
"""100 requests per second, and one tenant's 80 wait, for one model."""


def refused(
    check: Entrance, backlog: Backlog, model: str, tenant: str, ttft_s: float,
    preparing: Mapping[str, int] | None = None, now: float = 0.0, waited_s: float = 0.0,
    posted: Mapping[str, int] | None = None, present: Mapping[str, int] | None = None,
) -> tuple[str, float] | None:  # fmt: skip
    newcomer = Newcomer(model, tenant, ttft_s, waited_s)
    return check.refusal(backlog, newcomer, preparing or {}, posted or {}, present or {}, now)


def test_without_an_overload_all_are_let_in() -> None:
    check = Entrance(burst_s=0.5)
    assert refused(check, NONE, "m", "", 0.01) is None
    assert refused(check, NONE, "m", "", 0.01, {"": 500}, now=0.1) is None, "a burst"
    assert refused(check, NONE, "m", "", 0.01, now=0.2, waited_s=5.0) is None, "read late"


def test_what_would_be_late_by_the_controllers_queue_is_refused() -> None:
    check = Entrance(burst_s=0.5)
    assert refused(check, LONG, "m", "A", 2.0) is None
    found = refused(check, LONG, "m", "A", 1.0)
    assert found is not None
    reason, retry_s = found
    assert retry_s >= 1.0
    assert "0.8 s" in reason
    assert check.refused == 1


def test_what_is_on_its_way_there_counts() -> None:
    check = Entrance(burst_s=0.5)
    assert refused(check, LONG, "m", "A", 2.0, {"A": 30}) is not None
    assert refused(check, LONG, "m", "A", 2.0, posted={"A": 30}) is not None


def test_the_time_that_a_request_waited_to_be_read_counts() -> None:
    check = Entrance(burst_s=0.5)
    assert refused(check, LONG, "m", "A", 2.0) is None
    assert refused(check, LONG, "m", "A", 2.0, waited_s=0.3) is not None


def test_requests_that_are_read_late_one_after_another_are_an_overload() -> None:
    check = Entrance(burst_s=0.5)
    found = [
        refused(check, NONE, "m", "A", 1.0, now=tick * 0.01, waited_s=0.6) for tick in range(100)
    ]
    assert found[:40] == [None] * 40, "a stall ends"
    assert all(found[-40:])


def test_an_overload_that_only_the_entrance_sees_goes_on() -> None:
    """All are refused there, so the policy's queue is empty."""
    check = Entrance(burst_s=0.5)
    assert refused(check, LONG, "m", "A", 1.0) is not None
    assert refused(check, NONE, "m", "A", 1.0, posted={"A": 80}, now=0.1) is not None
    assert refused(check, NONE, "m", "A", 1.0, now=0.2) is None, "nothing is on its way"
    assert refused(check, NONE, "m", "A", 1.0, posted={"A": 80}, now=9.0) is None, "it is over"


def test_the_pace_falls_once_for_all_that_were_sent_before() -> None:
    pace = Pace()
    for _ in range(50):
        pace.note(late=True, sent_s=1.0, now=5.0)
    assert pace.share == Pace.MOST * Pace.LOWER
    pace.note(late=True, sent_s=5.5, now=9.0)
    assert pace.share == Pace.MOST * Pace.LOWER**2
    assert pace.slow(9.0)
    assert not pace.slow(9.0 + Pace.SLOW_S)


@given(st.lists(st.tuples(st.booleans(), st.floats(0.0, 20.0)), max_size=200))
def test_the_pace_stays_within_its_bounds(answers: list[tuple[bool, float]]) -> None:
    pace = Pace()
    for number, (late, took_s) in enumerate(answers):
        pace.note(late=late, sent_s=number - took_s, now=float(number))
        assert Pace.LEAST <= pace.share <= Pace.MOST


def test_the_share_that_may_pass_is_the_policys() -> None:
    check = Entrance(burst_s=0.5)
    backlog = Backlog(100.0, (("A", 80),), ("m",), 0.3)
    assert refused(check, backlog, "m", "A", 2.0) is not None


def test_requests_for_models_that_none_wait_for_are_let_in() -> None:
    """What waits may wait for weights on their way, while the slice has room for others."""
    check = Entrance(burst_s=0.5)
    slow = Backlog(2.0, (("A", 1),), ("m",))
    assert refused(check, slow, "m", "A", 0.9) is not None
    assert refused(check, slow, "n", "A", 0.9) is None
    assert refused(check, LONG, "n", "A", 0.9) is not None, "so many wait for places"


def test_another_tenant_is_let_in() -> None:
    check = Entrance(burst_s=0.5)
    assert refused(check, LONG, "m", "B", 0.5, {"A": 500}) is None


def test_a_crowd_before_the_controller_is_seen_too() -> None:
    check = Entrance(burst_s=0.5)
    crowd = {"": 60}
    now = 0.0
    for _ in range(200):  # 50 are prepared per second
        now += 0.02
        check.prepared()
        last = refused(check, NONE, "m", "", 1.0, crowd, now)
    assert last is not None
    assert refused(check, NONE, "m", "", 4.0, crowd, now) is None
    assert refused(check, NONE, "m", "", 1.0, {}, now) is None, "it is gone"


def test_a_prepared_request_that_is_late_is_refused_in_an_overload_only() -> None:
    check = Entrance(burst_s=0.5)
    assert check.overdue(NONE, 3.0, 1.0, 0.0) is None
    assert check.overdue(LONG, 0.5, 1.0, 0.0) is None
    assert check.overdue(LONG, 3.0, 1.0, 0.0) is not None


@given(st.lists(st.booleans(), max_size=400))
def test_the_share_stays_within_its_bounds(lates: list[bool]) -> None:
    share = InTimeShare()
    for late in lates:
        before = share.value
        share.note(late=late)
        assert share.least <= share.value <= share.most
        assert share.value <= before if late else share.value >= before


@given(st.floats(0.1, 0.6), st.integers(0, 1000))
@settings(max_examples=20)
def test_the_share_finds_how_long_may_be_waited(unseen: float, seed: int) -> None:
    """Each request takes as long as it was let in for, and an unseen time beside it."""
    share, random = InTimeShare(), Random(seed)
    late = 0
    for number in range(6000):
        was_late = share.value + random.gauss(unseen, 0.05) > 1.0
        share.note(late=was_late)
        late += was_late and number >= 1000
    assert late / 5000 < 0.04
    assert share.value > min(share.most, 1.0 - unseen) - 0.3


def test_retries_are_spread_evenly() -> None:
    retries = RetryTimes()
    times = sorted(retries.after_s(0.0, 1e9, 0.0) for _ in range(1000))
    assert times[0] >= 1.0
    assert times[-1] <= 2.0
    gaps = [after - before for before, after in pairwise(times)]
    assert max(gaps) < 0.01


@given(st.integers(100, 2000), st.floats(5.0, 200.0))
@settings(max_examples=10, deadline=None)
def test_clients_that_keep_to_retry_after_end_up_asking_for_what_can_be_done(
    clients: int, per_s: float
) -> None:
    """Each client asks when it was told to. So many are served per second, others are refused."""
    retries, due = RetryTimes(), [0.001 * one for one in range(clients)]
    refused = 0
    for tick in range(1200):
        now, room = tick * 0.1, per_s * 0.1
        for client, at in enumerate(due):
            if at > now:
                continue
            room -= 1
            wait_s = 0.5 if room >= 0 else retries.after_s(0.0, per_s, now)
            refused += room < 0 and tick >= 900
            due[client] = now + wait_s
    asked_per_s = refused / 30
    assert asked_per_s <= max(4.0 * per_s, clients / RetryTimes.MOST_S * 2.5)


def test_after_a_quiet_time_retries_are_early_again() -> None:
    retries = RetryTimes()
    for tick in range(2000):
        retries.after_s(0.0, 1.0, tick * 0.01)
    assert retries.mean_s > 5.0
    retries.after_s(0.0, 1.0, 200.0)
    assert retries.mean_s == 1.0


def test_a_tenant_with_less_than_its_share_is_let_in_whatever_others_ask() -> None:
    check = Entrance(burst_s=0.5)
    backlog = Backlog(1.0, (("A", 80),), ("m",), 0.05, places=16)
    assert refused(check, backlog, "m", "A", 1.0, present={"A": 80}) is not None
    for read_late_s in (0.0, 0.9):
        for own in range(8):
            present = {"A": 80, "B": own}
            assert not refused(check, backlog, "m", "B", 1.0, present=present, waited_s=read_late_s)
    assert refused(check, backlog, "m", "B", 1.0, present={"A": 80, "B": 8}) is not None
    alike = {"A": 3, "B": 3}
    assert refused(check, backlog, "m", "B", 1.0, present=alike) is not None, "as much as others"
