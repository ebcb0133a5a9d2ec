"""How busy a slice is: of the last seconds, whatever it did before."""

from types import SimpleNamespace
from typing import Any

import pytest

from c2cserve.serving.controller.snapshot import BusyShares
from c2cserve.serving.ipc.status_page import Field


def slot(pid: int, busy_s: float, started_s: float = 0.0) -> Any:
    worker = SimpleNamespace(pid=pid, page={Field.BUSY_S: busy_s})
    return SimpleNamespace(worker=worker, slice=SimpleNamespace(id="s0"), started_s=started_s)


def test_an_old_rush_is_forgotten() -> None:
    shares, one = BusyShares(), slot(1, 0.0)
    for second in range(100):
        one.worker.page[Field.BUSY_S] = float(min(second, 50))
        shares.sample([one], float(second))
        if second == 40:
            assert shares.share(one, 40.0) == pytest.approx(1.0)
    assert shares.share(one, 99.0) == 0.0
    one.worker.page[Field.BUSY_S] += 2.5
    assert shares.share(one, 99.5) == pytest.approx(2.5 / 5.5)


def test_a_new_worker_begins_at_nothing() -> None:
    shares = BusyShares()
    for second in range(10):
        shares.sample([slot(1, float(second))], float(second))
    fresh = slot(2, 0.25, started_s=10.0)
    assert shares.share(fresh, 11.0) == pytest.approx(0.25)
    shares.sample([fresh], 11.0)
    fresh.worker.page[Field.BUSY_S] = 0.75
    assert shares.share(fresh, 12.0) == pytest.approx(0.5)


def test_no_worker_is_not_busy() -> None:
    shares = BusyShares()
    lost: Any = SimpleNamespace(worker=None, slice=SimpleNamespace(id="s0"), started_s=0.0)
    shares.sample([lost], 1.0)
    assert shares.share(lost, 2.0) == 0.0
