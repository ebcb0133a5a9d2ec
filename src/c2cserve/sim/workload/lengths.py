"""Lengths for traces that have none: sampled from other traces, deterministic by seed."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

from c2cserve.sim.workload.rows import TraceError, fields

Lengths = Callable[[Random], tuple[int, int]]
"""Samples prompt and output tokens."""
Curve = Sequence[tuple[float, float]]
"""Quantiles and their values, both rising."""


def pairs(path: Path, dataset: str) -> Lengths:
    """Sample observed pairs of a file: all of them, or those of one value of its column `dataset`.

    Raises OSError, TraceError."""
    found = [
        (max(1, int(line["input_tokens"])), max(1, int(line["output_tokens"])))
        for line in fields(path)
        if not dataset or line.get("dataset") == dataset
    ]
    if not found:
        raise TraceError(f"{path.name} has no lengths of {dataset!r}")
    return lambda random: found[random.randrange(len(found))]


def quantiles(path: Path, model: str) -> Lengths:
    """Sample prompt and output independently, by ServeGen's quantiles (model, field, q, value).

    Raises OSError, TraceError."""
    curves: dict[str, list[tuple[float, float]]] = {"input_tokens": [], "output_tokens": []}
    for line in fields(path):
        if line["model"] == model and line["field"] in curves:
            curves[line["field"]].append((float(line["q"]), float(line["value"])))
    if not all(curves.values()):
        raise TraceError(f"{path.name} has no quantiles of {model!r}")
    prompts, outputs = (sorted(curve) for curve in curves.values())
    return lambda random: (at(prompts, random.random()), at(outputs, random.random()))


def at(curve: Curve, q: float) -> int:
    """Return the tokens at quantile `q`, linear between points."""
    upper = min(max(1, bisect_right(curve, q, key=lambda point: point[0])), len(curve) - 1)
    (q0, v0), (q1, v1) = curve[upper - 1], curve[upper]
    share = (q - q0) / (q1 - q0) if q1 > q0 else 0.0
    return max(1, round(v0 + share * (v1 - v0)))


def fixed(prompt: int, output: int) -> Lengths:
    return lambda random: (prompt, output)
