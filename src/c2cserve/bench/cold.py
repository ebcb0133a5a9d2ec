"""The cost of a model that is not in the pool: each is unloaded, then asked at once and again.

The first answer waits for weights from disk (or from the page cache, which only the operating
system empties), the second does not. Between the two lies the load, which the server overlaps with
computing.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from urllib.parse import quote

from c2cserve.bench.admin import find_model
from c2cserve.bench.client import Unanswered, ask
from c2cserve.bench.loadgen_http import Client
from c2cserve.bench.loadgen_reply import Record
from c2cserve.bench.phases import Phases, phase_table, read_phases
from c2cserve.bench.plan import Shape
from c2cserve.bench.prompts import Endpoint, Options, PromptKind, Prompts, Style, find_style
from c2cserve.bench.report import Spread, spread
from c2cserve.bench.serve import resolve_models, write_results
from c2cserve.core.model import ModelState
from c2cserve.terminal.output import (
    CliError,
    check_writable,
    console,
    progress_console,
    show_bytes,
    show_seconds,
)

_RELOAD_S = 600.0
_POLL_S = 0.02
_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class ColdOptions:
    url: str
    models: tuple[str, ...]
    rounds: int
    input_len: int
    output_len: int
    seed: int


@dataclass(slots=True)
class _Found:
    """Measurements of one model."""

    weight_bytes: int = 0
    cold_s: list[float] = field(default_factory=list[float])
    """Time to first token."""
    warm_s: list[float] = field(default_factory=list[float])
    load_s: list[float] = field(default_factory=list[float])
    """Time from the request until all weights were in the pool."""


@dataclass(frozen=True, slots=True)
class ColdResult:
    """Results of one model; times in seconds."""

    weight_bytes: int
    cold: Spread
    warm: Spread
    load: Spread


def run_cold(
    options: ColdOptions, key: str | None, admin_key: str | None, out: Path | None
) -> None:
    """Measure cold starts. Raises `CliError` if a request fails, or the server cannot reload."""
    check_writable(out)
    models = resolve_models(options.url, options.models, key)
    found, cold, warm = asyncio.run(_measure(options, models, key, admin_key))
    results = {name: _result(one) for name, one in found.items()}
    _show(results, cold, warm)
    if out is not None:
        phases = {"cold": asdict(cold), "warm": asdict(warm)}
        rows = {name: asdict(one) for name, one in results.items()}
        write_results(out, "cold", asdict(options), {"models": rows, "phases": phases})


async def _measure(
    options: ColdOptions, models: Sequence[str], key: str | None, admin_key: str | None
) -> tuple[dict[str, _Found], Phases, Phases]:
    from rich.progress import track

    asker = _Asker(options, key)
    found = {model: _Found() for model in models}
    cold, warm = Phases(), Phases()
    turns = [model for _ in range(options.rounds) for model in models]
    try:
        for model in track(turns, "asking", console=progress_console(), transient=True):
            await asker.learn(model)
            one = found[model]
            one.weight_bytes = find_model(options.url, admin_key, model).weight_bytes
            _reload(options.url, admin_key, model)
            before, began_s = read_phases(options.url, admin_key), time.monotonic()
            first = asyncio.create_task(asker.ask(model))
            await asyncio.sleep(0)
            await asyncio.to_thread(_wait_loaded, options.url, admin_key, model)
            one.load_s.append(time.monotonic() - began_s)
            one.cold_s.append((await first).ttft_s)
            between = read_phases(options.url, admin_key)
            one.warm_s.append((await asker.ask(model)).ttft_s)
            cold += between.since(before)
            warm += read_phases(options.url, admin_key).since(between)
    finally:
        await asker.close()
    return found, cold, warm


class _Asker:
    def __init__(self, options: ColdOptions, key: str | None) -> None:
        self._options = options
        self._start_s = time.monotonic()
        self._client = Client(options.url, key, self._start_s, _TIMEOUT_S)
        self._prompts = Prompts(options.seed, Options(Endpoint.COMPLETIONS))
        self._styles: dict[str, Style] = {}
        self._asked = 0

    async def close(self) -> None:
        await self._client.close()

    async def learn(self, model: str) -> None:
        """Find out once how the model takes prompts, before it is unloaded."""
        if model not in self._styles:
            self._styles[model] = await find_style(
                self._client, model, PromptKind.AUTO, self._prompts, Endpoint.COMPLETIONS
            )

    async def ask(self, model: str) -> Record:
        shape = Shape(model, self._options.input_len, self._options.output_len)
        body = self._prompts.body(shape, self._styles[model])
        self._asked += 1
        due_s = time.monotonic() - self._start_s
        record = Record(index=self._asked, model=model, due_s=due_s)
        await self._client.post(Endpoint.COMPLETIONS.path, body, record)
        if not record.ok:
            raise CliError(f"{model}: {record.error}: {record.error_detail}")
        return record


def _reload(url: str, admin_key: str | None, model: str) -> None:
    path = f"/admin/models/{quote(model)}/reload"
    try:
        ask(url, path, key=admin_key, method="POST", timeout_s=_RELOAD_S)
    except Unanswered as error:
        raise CliError(f"{error}; cold starts need the admin API of a c2cserve") from error


def _wait_loaded(url: str, admin_key: str | None, model: str) -> None:
    """Wait for the weights. Raises `CliError` if the load fails or takes too long."""
    deadline = time.monotonic() + _TIMEOUT_S
    while time.monotonic() < deadline:
        status = find_model(url, admin_key, model)
        if status.state is ModelState.READY:
            return
        if status.state is ModelState.FAILED:
            raise CliError(f"{model}: {status.error}")
        time.sleep(_POLL_S)
    raise CliError(f"{model}: not loaded after {_TIMEOUT_S:.0f} s")


def _result(found: _Found) -> ColdResult:
    cold, warm, load = spread(found.cold_s), spread(found.warm_s), spread(found.load_s)
    assert cold is not None
    assert warm is not None
    assert load is not None
    return ColdResult(found.weight_bytes, cold, warm, load)


def _show(results: dict[str, ColdResult], cold: Phases, warm: Phases) -> None:
    from rich.table import Table

    table = Table(title="TTFT of models that were not in the pool, and right after; p50")
    table.add_column("model")
    for head in ("weights", "cold", "warm", "loaded after"):
        table.add_column(head, justify="right")
    for name, one in results.items():
        times = (one.cold.p50, one.warm.p50, one.load.p50)
        table.add_row(name, show_bytes(one.weight_bytes), *map(show_seconds, times))
    screen = console()
    screen.print(table)
    phases = phase_table([("cold", cold), ("warm", warm)])
    if phases is not None:
        screen.print(phases)
