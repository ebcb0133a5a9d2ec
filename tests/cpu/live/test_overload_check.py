"""Refusing in an overload before anything is done for a request."""

from c2cserve.core.actions import Backlog
from c2cserve.serving.controller.overload import OverloadCheck

NONE = Backlog()
LONG = Backlog(100.0, (("A", 80),), ("m",))
"""100 requests per second, and one tenant's 80 wait, for one model."""


def test_without_an_overload_all_are_let_in() -> None:
    check = OverloadCheck(burst_s=0.5)
    assert check.refusal(NONE, "m", "", 0.01, {}, now=0.0) is None
    assert check.refusal(NONE, "m", "", 0.01, {"": 500}, now=0.1) is None, "a burst"


def test_what_would_be_late_by_the_controllers_queue_is_refused() -> None:
    check = OverloadCheck(burst_s=0.5)
    assert check.refusal(LONG, "m", "A", 2.0, {}, now=0.0) is None
    refused = check.refusal(LONG, "m", "A", 1.0, {}, now=0.0)
    assert refused is not None
    assert refused.status == 429
    assert refused.retry_after_s is not None
    assert refused.retry_after_s >= 1.0
    assert "0.8 s" in refused.reason
    assert check.refused == 1


def test_what_is_on_its_way_there_counts() -> None:
    check = OverloadCheck(burst_s=0.5)
    assert check.refusal(LONG, "m", "A", 2.0, {"A": 30}, now=0.0) is not None


def test_requests_for_models_that_none_wait_for_are_let_in() -> None:
    """What waits may wait for weights on their way, while the slice has room for others."""
    check = OverloadCheck(burst_s=0.5)
    slow = Backlog(2.0, (("A", 1),), ("m",))
    assert check.refusal(slow, "m", "A", 0.9, {}, now=0.0) is not None
    assert check.refusal(slow, "n", "A", 0.9, {}, now=0.0) is None
    assert check.refusal(LONG, "n", "A", 0.9, {}, now=0.0) is not None, "so many wait for places"


def test_another_tenant_is_let_in() -> None:
    check = OverloadCheck(burst_s=0.5)
    assert check.refusal(LONG, "m", "B", 0.5, {"A": 500}, now=0.0) is None


def test_a_crowd_before_the_controller_is_seen_too() -> None:
    check = OverloadCheck(burst_s=0.5)
    crowd = {"": 60}
    now = 0.0
    for _ in range(200):  # 50 are prepared per second
        now += 0.02
        check.prepared()
        last = check.refusal(NONE, "m", "", 1.0, crowd, now)
    assert last is not None
    assert check.refusal(NONE, "m", "", 4.0, crowd, now) is None
    assert check.refusal(NONE, "m", "", 1.0, {}, now) is None, "it is gone"


def test_a_prepared_request_that_is_late_is_refused_in_an_overload_only() -> None:
    check = OverloadCheck(burst_s=0.5)
    assert check.too_late(NONE, waited_s=3.0, ttft_s=1.0) is None
    assert check.too_late(LONG, waited_s=0.5, ttft_s=1.0) is None
    refused = check.too_late(LONG, waited_s=3.0, ttft_s=1.0)
    assert refused is not None
    assert refused.status == 429
