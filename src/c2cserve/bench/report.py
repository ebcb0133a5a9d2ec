"""Figures of a run: percentiles, throughput and SLO attainment, as a table and as JSON."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from c2cserve.bench.loadgen import Outcome
from c2cserve.bench.loadgen_reply import Record
from c2cserve.terminal.output import show_seconds

if TYPE_CHECKING:
    from rich.table import Table

_LAG_BOUND_S = 0.02
"""A generator that wakes or sends later than this, one time in a hundred, measures itself."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Percentiles of one latency, seconds."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


def spread(values: Iterable[float]) -> Spread | None:
    """None without values."""
    ordered = sorted(values)
    if not ordered:
        return None
    return Spread(
        mean=sum(ordered) / len(ordered),
        p50=percentile(ordered, 0.50),
        p90=percentile(ordered, 0.90),
        p95=percentile(ordered, 0.95),
        p99=percentile(ordered, 0.99),
        max=ordered[-1],
    )


def percentile(ordered: Sequence[float], share: float) -> float:
    """Linear interpolation between the closest ranks of a sorted, non-empty sequence."""
    position = share * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


@dataclass(frozen=True, slots=True)
class SloTargets:
    ttft_s: float
    tpot_s: float

    def met(self, record: Record) -> bool:
        """A request that failed, or was refused, missed its SLO."""
        tpot_s = record.tpot_s
        in_time = record.ok and record.ttft_s <= self.ttft_s
        return in_time and (tpot_s is None or tpot_s <= self.tpot_s)


@dataclass(frozen=True, slots=True)
class Summary:
    """Figures of one model's requests, or of all."""

    requests: int
    ok: int
    errors: dict[str, int]
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    slo_attainment: float
    goodput_per_s: float
    """Requests per second that met their SLO."""
    ttft_s: Spread | None
    tpot_s: Spread | None
    itl_s: Spread | None
    e2e_s: Spread | None


def summarize(records: Sequence[Record], slo: SloTargets, elapsed_s: float) -> Summary:
    """`elapsed_s`: the whole run's, so that models' rates add up. Latencies are of answered
    requests."""
    ok = [record for record in records if record.ok]
    prompt_tokens = sum(record.prompt_tokens for record in ok)
    output_tokens = sum(record.output_tokens for record in ok)
    met = sum(slo.met(record) for record in records)
    return Summary(
        requests=len(records),
        ok=len(ok),
        errors=dict(Counter(record.error for record in records if not record.ok).most_common()),
        prompt_tokens=prompt_tokens,
        cached_tokens=sum(record.cached_tokens for record in ok),
        output_tokens=output_tokens,
        requests_per_s=len(ok) / elapsed_s,
        output_tokens_per_s=output_tokens / elapsed_s,
        total_tokens_per_s=(prompt_tokens + output_tokens) / elapsed_s,
        slo_attainment=met / len(records),
        goodput_per_s=met / elapsed_s,
        ttft_s=spread(record.ttft_s for record in ok),
        tpot_s=spread(tpot_s for record in ok if (tpot_s := record.tpot_s) is not None),
        itl_s=spread(gap for record in ok for gap in record.gaps_s),
        e2e_s=spread(record.e2e_s for record in ok),
    )


@dataclass(frozen=True, slots=True)
class Generator:
    """How good the measuring end was."""

    processes: int
    cpu_s_per_request: float
    send_lag_s: Spread | None
    """Between when a request was due and when it was sent."""
    loop_lag_s: Spread | None


@dataclass(frozen=True, slots=True)
class Report:
    elapsed_s: float
    total: Summary
    per_model: dict[str, Summary]
    generator: Generator
    warnings: tuple[str, ...]

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def make_report(outcome: Outcome, slo: SloTargets, processes: int) -> Report:
    records = outcome.records
    elapsed_s = max(1e-9, max(r.end_s for r in records) - min(r.due_s for r in records))
    by_model: dict[str, list[Record]] = {}
    for record in records:
        by_model.setdefault(record.model, []).append(record)
    total = summarize(records, slo, elapsed_s)
    generator = Generator(
        processes=processes,
        cpu_s_per_request=outcome.cpu_s / len(records),
        send_lag_s=spread(r.sent_s - r.due_s for r in records if r.sent_s >= 0),
        loop_lag_s=spread(outcome.loop_lag_s),
    )
    return Report(
        elapsed_s=elapsed_s,
        total=total,
        per_model={
            model: summarize(own, slo, elapsed_s) for model, own in sorted(by_model.items())
        },
        generator=generator,
        warnings=tuple(_warnings(records, generator)),
    )


def _warnings(records: Sequence[Record], generator: Generator) -> Iterable[str]:
    lags = {"sent late": generator.send_lag_s, "woke late": generator.loop_lag_s}
    for what, lag in lags.items():
        if lag is not None and lag.p99 > _LAG_BOUND_S:
            yield (
                f"the generator {what} (p99 {show_seconds(lag.p99)}): it may be the bottleneck;"
                " give it cores of its own, or more --processes"
            )
    if any(r.ok and r.prompt_tokens == 0 for r in records):
        yield "the server reports no usage: tokens are counted as pieces of text that arrived"
    details = {record.error: record.error_detail for record in records if not record.ok}
    for kind, detail in details.items():
        yield f"{kind}: {detail}"


def latency_table(report: Report) -> "Table":
    """One row per model and one for all; latencies in milliseconds."""
    from rich.table import Table

    table = Table(title=f"{report.total.requests} requests in {report.elapsed_s:.1f} s")
    table.add_column("model")
    heads = (
        "requests",
        "errors",
        "req/s",
        "out tok/s",
        "SLO",
        "TTFT p50",
        "p99",
        "TPOT p50",
        "p99",
    )
    for head in (*heads, "ITL p99", "E2E p50", "p99"):
        table.add_column(head, justify="right")
    rows = list(report.per_model.items())
    if len(rows) != 1:
        rows.append(("all", report.total))
    for model, one in rows:
        table.add_row(
            model, str(one.requests), str(one.requests - one.ok), f"{one.requests_per_s:.1f}",
            f"{one.output_tokens_per_s:.0f}", f"{one.slo_attainment:.1%}",
            _ms(one.ttft_s, "p50"), _ms(one.ttft_s, "p99"), _ms(one.tpot_s, "p50"),
            _ms(one.tpot_s, "p99"), _ms(one.itl_s, "p99"), _ms(one.e2e_s, "p50"),
            _ms(one.e2e_s, "p99"),
            end_section=one is not report.total and len(rows) > 1 and model == rows[-2][0],
        )  # fmt: skip
    table.caption = "latencies in ms, from when a request was due"
    return table


def _ms(latency: Spread | None, which: str) -> str:
    return "-" if latency is None else f"{getattr(latency, which) * 1e3:.1f}"
