"""Loads of GPU 0 over the link of GPU 1, which another process owns. It is killed and stopped.

`pytest -m gpu -s tests/gpu/test_neighbour_relays.py` prints the rates."""

import random
import signal
import sys
import time
from collections.abc import Iterator

import pytest
import torch
from neighbour_case import SIZE, Case, opened_case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(240),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a neighbour"),
]


@pytest.fixture
def case() -> Iterator[Case]:
    with opened_case() as made:
        yield made


def show(line: str) -> None:
    sys.stdout.write(f"\n{line}\n")


def test_two_links_are_faster_than_one(case: Case) -> None:
    alone = max(case.move() for _ in range(3))
    case.start()
    case.move_until_relayed()
    both = max(case.move() for _ in range(5))
    show(f"one link {alone / 1e9:.1f} GB/s, and another worker's {both / 1e9:.1f}")
    assert both > 1.1 * alone
    assert case.relayed.stalls == 0


def test_a_worker_that_is_killed_costs_only_time(case: Case) -> None:
    for _ in range(2):
        worker = case.start()
        case.move_until_relayed()
        for delay_s in (0.0, 0.003, 0.006):
            ticket = case.submit()
            time.sleep(delay_s)
            if delay_s:
                worker.kill()
            assert case.engine.wait(ticket, 60)
            case.check()
        worker.communicate()


def test_a_worker_that_stands_still_is_recalled(case: Case) -> None:
    worker = case.start()
    case.move_until_relayed()
    worker.send_signal(signal.SIGSTOP)
    case.move()
    case.move()
    case.gpu.fill_(7)
    torch.cuda.synchronize(0)
    worker.send_signal(signal.SIGCONT)
    time.sleep(0.2)
    assert bool((case.gpu == 7).all()), "something was written late"
    case.move_until_relayed()
    show(f"{case.relayed}")


def test_relays_beside_a_worker_that_computes(case: Case) -> None:
    worker = case.start("compute")
    assert worker.stdout is not None
    alone = [float(worker.stdout.readline()) for _ in range(10)][3:]
    case.move_until_relayed()
    rates = [case.move() for _ in range(20)]
    beside = [float(worker.stdout.readline()) for _ in range(10)]
    show(
        f"{max(rates) / 1e9:.1f} GB/s; products a second: {max(alone):.0f} alone,"
        f" {min(beside):.0f} to {max(beside):.0f} beside relays (checks of bytes included)"
    )


def test_many_transfers_with_checks_beside_kills(case: Case) -> None:
    rng = random.Random(1)
    for _ in range(5):
        worker = case.start()
        case.move_until_relayed()
        kill_at = rng.randrange(40)
        for number in range(40):
            start = rng.randrange(SIZE // 2)
            stop = start + rng.randrange(16 << 20, SIZE // 2)
            case.gpu[start:stop] = 0
            torch.cuda.synchronize(0)
            ticket = case.submit(start, stop)
            if number == kill_at:
                time.sleep(rng.random() * 5e-3)
                worker.kill()
            assert case.engine.wait(ticket, 60)
            there = case.host[start:stop].to("cuda:0")
            assert torch.equal(case.gpu[start:stop], there)
        worker.communicate()
    show(f"{case.relayed}")
