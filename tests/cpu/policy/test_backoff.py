"""Delays grow to their limit and stay there, however long something fails."""

from c2cserve.core.backoff import back_off_s
from c2cserve.core.model import ModelSpec
from c2cserve.policy.cluster.pool.residency import ModelBook


def test_delays_double_up_to_the_limit() -> None:
    assert [back_off_s(failures, 2.0, 30.0) for failures in range(6)] == [2, 4, 8, 16, 30, 30]


def test_weeks_of_failures_are_no_overflow() -> None:
    assert back_off_s(1_000_000, 0.5, 60.0) == 60.0
    book = ModelBook(ModelSpec("m", 1, 1, 512, 64), failures=5_000)
    book.failed(1.0)
    assert book.retry_s == 61.0
