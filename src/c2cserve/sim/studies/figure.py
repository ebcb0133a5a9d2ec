"""A figure of a study: our numbers, and beside them those a paper has printed."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Points = Sequence[tuple[float | str, float]]


@dataclass(frozen=True, slots=True)
class Figure:
    """`series` are lines or bars of (x, y) by name; x of bars is a word. `published` holds numbers
    from the paper's text, which are plotted beside the series of the same name."""

    name: str
    """The name of its files."""
    title: str
    x: str
    y: str
    series: Mapping[str, Points]
    published: Mapping[str, Points] = field(default_factory=dict[str, Points])
    kind: Literal["lines", "bars"] = "lines"
    log: Literal["", "x", "y"] = ""
    small: bool = False
    """Whether it shares a page with many others."""

    def by_name(self) -> dict[str, dict[str, float]]:
        """Return the values by series and x."""
        return {name: {str(x): y for x, y in points} for name, points in self.series.items()}

    def as_json(self) -> dict[str, Any]:
        return asdict(self)
