"""ServeGen's clients, deterministic by seed.

A client is active in some windows of 600 s. There it sends requests at its own mean rate, with
prompts and answers of its own lengths.

A file has, per client, `mean_rps` while active, `active_frac_10min`, and of both lengths the mean
and three quantiles, if measured. It does not say how active windows follow each other, nor the gaps
within them: windows are sampled independently, and arrivals are Poisson.
"""

from collections.abc import Iterable, Iterator
from random import Random

from c2cserve.sim.workload.lengths import Curve, at
from c2cserve.sim.workload.rows import Fields, Row

WINDOW_S = 600.0
COLUMNS = frozenset({"model", "client", "mean_rps", "active_frac_10min", "input_tokens_p50"})


def clients(
    lines: Iterable[Fields], seed: int, start_s: float, end_s: float, scale: float
) -> Iterator[Row]:
    """Yield the requests of every client, which is its own source. Lengths are 0 if unknown."""
    for line in lines:
        name = f"{line['model']}/{line['client']}"
        rate = scale * float(line["mean_rps"])
        curves = (_curve(line, "input_tokens"), _curve(line, "output_tokens"))
        known = all(curves)
        for window in range(int(start_s // WINDOW_S), int(-(-end_s // WINDOW_S))):
            random = Random(f"{seed}/{name}/{window}")
            if rate <= 0 or random.random() >= float(line["active_frac_10min"]):
                continue
            t_s = window * WINDOW_S
            while (t_s := t_s + random.expovariate(rate)) < (window + 1) * WINDOW_S:
                prompt, output = (at(c, random.random()) if known else 0 for c in curves)
                if start_s <= t_s < end_s:
                    yield Row(t_s, name, prompt, output)


def _curve(line: Fields, field: str) -> Curve:
    """Return the curve through the three quantiles; empty if they are unknown.

    It begins where its mean equals the published one, if that is below the median."""
    if not line[f"{field}_p50"]:
        return []
    mean, p50, p90, p99 = (float(line[f"{field}_{of}"]) for of in ("mean", "p50", "p90", "p99"))
    above = 0.4 * (p50 + p90) / 2 + 0.09 * (p90 + p99) / 2 + 0.01 * p99
    first = min(p50, max(1.0, 4 * (mean - above) - p50))
    return [(0.0, first), (0.5, p50), (0.9, p90), (0.99, p99), (1.0, p99)]
