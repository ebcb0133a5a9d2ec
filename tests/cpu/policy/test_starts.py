"""A slice that starts fewer requests than was foretold is sent no more than it starts in time."""

from dataclasses import dataclass, field
from random import Random

import pytest
from cluster_cases import request, slice_, spec

from c2cserve.policy.cluster.slice_load import Instance, SliceLoad
from c2cserve.policy.cluster.starts import MANY, TRUST_S, Starts

TTFT_S = 1.0
BEFORE_S, AFTER_S = 0.2, 0.05
"""What passes before a request is sent, and until its first token is seen."""


@dataclass
class Played:
    """First tokens of a run, and requests that were given up on the slice."""

    met: int = 0
    late: list[float] = field(default_factory=list[float])
    dropped: int = 0


def play(per_s: float, load: float, seconds: float = 15.0, step_s: float = 0.005) -> Played:
    """Ask a slice for `load` times what it can start, `per_s`. First come, first served."""
    random, starts, played = Random(0), Starts(), Played()
    slice_load, sent_s = SliceLoad(slice_(max_batch=4096)), dict[str, float]()
    model = slice_load.active["a"] = Instance(spec("a"))
    now = asked = begun = 0.0
    numbers = iter(range(1 << 30))

    def waiting(slice_id: str) -> int:
        return len(model.pending)

    def leave(request_id: str) -> None:
        slice_load.remove("a", request_id)

    while now < seconds:
        now += step_s
        asked += step_s * load * per_s * random.uniform(0.5, 1.5)
        begun += step_s * per_s * random.uniform(0.5, 1.5)
        starts.refresh(waiting, now)
        for job in starts.hopeless(slice_load, now):
            played.dropped += 1
            leave(job.request.id)
        while asked >= 1.0:
            asked -= 1.0
            if not starts.full("s0", len(model.pending), TTFT_S):
                one = request(f"r{next(numbers)}", at=now - BEFORE_S, ttft_s=TTFT_S)
                slice_load.add(one)
                sent_s[one.id] = now
        while begun >= 1.0:
            begun -= 1.0
            if model.pending:
                first = next(iter(model.pending.values())).request
                after_s = now - first.arrival_s + AFTER_S
                starts.started("s0", after_s / TTFT_S, sent_s[first.id])
                leave(first.id)
                played.met += after_s <= TTFT_S
                played.late += [now] if after_s > TTFT_S else []
    return played


@pytest.mark.parametrize("per_s", [40.0, 200.0])
@pytest.mark.parametrize("load", [1.2, 1.5, 2.0, 4.0, 7.0])
def test_what_a_slice_starts_is_in_time(per_s: float, load: float) -> None:
    """From the beginning of an overload, which is not known yet, and ever after."""
    played = play(per_s, load)
    assert played.met >= 0.96 * 15.0 * per_s, "it never runs out of requests"
    assert len(played.late) <= 0.03 * 15.0 * per_s
    assert not [late for late in played.late if late > 5.0], "it is learned once"


def test_nothing_is_held_back_from_a_slice_that_is_in_time() -> None:
    """However much waits there."""
    starts = Starts()
    for number in range(1000):
        starts.started("gpu0", 0.7, sent_s=0.01 * number)
        starts.refresh(lambda _: 10_000, 0.01 * number)
        assert not starts.full("gpu0", 10_000, TTFT_S)


def test_a_slice_is_trusted_again_after_a_while() -> None:
    starts = Starts()
    starts.started("gpu0", 1.2, sent_s=0.0)
    starts.refresh(lambda _: 1000, 1.0)
    for number in range(10):
        starts.started("gpu0", 0.5, sent_s=1.0)
        starts.refresh(lambda _: 1000, 1.0 + number)
    assert starts.full("gpu0", 1000, TTFT_S)
    starts.refresh(lambda _: 1000, 1.1 + TRUST_S)
    assert not starts.full("gpu0", 1000, TTFT_S)


def test_what_is_late_for_itself_tells_nothing_about_others() -> None:
    """It waited for weights, and few waited beside it."""
    starts, few = Starts(), MANY // 2 - 1
    for number in range(100):
        starts.started("gpu0", 2.0, sent_s=float(number))
        starts.refresh(lambda _: few, float(number))
    assert not starts.full("gpu0", 1000, 1e-6)


def test_few_requests_may_always_wait() -> None:
    """They may wait for weights."""
    starts = Starts()
    for number in range(100):
        starts.started("gpu0", 2.0, sent_s=float(number))
        starts.refresh(lambda _: MANY, float(number))
    assert starts.full("gpu0", MANY, 1e-6)
    assert not starts.full("gpu0", MANY - 1, 1e-6)
    assert not starts.full("gpu1", MANY, 1e-6)
