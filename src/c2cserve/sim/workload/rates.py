"""Traces that give rates instead of requests. Arrivals are sampled, deterministic by seed.

ServeGen   client, t_s, rate_rps, iat_cv, dist, p1, p2: gaps within a window of 600 s follow a Gamma
           or Weibull distribution of the given shape, scaled to the window's rate
per minute func, m1, m2, ...: so many requests in each minute, at uniform times; or as Azure has
           them: HashFunction, 1, 2, ...
means      model, rps_...: one Poisson process per model
clients    of ServeGen: `workload.clients`
"""

from collections.abc import Iterator, Mapping, Set
from math import gamma
from pathlib import Path
from random import Random
from typing import Literal

from c2cserve.sim.workload.clients import COLUMNS, WINDOW_S, clients
from c2cserve.sim.workload.rows import (
    Fields,
    Row,
    TraceError,
    columns,
    fields,
    unknown_columns,
)

_FUNCTIONS = frozenset({"func", "HashFunction"})
_MINUTES = frozenset({"m1", "1"})
"""Names of the first minute's column."""


def sample_requests(
    path: Path,
    seed: int,
    start_s: float,
    duration_s: float,
    where: Mapping[str, str],
    scale: float = 1.0,
) -> list[Row]:
    """Sample requests between `start_s` and `start_s + duration_s` of the trace.

    Times count from the trace's start. `scale` multiplies the rates. For means, `where` names the
    column, such as `{"rates": "rps_condense500"}`. For clients it names columns and values to keep.
    Raises OSError, TraceError."""
    lines = list(fields(path))
    if not lines:
        raise TraceError(f"{path.name} is empty")
    found = lines[0].keys()
    end_s = start_s + duration_s
    match _form(found):
        case "windows":
            rows = _windows(lines, seed, start_s, end_s, scale)
        case "minutes":
            rows = _minutes(path, lines, seed, start_s, end_s, scale)
        case "clients":
            chosen = [line for line in lines if all(line.get(c) == v for c, v in where.items())]
            if not chosen:
                raise TraceError(f"{path.name} has no clients like these")
            rows = clients(chosen, seed, start_s, end_s, scale)
        case "means":
            known = [column for column in found if column.startswith("rps")]
            column = where.get("rates", known[0])
            if column not in known:
                raise TraceError(f"{path.name} has rates {', '.join(known)}, not {column!r}")
            rows = _means(lines, column, seed, start_s, end_s, scale)
        case None:
            raise unknown_columns(path, found)
    return sorted(rows, key=lambda row: row.t_s)


def has_rates(path: Path) -> bool:
    """Return whether the file is for `sample_requests`, not for `rows.read`.

    Raises OSError, TraceError."""
    return _form(columns(path)) is not None


def _form(found: Set[str]) -> Literal["windows", "minutes", "clients", "means"] | None:
    """Return the form of a file with these columns; None: it has no rates."""
    if {"client", "t_s", "rate_rps", "dist", "p1"} <= found:
        return "windows"
    if _FUNCTIONS & found and _MINUTES & found:
        return "minutes"
    if found >= COLUMNS:
        return "clients"
    if "model" in found and any(column.startswith("rps") for column in found):
        return "means"
    return None


def _windows(
    lines: list[Fields], seed: int, start_s: float, end_s: float, scale: float
) -> Iterator[Row]:
    for line in lines:
        begin_s, rate = float(line["t_s"]), scale * float(line["rate_rps"])
        if rate <= 0 or begin_s + WINDOW_S <= start_s or begin_s >= end_s:
            continue
        client = line["client"]
        random = Random(f"{seed}/{client}/{begin_s}")
        shape = float(line["p1"])
        for t_s in _renewal(random, line["dist"], shape, rate, begin_s, begin_s + WINDOW_S):
            if start_s <= t_s < end_s:
                yield Row(t_s, client)


def _renewal(
    random: Random, dist: str, shape: float, rate: float, begin_s: float, end_s: float
) -> Iterator[float]:
    """Yield arrivals with gaps of mean 1 / rate.

    The first gap is cut at random, because the process began before."""
    scale = 1 / (rate * shape) if dist == "G" else 1 / (rate * gamma(1 + 1 / shape))
    t_s, first = begin_s, True
    while True:
        if dist == "G":
            gap_s = random.gammavariate(shape, scale)
        else:
            gap_s = random.weibullvariate(scale, shape)
        t_s += gap_s * (random.random() if first else 1.0)
        first = False
        if t_s >= end_s:
            return
        yield t_s


def _minutes(
    path: Path, lines: list[Fields], seed: int, start_s: float, end_s: float, scale: float
) -> Iterator[Row]:
    [function, *_] = sorted(_FUNCTIONS & lines[0].keys(), reverse=True)
    prefix = "m" if "m1" in lines[0] else ""
    minutes = _numbers(path, lines[0].keys(), prefix)
    for number, line in enumerate(lines, 2):
        random = Random(f"{seed}/{line[function]}")
        for minute in range(1, minutes + 1):
            begin_s = 60.0 * (minute - 1)
            asked = _count(path, number, line, f"{prefix}{minute}")
            for _ in range(round(scale * asked)):
                t_s = begin_s + 60.0 * random.random()
                if start_s <= t_s < end_s:
                    yield Row(t_s, line[function])


def _numbers(path: Path, found: Set[str], prefix: str) -> int:
    """Return how many minutes the columns have. Raises TraceError if they are not 1, 2, ..."""
    numbered = {
        name for name in found if name.startswith(prefix) and name.removeprefix(prefix).isdecimal()
    }
    count = len(numbered)
    if numbered != {f"{prefix}{minute}" for minute in range(1, count + 1)}:
        raise TraceError(
            f"{path.name} has {count} columns of minutes, which are not those from {prefix}1 to"
            f" {prefix}{count}"
        )
    return count


def _count(path: Path, number: int, line: Fields, column: str) -> int:
    try:
        if (count := int(line[column])) >= 0:
            return count
    except (ValueError, TypeError):
        pass
    raise TraceError(
        f"{path.name}:{number}: {line[column]!r} requests in minute {column}: it takes a whole"
        " number of at least 0"
    )


def _means(
    lines: list[Fields], column: str, seed: int, start_s: float, end_s: float, scale: float
) -> Iterator[Row]:
    for line in lines:
        random = Random(f"{seed}/{line['model']}")
        rate = scale * float(line[column])
        t_s = start_s
        while rate > 0 and (t_s := t_s + random.expovariate(rate)) < end_s:
            yield Row(t_s, line["model"])
