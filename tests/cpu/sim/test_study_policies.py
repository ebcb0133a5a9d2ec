"""Every policy has its figure: it is made by one command, and shown on the policies' page."""

import math
import re
from pathlib import Path

from c2cserve.sim.studies.registry import StudyOptions, run

PAGE = Path(__file__).parents[3] / "docs" / "policies.md"


def test_the_figures_of_the_page_are_those_of_the_study() -> None:
    result = run("policies", StudyOptions(quick=True))
    shown = set(re.findall(r"\(images/(policy_\w+)\.png\)", PAGE.read_text()))
    assert {figure.name for figure in result.figures} == shown
    for name in shown:
        assert (PAGE.parent / "images" / f"{name}.png").exists()
    for figure in result.figures:
        values = [y for points in figure.series.values() for _, y in points]
        assert len(values) == len(figure.series)
        assert all(math.isfinite(value) and value >= 0.0 for value in values)
    assert len(result.findings) == len(result.figures)
