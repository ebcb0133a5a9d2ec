"""Table, answer and plots of `c2cserve plan`."""

from collections.abc import Callable, Iterator, Sequence

from rich.table import Table

from c2cserve.sim.planning.result import Dedicated, Plan
from c2cserve.sim.planning.trials import Trial, plural
from c2cserve.sim.run import Scenario
from c2cserve.sim.show import make_table, step_times
from c2cserve.sim.studies.figure import Figure, Points
from c2cserve.terminal.output import console, show_seconds

_SHARES: tuple[tuple[str, Callable[[Trial], float]], ...] = (
    ("busy", lambda trial: trial.use.busy),
    ("compute", lambda trial: trial.use.compute),
    ("HBM bandwidth", lambda trial: trial.use.bandwidth),
    ("waits for link", lambda trial: trial.use.waiting),
    ("link", lambda trial: trial.use.link),
    ("KV memory", lambda trial: trial.use.kv),
    ("pool", lambda trial: trial.use.pool),
)
_WIDE = 1000
"""Columns of a terminal that any table fits into."""
_NAMED = 5
"""Models that miss, by name."""


def show(scenario: Scenario, plan: Plan, attainment: float) -> None:
    heads = ("machine", "models", "seeds", "requests", "in time", "TTFT p95", "TPOT p95")
    shares = tuple(name for name, _ in _SHARES)
    title = f"{scenario.policy}, {scenario.catalog}, {scenario.workload.trace}"
    out = console()
    table = _table(title, (*heads, *shares), plan)
    unlimited = out.options.update(width=_WIDE)
    if out.measure(table, options=unlimited).minimum <= out.width:
        out.print(table)
    else:
        for name, columns in ((title, heads), ("What was in use", (*heads[:2], *shares))):
            part = _table(name, columns, plan)
            part.padding = (0, 0)
            out.print(part)
    for line in answer(plan, attainment):
        out.print(line)
    for machine in dict.fromkeys(one.partition(":")[0] for one in scenario.hardware.split(",")):
        out.print(step_times(machine))


def _table(title: str, columns: Sequence[str], plan: Plan) -> Table:
    """Return some columns of the trials."""
    table = make_table(title, columns)
    for trial in sorted(plan.trials, key=_order(plan.trials)):
        cells = {
            "machine": trial.hardware, "models": str(trial.models), "seeds": str(trial.seeds),
            "requests": str(trial.requests), "in time": _met(trial),
            "TTFT p95": show_seconds(trial.ttft_p95_s), "TPOT p95": show_seconds(trial.tpot_p95_s),
            **{name: f"{share(trial):.0%}" for name, share in _SHARES},
        }  # fmt: skip
        style = "green" if trial is plan.best else "" if trial.passed else "red"
        table.add_row(*(cells[column] for column in columns), style=style)
    return table


def _met(trial: Trial) -> str:
    """Return the share in time, and its interval where there is one."""
    if trial.cut:
        return "too few"
    if trial.seeds == 1:
        return f"{trial.attainment:.1%}"
    return f"{100 * trial.attainment:.1f} ± {100 * trial.plus_minus:.1f} %"


def _order(trials: Sequence[Trial]) -> Callable[[Trial], tuple[int, int]]:
    machines = list(dict.fromkeys(trial.hardware for trial in trials))
    return lambda trial: (machines.index(trial.hardware), trial.models)


def answer(plan: Plan, attainment: float) -> Iterator[str]:
    """Yield the lines of the answer: what is served, which models miss, what binds, and what was
    asked besides."""
    yield _answer(plan, attainment)
    if plan.best is not None and plan.best.misses:
        yield _misses(plan.best)
    if plan.beyond is not None:
        yield _reason(plan, plan.beyond)
    for trial in plan.layouts:
        yield f"As {trial.hardware}: {_met(trial)} in time."
    if plan.without_relays is not None:
        one, two = plan.without_relays, plan.best
        assert two is not None
        yield (
            f"With one link for each GPU, without relays: {_met(one)} in time (with them"
            f" {_met(two)}), TTFT p95 {show_seconds(one.ttft_p95_s)}"
            f" (with them {show_seconds(two.ttft_p95_s)})."
        )
    if plan.spare is not None:
        enough = "" if plan.spare.passed else ", which is not enough"
        yield f"With one GPU less (N+1): {_met(plan.spare)} in time{enough}."
    yield from plan.missing
    if plan.dedicated is not None and plan.best is not None:
        yield _dedicated(plan.dedicated, plan.best)


def _answer(plan: Plan, attainment: float) -> str:
    best = plan.best
    asked = f"{attainment:.1%} of requests in time"
    if best is None:
        machines = dict.fromkeys(trial.hardware for trial in plan.trials)
        if len(machines) > 1:
            return f"None of these is enough for {asked}."
        least = min(trial.models for trial in plan.trials)
        return f"{', '.join(machines)} does not serve {plural(least, 'model')} with {asked}."
    load = "" if plan.grows else " (of one load: the trace names no models)"
    line = (
        f"{best.hardware} serves {plural(best.models, 'model')}{load} with {_met(best)} of "
        f"requests in time; {asked} were asked for."
    )
    if plan.most == best.models:
        line += " Larger catalogues were not tried (--most)."
    if best.attainment - best.plus_minus < attainment:
        line += " That is not sure: the interval reaches below."
    return line


def _misses(best: Trial) -> str:
    named = ", ".join(f"{one.model} ({one.attainment:.0%})" for one in best.misses[:_NAMED])
    more = f" and {len(best.misses) - _NAMED} more" if len(best.misses) > _NAMED else ""
    return f"Models that have fewer in time: {named}{more}."


def _reason(plan: Plan, beyond: Trial) -> str:
    where = f"{beyond.hardware} with {plural(beyond.models, 'model')} ({_met(beyond)} in time)"
    binds = f"{plan.binds} binds" if plan.binds else "no single thing binds"
    line = f"On {where} {binds}."
    if plan.bottlenecks:
        tried = ", ".join(
            f"{one.what} {100 * one.gain:+.1f}{' (two seeds)' if one.seeds > 1 else ''}"
            for one in plan.bottlenecks
        )
        line += f" Points that half as much again brings, with the same seed: {tried}."
    return line


def _dedicated(found: Dedicated, best: Trial) -> str:
    line = (
        f"With GPUs of their own, {plural(best.models, 'model')} take {found.gpus} of them, here "
        f"they share {found.shared_gpus}"
    )
    if found.cost is not None and found.shared_cost is not None:
        line += f": {found.cost:,.0f} a month, and {found.shared_cost:,.0f}"
    return line + "."


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
