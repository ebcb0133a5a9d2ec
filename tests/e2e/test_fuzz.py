"""Thousands of wrong requests: no 5xx, no death, and the others' answers stay what they were."""

import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from mutations import Mutations
from raw_http import exchange, post
from server_process import ServerProcess

ALLOWED = {200, 400, 401, 403, 404, 405, 408, 409, 413, 415, 429, 431}
GOOD = [
    post("/v1/completions", json.dumps(body).encode())
    for body in (
        {"model": "sorter-llama", "prompt": "sort: dcba", "temperature": 0, "max_tokens": 8},
        {"model": "sorter-llama", "prompt": "a", "temperature": 1, "max_tokens": 8, "seed": 5},
    )
]


def choices(server: ServerProcess, data: bytes) -> Any:
    status, _, body = exchange(server.port, data)
    assert status == 200, body
    return json.loads(body)["choices"]


def fuzz(server: ServerProcess, seed: int, count: int) -> Counter[int]:
    """Statuses of so many requests. Any that is not allowed is shown with its request."""
    mutations, statuses = Mutations(seed), Counter[int]()
    expected = [choices(server, data) for data in GOOD]
    for number in range(count):
        data = mutations.request()
        status, headers, body = exchange(server.port, data)
        statuses[status] += 1
        shown = (seed, number, status, body[:300], data[:1500])
        assert status in ALLOWED, shown
        assert headers.get("x-request-id"), shown
        if status >= 400 and not data.startswith(b"HEAD"):
            assert json.loads(body)["error"]["message"], shown
        if number % 100 == 99:
            assert [choices(server, data) for data in GOOD] == expected
    return statuses


def unharmed(server: ServerProcess, pids: list[int]) -> None:
    assert server.worker_pids() == pids
    assert server.state()["counters"]["slice_lost"] == 0
    assert server.metric('c2cserve:text_processes_replaced_total{reason="broken"}') == 0


def test_five_hundred_wrong_requests(server: ServerProcess) -> None:
    pids = server.worker_pids()
    statuses = fuzz(server, 0, 500)
    assert statuses[200] > 10, "some are good enough to be computed"
    assert statuses[400] > 200
    unharmed(server, pids)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_twenty_thousand_wrong_requests(server: ServerProcess) -> None:
    pids = server.worker_pids()
    with ThreadPoolExecutor(4) as threads:
        statuses = sum(threads.map(lambda i: fuzz(server, i, 5000), range(1, 5)), Counter[int]())
    assert statuses.total() == 20_000
    unharmed(server, pids)
