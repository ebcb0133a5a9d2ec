"""Table, answer and plots of `c2cserve plan`."""

from collections.abc import Callable, Sequence

from c2cserve.sim.planning.plan import Plan, Trial
from c2cserve.sim.run import Scenario
from c2cserve.sim.show import make_table
from c2cserve.sim.studies.figure import Figure, Points
from c2cserve.terminal.output import console, show_seconds

_SHARES: tuple[tuple[str, Callable[[Trial], float]], ...] = (
    ("busy", lambda trial: trial.use.busy),
    ("compute", lambda trial: trial.use.compute),
    ("HBM bandwidth", lambda trial: trial.use.bandwidth),
    ("link", lambda trial: trial.use.link),
    ("KV memory", lambda trial: trial.use.kv),
    ("pool", lambda trial: trial.use.pool),
)


def show(scenario: Scenario, plan: Plan, attainment: float) -> None:
    heads = ("machine", "models", "requests", "in time", "TTFT p95", "TPOT p95")
    title = f"{scenario.policy}, {scenario.catalog}, {scenario.workload.trace}"
    table = make_table(title, (*heads, *(name for name, _ in _SHARES)))
    for trial in sorted(plan.trials, key=_order(plan.trials)):
        latencies = (show_seconds(trial.ttft_p95_s), show_seconds(trial.tpot_p95_s))
        shares = (f"{share(trial):.0%}" for _, share in _SHARES)
        met = f"{trial.attainment:.1%}"
        table.add_row(
            trial.hardware, str(trial.models), str(trial.requests), met, *latencies, *shares,
            style="green" if trial is plan.best else "" if trial.passed else "red",
        )  # fmt: skip
    out = console()
    out.print(table)
    out.print(_answer(plan, attainment))
    if plan.beyond is not None:
        out.print(_reason(plan, plan.beyond))


def _order(trials: Sequence[Trial]) -> Callable[[Trial], tuple[int, int]]:
    machines = list(dict.fromkeys(trial.hardware for trial in trials))
    return lambda trial: (machines.index(trial.hardware), trial.models)


def _answer(plan: Plan, attainment: float) -> str:
    best = plan.best
    asked = f"{attainment:.1%} of requests in time"
    if best is None:
        return f"None of these is enough for {asked}."
    load = "" if plan.grows else " (of one load: the trace names no models)"
    return (
        f"{best.hardware} serves {best.models} models{load} with {best.attainment:.1%} of requests "
        f"in time; {asked} were asked for."
    )


def _reason(plan: Plan, beyond: Trial) -> str:
    where = f"{beyond.hardware} with {beyond.models} models ({beyond.attainment:.1%} in time)"
    tried = ", ".join(f"{one.what} {one.attainment:.1%}" for one in plan.bottlenecks)
    binds = f"{plan.binds} binds" if plan.binds else "no single thing binds"
    return f"On {where} {binds}. In time with half as much again of: {tried}."


def figures(plan: Plan, attainment: float) -> list[Figure]:
    """What was in time, and what was in use, by models or by machine."""
    by_machine = len({trial.hardware for trial in plan.trials}) > 1
    trials = sorted(plan.trials, key=_order(plan.trials))
    x = "machine" if by_machine else "models"

    def points(value: Callable[[Trial], float]) -> Points:
        return [(t.hardware if by_machine else t.models, 100 * value(t)) for t in trials]

    kind = "bars" if by_machine else "lines"
    met = {"in time": points(lambda trial: trial.attainment), "asked": points(lambda _: attainment)}
    return [
        Figure("plan_attainment", "Requests in time", x, "%", met, kind=kind),
        Figure(
            "plan_use", "What was in use", x, "% (mean over slices)",
            {name: points(share) for name, share in _SHARES}, kind=kind,
        ),
    ]  # fmt: skip
