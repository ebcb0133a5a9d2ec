"""Arithmetic on measured GEMMs: floors, ratios, and what is said of a whole table."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

RATIO_MEAN_BAR = 1.15
RATIO_MAX_BAR = 1.4
PAPER_BAR = 1.10
FAIR_SHARE_BAR = 0.05


def floor_s(cublas_s: float, weight_bytes: float, link_bytes_per_s: float) -> float:
    """What nothing beats: cuBLAS with W in HBM, and W once over the link by the copy engine."""
    return max(cublas_s, weight_bytes / link_bytes_per_s)


def geometric_mean(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    if not logs:
        raise ValueError("the mean of nothing")
    return math.exp(math.fsum(logs) / len(logs))


def ratios(rows: Sequence[Mapping[str, Any]], key: str) -> dict[str, float | int]:
    """Of `key` (seconds) over the floor, over the rows that have it."""
    found = [row[key] / row["floor_s"] for row in rows if row.get(key) is not None]
    if not found:
        return {"cases": 0}
    return {"cases": len(found), "mean": geometric_mean(found), "max": max(found)}


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Per home: the pick and the best measured over the floor, the worst pick, how often the pick
    was the best, and every dataflow at its best over the floor where it was timed."""
    by_home: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        by_home[row["home"]].append(row)
    return {home: _of_home(own) for home, own in by_home.items()}


def _of_home(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    picked = [row for row in rows if row["pick_s"] is not None]
    worst = max(picked, key=lambda row: row["pick_s"] / row["floor_s"], default=None)
    return {
        "pick": ratios(rows, "pick_s"),
        "best": ratios(rows, "best_s"),
        "over_limit": sum(row["pick_s"] > RATIO_MAX_BAR * row["floor_s"] for row in picked),
        "failed": len(rows) - len(picked),
        "pick_over_best": geometric_mean(row["pick_s"] / row["best_s"] for row in picked)
        if picked
        else None,
        "worst": worst and {name: worst[name] for name in ("model", "linear", "m", "pick")},
        "dataflows": _dataflows(rows),
    }


def _dataflows(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float | int]]:
    best: dict[str, list[dict[str, float]]] = defaultdict(list)
    for row in rows:
        seconds: dict[str, float] = {}
        for one in row["candidates"]:
            if one["seconds"] is not None:
                known = seconds.get(one["dataflow"], math.inf)
                seconds[one["dataflow"]] = min(known, one["seconds"])
        for dataflow, taken in seconds.items():
            best[dataflow].append({"s": taken, "floor_s": row["floor_s"]})
    return {dataflow: ratios(own, "s") for dataflow, own in sorted(best.items())}


def summary_lines(found: Mapping[str, Any]) -> list[str]:
    """For people."""
    lines: list[str] = []
    for home, one in found.items():
        pick, best = one["pick"], one["best"]
        if not pick["cases"]:
            lines.append(f"{home}: nothing was measured")
            continue
        lines.append(
            f"{home}: pick {pick['mean']:.3f}x floor (max {pick['max']:.2f}, {pick['cases']} cases,"
            f" {one['over_limit']} over {RATIO_MAX_BAR}, {one['failed']} failed); best measured"
            f" {best['mean']:.3f}x (max {best['max']:.2f}); worst: {one['worst']}"
        )
        lines += [
            f"  {dataflow:<9} {own['mean']:6.2f}x (max {own['max']:.2f}) over {own['cases']} cases"
            for dataflow, own in one["dataflows"].items()
        ]
    return lines


def seconds_at_once(ends_s: Sequence[Sequence[float]]) -> list[float]:
    """Of one repetition of each of several jobs, while all of them are at work: `ends_s` has the
    moments at which each one's repetitions were done, since all began. What the others do once the
    first has done all of its own does not count."""
    until_s = min(own[-1] for own in ends_s)
    found: list[float] = []
    for own in ends_s:
        done = sum(end_s <= until_s for end_s in own)
        begun_s = own[done - 1] if done else 0.0
        part = (until_s - begun_s) / (own[done] - begun_s) if done < len(own) else 0.0
        found.append(until_s / (done + part))
    return found


def shares(bytes_per_s: Sequence[float], link_bytes_per_s: float) -> dict[str, Any]:
    """Of a link among slices that all stream: each against an equal part of the whole."""
    fair = link_bytes_per_s / len(bytes_per_s)
    off = [value / fair - 1 for value in bytes_per_s]
    return {
        "slices": len(bytes_per_s),
        "fair_bytes_per_s": fair,
        "bytes_per_s": list(bytes_per_s),
        "worst_off": max(off, key=abs),
        "within_bar": all(abs(one) <= FAIR_SHARE_BAR for one in off),
        "sum_over_link": sum(bytes_per_s) / link_bytes_per_s,
    }


def interference(solo: Sequence[float], together: Sequence[float]) -> float:
    """What is lost by running at once: 1 - co-run / sum of solo runs (C2CServe, section 3.3)."""
    return 1 - sum(together) / sum(solo)
