"""Counters and histograms with a series for each model.

A series keeps its text until it counts again. Of a large catalogue few models are used between two
scrapes, and the event loop writes the others' lines in microseconds.
"""

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence

from prometheus_client.utils import floatToGoString


class Counters:
    """`NAME_total` by model, and by one more label if `label` names it."""

    def __init__(self, name: str, help_: str, label: str | None = None) -> None:
        self._name = f"{name}_total"
        self._head = f"# HELP {self._name} {help_}\n# TYPE {self._name} counter\n"
        self._label = label
        self._values: dict[tuple[str, ...], float] = {}
        self._texts: dict[tuple[str, ...], str] = {}

    def add(self, value: float, *labels: str) -> None:
        """`labels`: the model's id, and the value of the other label if there is one."""
        self._values[labels] = self._values.get(labels, 0.0) + value
        self._texts.pop(labels, None)

    def begin(self, *labels: str) -> None:
        """Create the series at 0, unless it is there."""
        self._values.setdefault(labels, 0.0)

    def keep(self, models: set[str]) -> None:
        """Drop the series of other models."""
        for labels in [one for one in self._values if one[0] not in models]:
            del self._values[labels]
            self._texts.pop(labels, None)

    def write(self) -> Iterator[str]:
        """Yield the lines in pieces. Series may be added and dropped between two of them."""
        yield self._head
        for labels in list(self._values):
            if labels not in self._values:
                continue
            text = self._texts.get(labels)
            if text is None:
                shown = f'model_name="{_escaped(labels[0])}"'
                if self._label is not None:
                    shown = f'{self._label}="{labels[1]}",{shown}'
                text = f"{self._name}{{{shown}}} {floatToGoString(self._values[labels])}\n"
                self._texts[labels] = text
            yield text


class Histograms:
    """One histogram for each model. `bounds`: upper ones, rising; the last bucket has none."""

    def __init__(self, name: str, help_: str, bounds: Sequence[float]) -> None:
        self._name = name
        self._head = f"# HELP {name} {help_}\n# TYPE {name} histogram\n"
        self._bounds = list(bounds)
        self._begins = [
            f'{name}_bucket{{le="{floatToGoString(bound)}",model_name="'
            for bound in (*bounds, math.inf)
        ]
        self._series: dict[str, _Histogram] = {}

    def observe(self, model: str, *values: float) -> None:
        series = self._series.get(model)
        if series is None:
            series = self._series[model] = _Histogram(len(self._begins))
        for value in values:
            series.counts[bisect_left(self._bounds, value)] += 1
            series.sum += value
        series.text = ""

    def keep(self, models: set[str]) -> None:
        """Drop the series of other models."""
        for model in [one for one in self._series if one not in models]:
            del self._series[model]

    def write(self) -> Iterator[str]:
        """Yield the lines in pieces. Series may be added and dropped between two of them."""
        yield self._head
        for model in list(self._series):
            series = self._series.get(model)
            if series is None:
                continue
            if not series.text:
                series.text = self._written(_escaped(model), series)
            yield series.text

    def _written(self, model: str, series: "_Histogram") -> str:
        lines: list[str] = []
        below = 0
        for begin, count in zip(self._begins, series.counts, strict=True):
            below += count
            lines.append(f'{begin}{model}"}} {float(below)}\n')
        labels = f'{{model_name="{model}"}}'
        lines.append(f"{self._name}_count{labels} {float(below)}\n")
        lines.append(f"{self._name}_sum{labels} {floatToGoString(series.sum)}\n")
        return "".join(lines)


class _Histogram:
    __slots__ = ("counts", "sum", "text")

    def __init__(self, buckets: int) -> None:
        self.counts = [0] * buckets
        self.sum = 0.0
        self.text = ""
        """Empty: it has counted since it was written."""


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
