"""Where a front looks for cached prefixes, when it has seen more of them than it keeps."""

import time
from collections.abc import Iterator
from itertools import count

from c2cserve.core.request import Request
from c2cserve.policy.fleet.nodes import CachedPrefixes

BLOCKS = 16


def requests() -> Iterator[Request]:
    for number in count():
        hashes = tuple(range(number * BLOCKS, (number + 1) * BLOCKS))
        yield Request(f"r{number}", "m", BLOCKS * 16, 1, 0.0, prefix_hashes=hashes)


def seconds(prefixes: CachedPrefixes, asked: Iterator[Request], times: int) -> float:
    some = [next(asked) for _ in range(times)]
    began_s = time.thread_time()
    for one in some:
        prefixes.note(one, "m", "node")
    return time.thread_time() - began_s


def test_a_request_costs_no_more_when_others_are_forgotten_for_it() -> None:
    most, asked = 200_000, requests()
    prefixes = CachedPrefixes(most)
    begin_s = seconds(prefixes, asked, most // BLOCKS)
    assert seconds(prefixes, asked, 1000) < 10.0 * begin_s * 1000 / (most // BLOCKS)


def test_the_least_recent_are_forgotten() -> None:
    asked = requests()
    first, second, third = (next(asked) for _ in range(3))
    prefixes = CachedPrefixes(2 * BLOCKS)
    for one in (first, second, first, third):
        prefixes.note(one, "m", f"node of {one.id}")
    nodes = [prefixes.find(one, "m", {"node of r0", "node of r2"}) for one in (first, second)]
    assert nodes == [("node of r0", BLOCKS), ("", 0)]
    assert prefixes.find(third, "m", {"node of r2"}) == ("node of r2", BLOCKS)
