"""`c2cserve top`: a server's slices, models and pool, live in the terminal."""

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from c2cserve.bench.admin import decode
from c2cserve.bench.client import Unanswered, ask
from c2cserve.bench.scrape import Histogram, Scrape, scrape
from c2cserve.cli.models import LOCAL, KeyOption, UrlOption, show_state
from c2cserve.runtime.gateway import SliceStatus, Snapshot
from c2cserve.terminal.output import console, show_bytes, show_seconds
from c2cserve.terminal.tables import Column, FittedTable

if TYPE_CHECKING:
    from rich.console import RenderableType

_WINDOW_S = 60.0
"""Latencies and attainment are of the requests that ended in the last minute."""
_ONCE_APART_S = 0.5
"""Time between the two samples that the rates of a single frame need."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The server at one moment."""

    at_s: float
    state: Snapshot
    metrics: Scrape


def top(
    url: UrlOption = LOCAL,
    key: KeyOption = None,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between frames.")] = 1.0,
    cluster: Annotated[
        bool, typer.Option("--cluster", help="A front's nodes, instead of all their slices.")
    ] = False,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and end.")] = False,
) -> None:
    """Watch a server: what each slice does, every model's state, the pool, latencies and SLOs.

    Of a front, the nodes of its cluster too. Press q to end.
    """
    if once:
        first = _sample(url, key)
        time.sleep(_ONCE_APART_S)
        second = _sample(url, key)
        everything = Sample(first.at_s, first.state, Scrape())
        console().print(frame(url, everything, first, second, slices=not cluster))
        return
    from rich.live import Live

    samples: deque[Sample] = deque([_sample(url, key)])
    shown = partial(frame, url, slices=not cluster)
    with (
        quit_key() as quits,
        Live(shown(*[samples[0]] * 3), screen=True, auto_refresh=False) as screen,
    ):
        while not quits(every):
            try:
                samples.append(_sample(url, key))
            except Unanswered as error:
                screen.update(f"{error}; trying again", refresh=True)
                continue
            while samples[-1].at_s - samples[0].at_s > _WINDOW_S:
                samples.popleft()
            before = samples[max(0, len(samples) - 4)]
            screen.update(shown(samples[0], before, samples[-1]), refresh=True)


@contextmanager
def quit_key() -> Generator[Callable[[float], bool]]:
    """Yield a function that waits for some seconds, and returns whether q was pressed meanwhile.

    Without a keyboard it only waits. The terminal is restored afterwards."""
    import select
    import termios
    import tty

    if not sys.stdin.isatty():
        yield lambda seconds: bool(time.sleep(seconds))
        return
    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)

    def pressed(seconds: float) -> bool:
        until = time.monotonic() + seconds
        while (left_s := until - time.monotonic()) > 0:
            if select.select([keyboard], [], [], left_s)[0]:
                keys = os.read(keyboard, 64)
                if not keys or b"q" in keys.lower():
                    return True
        return False

    try:
        tty.setcbreak(keyboard)
        yield pressed
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)


def _sample(url: str, key: str | None) -> Sample:
    state = decode(ask(url, "/admin/state", key=key), Snapshot)
    return Sample(time.monotonic(), state, scrape(url, key))


def frame(
    url: str, oldest: Sample, before: Sample, now: Sample, *, slices: bool = True
) -> "RenderableType":
    """Rates between `before` and `now`, latencies between `oldest` and `now`."""
    from rich.console import Group

    parts: list[RenderableType] = [_header(url, now.state)]
    if now.state.nodes or not slices:
        parts.append(_nodes(before, now))
    if slices:
        parts.append(_slices(before, now))
    return Group(*parts, _models(oldest, now))


def _header(url: str, state: Snapshot) -> str:
    uptime_s = max(0.0, time.time() - state.started_s)
    parts = [
        f"c2cserve {state.instance} at {url}",
        f"up {_uptime(uptime_s)}",
        f"pool {show_bytes(state.pool_used_bytes)} of {show_bytes(state.pool_budget_bytes)}",
        f"running {state.running}",
        f"waiting {state.waiting}",
    ]
    counted = {name: value for name, value in state.counters.items() if value}
    parts += [f"{name} {value:.0f}" for name, value in sorted(counted.items())]
    return ("[bold red]draining[/] · " if state.draining else "") + " · ".join(parts)


def _uptime(seconds: float) -> str:
    if seconds < 600:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _slices(before: Sample, now: Sample) -> FittedTable:
    table = FittedTable(
        Column("slice"), Column("state"), Column("cpus", rank=9), Column("model", rank=1),
        Column("active", right=True, rank=6), Column("busy", right=True),
        Column("batch", right=True), Column("waiting", right=True, rank=3),
        Column("KV", right=True, rank=2), Column("of", right=True, rank=8),
        Column("tok/s", right=True), Column("switch/s", right=True, rank=7),
        Column("restarts", right=True, rank=5),
    )  # fmt: skip
    earlier = {one.id: one for one in before.state.slices}
    elapsed_s = max(1e-9, now.at_s - before.at_s)
    for one in now.state.slices:
        was = earlier.get(one.id, one)
        table.add_row(
            one.id, _slice_state(one), str(len(one.cpus)), one.last_model or "-",
            str(len(one.active_models)), f"{one.busy_share:.0%}", str(one.running),
            str(one.waiting), show_bytes(one.kv_used_bytes), show_bytes(one.kv_total_bytes),
            f"{_rate(was.output_tokens, one.output_tokens, elapsed_s):.0f}",
            f"{_rate(was.switches, one.switches, elapsed_s):.1f}", str(one.restarts),
        )  # fmt: skip
    return table


def _nodes(before: Sample, now: Sample) -> FittedTable:
    from rich.markup import escape

    table = FittedTable(
        Column("node"), Column("state", wraps=True), Column("slices", right=True),
        Column("running", right=True), Column("waiting", right=True),
        Column("models", right=True, rank=1), Column("pool", right=True, rank=2),
        Column("of", right=True, rank=3), Column("tok/s", right=True),
    )  # fmt: skip
    elapsed_s = max(1e-9, now.at_s - before.at_s)
    earlier = {one.id: one.output_tokens for one in before.state.slices}
    for name, state in sorted(now.state.nodes.items()):
        colour = {"up": "green", "draining": "yellow"}.get(state, "red")
        shown = name, f"[{colour}]{escape(state)}[/]"
        use = now.state.node_use.get(name)
        if use is None:
            table.add_row(*shown)
            continue
        slices = [one for one in now.state.slices if one.id.rpartition("/")[0] == name]
        tokens_per_s = sum(
            _rate(earlier.get(one.id, one.output_tokens), one.output_tokens, elapsed_s)
            for one in slices
        )
        table.add_row(
            *shown, f"{sum(one.state == 'up' for one in slices)} of {len(slices)}",
            str(use.running), str(use.waiting), str(use.models), show_bytes(use.pool_used_bytes),
            show_bytes(use.pool_budget_bytes), f"{tokens_per_s:.0f}",
        )  # fmt: skip
    return table


def _rate(was: int, now: int, elapsed_s: float) -> float:
    return _grown(was, now) / elapsed_s


def _grown(was: float, now: float) -> float:
    """A counter that fell counts from zero: that of a new worker, or of a model added again."""
    return now - was if now >= was else now


def _slice_state(one: SliceStatus) -> str:
    colour = {"up": "green", "starting": "yellow"}.get(one.state, "red")
    return f"[{colour}]{one.state}[/]"


def _models(oldest: Sample, now: Sample) -> FittedTable:
    """The models that have requests come first: a terminal has fewer lines than a catalogue."""
    from rich.markup import escape

    table = FittedTable(
        Column("model"), Column("state", wraps=True), Column("slices", rank=8),
        Column("weights", right=True, rank=7), Column("running", right=True, rank=1),
        Column("waiting", right=True, rank=2), Column("ended", right=True, rank=6),
        Column("TTFT p50", right=True, rank=3), Column("p99", right=True, rank=5),
        Column("TPOT p50", right=True, rank=4), Column("SLO", right=True),
    )  # fmt: skip
    models = sorted(now.state.models, key=lambda one: -(one.running + one.waiting))
    for model in models:
        ttft = _between(oldest, now, "vllm:time_to_first_token_seconds", model.id)
        tpot = _between(oldest, now, "vllm:time_per_output_token_seconds", model.id)
        table.add_row(
            escape(model.id) + (" (pinned)" if model.pinned else ""), escape(show_state(model)),
            ", ".join(model.active_slices) or "-", show_bytes(model.weight_bytes),
            str(model.running), str(model.waiting), f"{ttft.count:.0f}",
            _time(ttft.quantile(0.5)), _time(ttft.quantile(0.99)), _time(tpot.quantile(0.5)),
            _attainment(oldest, now, model.id),
        )  # fmt: skip
    return table


def _between(oldest: Sample, now: Sample, name: str, model: str) -> Histogram:
    later = now.metrics.histogram(name, model_name=model)
    return later.since(oldest.metrics.histogram(name, model_name=model))


def _attainment(oldest: Sample, now: Sample, model: str) -> str:
    counts = {
        met: _grown(
            *(
                sample.metrics.total("c2cserve:slo_total", model_name=model, met=met)
                for sample in (oldest, now)
            )
        )
        for met in ("true", "false")
    }
    ended = sum(counts.values())
    return f"{counts['true'] / ended:.1%}" if ended else "-"


def _time(seconds: float | None) -> str:
    return "-" if seconds is None else show_seconds(seconds)
