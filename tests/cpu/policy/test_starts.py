"""A slice that starts fewer requests than was foretold is sent no more than it starts in time."""

import pytest

from c2cserve.policy.cluster.starts import MANY, Starts

TTFT_S = 1.0


def play(per_s: float, asked_per_s: float, seconds: float = 30.0) -> tuple[int, float]:
    """Ask a slice for more than it can start, which is `per_s`. Return the most that waited there
    after the first half, and the share of the first tokens of that time that were late."""
    starts, now, sent = Starts(), 0.0, list[float]()
    most, late, tokens = 0, 0, 0
    asked = begun = 0.0

    def waiting(slice_id: str) -> int:
        return len(sent)

    while now < seconds:
        now += 0.01
        asked, begun = asked + 0.01 * asked_per_s, begun + 0.01 * per_s
        starts.refresh(waiting, now)
        while asked >= 1.0:
            asked -= 1.0
            if not starts.full("gpu0", waiting, TTFT_S):
                sent.append(now)
        while begun >= 1.0:
            begun -= 1.0
            if sent:
                was_late = now - sent.pop(0) > TTFT_S
                starts.started("gpu0", late=was_late)
                if now > seconds / 2:
                    late, tokens = late + was_late, tokens + 1
        if now > seconds / 2:
            most = max(most, len(sent))
    return most, late / max(1, tokens)


@pytest.mark.parametrize("per_s", [20.0, 150.0])
@pytest.mark.parametrize("load", [1.5, 4.0])
def test_a_slice_holds_what_it_starts_in_time(per_s: float, load: float) -> None:
    most, late = play(per_s, load * per_s)
    assert most <= max(MANY, 1.5 * per_s), "else all would be late"
    assert late < 0.2


def test_nothing_is_held_back_from_a_slice_that_is_in_time() -> None:
    """However much waits there."""
    starts = Starts()
    for number in range(1000):
        starts.started("gpu0", late=False)
        starts.refresh(lambda _: 10_000, 0.01 * number)
        assert not starts.full("gpu0", lambda _: 10_000, TTFT_S)


def test_few_requests_may_always_wait() -> None:
    """They may wait for weights."""
    starts = Starts()
    for number in range(100):
        starts.started("gpu0", late=True)
        starts.refresh(lambda _: MANY, float(number))
    assert starts.full("gpu0", lambda _: MANY, 1e-6)
    assert not starts.full("gpu0", lambda _: MANY - 1, 1e-6)
    assert not starts.full("gpu1", lambda _: MANY, 1e-6)
