"""Memory of one server over a phase: every look, and whether it grows without end."""

import csv
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from process_memory import OwnMemory

_HOST_GROWTH, _GPU_GROWTH = 256 << 20, 512 << 20
"""What memory may grow between the first and the last third of a phase, KV arenas on the host left
out (their pages cost nothing until used)."""
_GRAPHS_GROWTH = 1 << 30
"""The same, of one GPU slice: it captures decode graphs as it meets steps of new sizes, and again
after its worker was killed."""
_TEXT = "text process"
_TEXT_GROWTH = 1 << 30
"""The same, of all text processes together. Each keeps the tokenizers of the models that it has
met, and is replaced at its limit of memory."""
_WARM_UP = 0.25
"""Of a phase, before memory is looked at."""
_FEWEST_LOOKS = 12


@dataclass(frozen=True, slots=True)
class Thirds:
    """The first, middle and last third of a series, each by its median."""

    first: float
    middle: float
    last: float

    @classmethod
    def of(
        cls, series: Sequence[float], by: Callable[[Sequence[float]], float] = median
    ) -> "Thirds":
        """`by`: takes the peaks instead, say."""
        third = len(series) // 3
        parts = (series[:third], series[third : len(series) - third], series[-third:])
        return cls(*(by(part) for part in parts))

    def grow_beyond(self, allowed: float) -> bool:
        """Whether they grow by more, and would go on.

        A leak grows as much in its second half as in its first. What is loaded at first use does
        not: its growth ends. So the second half, taken twice, has to be too much as well."""
        return self.last - self.first > allowed and 2 * (self.last - self.middle) > allowed

    def shown(self) -> dict[str, int]:
        return {name: int(getattr(self, name)) for name in ("first", "middle", "last")}


class Memory:
    def __init__(self, file: Path, arena_bytes: int, *, judge_gpu: bool) -> None:
        """`file` gets a line per process and look. `arena_bytes`: of all KV arenas on the host."""
        self._file = file
        self._arena_bytes, self._judge_gpu = arena_bytes, judge_gpu
        self._looks: list[tuple[Counter[str], Sequence[int]]] = []
        """Bytes by kind of process, and what each GPU has in use."""
        self._write([("at_s", "pid", "kind", "own_bytes")], "w")

    def look(self, at_s: float, processes: Sequence[OwnMemory], gpus: Sequence[int]) -> None:
        own: Counter[str] = Counter()
        for one in processes:
            own[one.kind] += one.bytes
        self._looks.append((own, gpus))
        at_s = round(at_s, 3)
        self._write([(at_s, one.pid, one.kind, one.bytes) for one in processes], "a")
        self._write([(at_s, "", f"gpu{gpu}", used) for gpu, used in enumerate(gpus)], "a")

    def judged(self) -> tuple[dict[str, Any], list[tuple[str, str, int]]]:
        """For the summary; and what grows: its name, what was expected, and the last third."""
        looks = self._looks[int(_WARM_UP * len(self._looks)) :]
        found: dict[str, Any] = {"looks": len(looks)}
        if len(looks) < _FEWEST_LOOKS:
            return found | {"judged": "no: too few looks"}, []
        series = {
            "own_bytes": [own.total() - own[_TEXT] for own, _ in looks],
            "text_bytes": [own[_TEXT] for own, _ in looks],
        }
        for gpu in range(len(looks[0][1])):
            series[f"gpu{gpu}_bytes"] = [gpus[gpu] for _, gpus in looks]
        slices = len({kind for own, _ in looks for kind in own if kind.startswith("worker/")})
        grown: list[tuple[str, str, int]] = []
        for name, values in series.items():
            of_gpu = name.startswith("gpu")
            # While a worker is started anew the GPU is all but empty, so its peaks are compared.
            thirds = Thirds.of(values, max) if of_gpu else Thirds.of(values)
            allowed = _HOST_GROWTH + self._arena_bytes
            if of_gpu:
                allowed = _GPU_GROWTH + slices * _GRAPHS_GROWTH
            elif name == "text_bytes":
                allowed = _TEXT_GROWTH
            judged = self._judge_gpu or not of_gpu
            found[name] = {**thirds.shown(), "allowed": allowed if judged else "not judged"}
            if judged and thirds.grow_beyond(allowed):
                grown.append((name, f"{int(thirds.first)} + {allowed}", int(thirds.last)))
        found["by_process"] = {
            kind: Thirds.of([own[kind] for own, _ in looks]).shown()
            for kind in sorted({kind for own, _ in looks for kind in own})
        }
        return found, grown

    def _write(self, rows: Sequence[Sequence[object]], mode: str) -> None:
        with self._file.open(mode, newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(rows)
