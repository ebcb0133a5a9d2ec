"""Studies put our figures beside published ones: `c2cserve simulate --study NAME`.

A study is a module here with a function `study(options) -> StudyResult`, and a line in `STUDIES`.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from typing import Any

from c2cserve.sim.studies.figure import Figure


@dataclass(frozen=True, slots=True)
class StudyOptions:
    seed: int = 0
    trace: str = ""
    """A trace file, for studies of traces that the package may not contain."""
    quick: bool = False
    """A small part of the study, to see that it works."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One number: ours, and the published one as its paper prints it ("" if there is none)."""

    what: str
    ours: str
    published: str = ""
    note: str = ""
    """Why they differ, or what was assumed."""


@dataclass(frozen=True, slots=True)
class StudyResult:
    title: str
    findings: Sequence[Finding]
    figures: Sequence[Figure] = ()
    data: dict[str, Any] = field(default_factory=dict[str, Any])
    """Everything else that should be in the JSON file."""

    def as_json(self) -> dict[str, Any]:
        return {
            "title": self.title,
            "findings": [asdict(finding) for finding in self.findings],
            "figures": [figure.as_json() for figure in self.figures],
            "data": {figure.name: figure.by_name() for figure in self.figures} | self.data,
        }


STUDIES = {
    "c2cserve": "C2CServe figures 4, 6, 9 to 12, 14 and section 9.5: weights that stream over C2C.",
    "superinfer": "SuperInfer figures 16 to 21: rotation of KV (minutes).",
    "slinfer": "SLINFER figures 22, 23, 32: requests served in time on 4 CPUs and 4 A100s.",
    "policies": "What each policy does: the same load with the rule and without it (minutes).",
    "gentd26": "C2CServe figure 2: how long models of a production trace are idle (--trace FILE).",
}
"""Name -> what it shows. The module is the name with _ for -."""


class UnknownStudy(ValueError):
    """No such study; the message lists those there are."""


def run(name: str, options: StudyOptions) -> StudyResult:
    """Raises UnknownStudy, and what the study raises: ValueError (and its kinds), OSError."""
    if name not in STUDIES:
        raise UnknownStudy(f"no study {name!r}; there are: {', '.join(STUDIES)}")
    module = import_module(f"c2cserve.sim.studies.{name.replace('-', '_')}")
    return module.study(options)
