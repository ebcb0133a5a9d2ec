"""One row of the table is enough: the page, the worker's loop and the snapshot follow it."""

from dataclasses import fields
from pathlib import Path

import pytest

from c2cserve.runtime.gateway import SliceStatus
from c2cserve.runtime.slice_stats import STATS, SliceStats, StatSource
from c2cserve.serving.ipc.status_page import Field, StatusPage

NUMBERED = SliceStats(**{stat.name: i + 1 for i, stat in enumerate(STATS)})


@pytest.fixture
def page(tmp_path: Path) -> StatusPage:
    return StatusPage(tmp_path / "page", create=True)


def test_every_row_has_its_own_place_on_the_page(page: StatusPage) -> None:
    vital = [page[field] for field in Field]
    for source in StatSource:
        page.write_stats(NUMBERED, source)
    assert page.stats() == NUMBERED
    assert [page[field] for field in Field] == vital


def test_a_source_writes_its_rows_only(page: StatusPage) -> None:
    for stat in STATS:
        if stat.source is StatSource.LOOP:
            page.add_stat(stat.name, 7)
    page.write_stats(NUMBERED, StatSource.POLICY)
    page.write_stats(SliceStats(), StatSource.ENGINE)
    for i, stat in enumerate(STATS):
        expected = {StatSource.LOOP: 7, StatSource.POLICY: i + 1, StatSource.ENGINE: 0}
        assert page.stat(stat.name) == expected[stat.source], stat.name


def test_the_worker_reads_what_the_controller_created(page: StatusPage) -> None:
    worker = StatusPage(page.path, create=False)
    worker.add_stat("steps", 2)
    worker.add_stat("steps", 3)
    assert page.stats() == SliceStats(steps=5)


def test_a_name_that_is_not_in_the_table_is_an_error(page: StatusPage) -> None:
    with pytest.raises(KeyError):
        page.add_stat("stepps", 1)


def test_operators_see_every_row_by_its_name() -> None:
    assert {stat.name for stat in STATS} <= {field.name for field in fields(SliceStatus)}


def test_a_name_says_its_unit() -> None:
    for stat in STATS:
        for unit in ("bytes", "tokens", "seconds"):
            assert (stat.unit == unit) == stat.name.endswith(unit), stat.name
