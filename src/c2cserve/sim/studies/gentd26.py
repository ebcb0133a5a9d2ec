"""C2CServe figure 2: traffic of the models of a production cluster is bursty and long-tailed.

The paper shows 59 "active" models of Alibaba's GenTD26 trace (section 2.1). The median model is
idle for 96 % of observed hours, and 83 % of the models are active in fewer than 20 % of them.

The paper does not define active models and observed hours. Here active models have at least ten
requests, and all clock hours from the trace's first request to its last are observed. A model is
active in an hour if one of its requests arrives in it.
"""

from collections import Counter

from c2cserve.sim.studies.figure import Figure
from c2cserve.sim.studies.registry import Finding, StudyOptions, StudyResult
from c2cserve.sim.workload.catalogue import find_path
from c2cserve.sim.workload.rows import TraceError, read

_LEAST_REQUESTS = 10
_HOUR_S = 3600.0
_SHOWN = 5
"""Models whose hourly rates are plotted, as in the paper's left plot."""


def study(options: StudyOptions) -> StudyResult:
    """Run the study. Raises OSError, TraceError."""
    if not options.trace:
        raise TraceError("this study needs the GenTD26 requests: --trace FILE (t_s, model, ...)")
    rows = [row for row in read(find_path(options.trace)) if row.source]
    requests = Counter(row.source for row in rows)
    last = int(rows[-1].t_s // _HOUR_S)
    first = int(rows[0].t_s // _HOUR_S)
    hours = last - first + 1
    by_hour: dict[str, Counter[int]] = {}
    for row in rows:
        by_hour.setdefault(row.source, Counter())[int(row.t_s // _HOUR_S) - first] += 1
    models = sorted(name for name, count in requests.items() if count >= _LEAST_REQUESTS)
    if not models:
        raise TraceError(f"no model of the trace has {_LEAST_REQUESTS} requests")
    active = {name: len(by_hour[name]) / hours for name in models}
    ordered = sorted(active.values())
    idle = 1.0 - ordered[len(ordered) // 2]
    seldom = sum(share < 0.2 for share in ordered) / len(ordered)
    findings = (
        Finding("models in the trace", str(len(requests)), "89", "the public part of the trace"),
        Finding(f"models with {_LEAST_REQUESTS} requests or more", str(len(models)), "59"),
        Finding("hours", str(hours), "three weeks"),
        Finding("median model's idle hours", f"{idle:.1%}", "96 %"),
        Finding("models active in fewer than 20 % of hours", f"{seldom:.0%}", "83 %"),
    )
    return StudyResult(
        "C2CServe figure 2: models of a production trace by the hours they are active in",
        findings,
        _figures(by_hour, ordered, requests, hours),
        {"active_share": dict(sorted(active.items())), "hours": hours},
    )


def _figures(
    by_hour: dict[str, Counter[int]], ordered: list[float], requests: Counter[str], hours: int
) -> tuple[Figure, Figure]:
    shown = [name for name, _ in sorted(requests.items(), key=lambda x: (-x[1], x[0]))[:_SHOWN]]
    return (
        Figure(
            "gentd26_rates", "Requests per hour of the busiest models", "hour", "requests",
            {name: [(hour, by_hour[name][hour]) for hour in range(hours)] for name in shown},
        ),
        Figure(
            "gentd26_active", "Models by the share of hours they are active in",
            "share of hours with a request", "share of models",
            {
                "models": [
                    (share, (rank + 1) / len(ordered)) for rank, share in enumerate(ordered)
                ]
            },
            {"models": [(0.2, 0.83), (0.04, 0.5)]},
        ),
    )  # fmt: skip
