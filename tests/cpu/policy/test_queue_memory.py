"""What the queue holds of requests that have left it."""

import tracemalloc

from c2cserve.core.request import Request, Slo
from c2cserve.policy.cluster.queue import WaitingQueue


def request(number: int, due_s: float) -> Request:
    return Request(f"r{number}", "m", 1, 1, 0.0, Slo(ttft_s=due_s))


def test_requests_that_left_take_no_memory() -> None:
    """Where late requests are not looked for, no moment comes when they are due."""
    queue = WaitingQueue()
    tracemalloc.start()
    for number in range(50_000):
        queue.push(request(number, 1e6))
        queue.remove(f"r{number}")
    held_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held_bytes < 1 << 20


def test_those_that_wait_still_age_in_their_order() -> None:
    queue = WaitingQueue()
    for number in range(20):
        queue.push(request(number, 100.0 - number))
    for number in range(20, 5_000):
        queue.push(request(number, 50.0))
        queue.remove(f"r{number}")
    moved = [one.id for one in queue.age(95.5)]
    assert moved == [f"r{number}" for number in range(19, 4, -1)]
    assert [one.id for one in queue.age(200.0)] == [f"r{number}" for number in range(4, -1, -1)]
