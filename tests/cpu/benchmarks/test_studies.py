"""Which simulated results are simulated again, and what is written of them."""

import json
from pathlib import Path
from typing import Any

import pytest
import studies

from c2cserve.bench.provenance import commit
from c2cserve.sim.studies.registry import STUDIES

ROW = "| [`{}.json`](x) | `command` | simulated | 2026-01-02 | abc1234 | [page](page.md) |\n"


def test_every_study_is_one_of_them() -> None:
    assert {f"study_{name}" for name in STUDIES} <= {one.name for one in studies.ALL}


def test_a_row_gets_the_date_and_commit_of_its_result() -> None:
    lines = [ROW.format("one"), ROW.format("two")]
    first, second = studies.dated(lines, "two.json", "2026-11-23", "0123abcd")
    assert first == lines[0]
    assert "| 2026-11-23 | 0123abcd | [page](page.md) |" in second


def result(**fields: Any) -> dict[str, Any]:
    return {"commit": commit(), "parameters": {}} | fields


@pytest.mark.parametrize(
    ("written", "why"),
    [
        (None, "missing"),
        (result(), ""),
        ({"commit": "HEAD"}, "without its parameters"),
        (result(parameters={"quick": True}), "of a small part"),
    ],
)
def test_what_is_not_of_the_present_sources_is_outdated(
    written: dict[str, Any] | None, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(studies, "RESULTS", tmp_path)
    monkeypatch.setattr(studies, "_SOURCES", ("py.typed",))
    one = studies.ALL[0]
    if written is not None:
        one.path.write_text(json.dumps(written))
    assert studies.outdated(one) == why
