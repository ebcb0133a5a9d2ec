"""Load generation: requests sent on schedule (open loop) or one after another (closed loop).

An open loop never waits for answers. A request is sent when it is due whatever the server does, and
its latency counts from that moment. A stall of the server shows in every request that it delayed
(no coordinated omission).
"""

import asyncio
import resource
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

import msgspec

from c2cserve.bench.loadgen_http import Client
from c2cserve.bench.loadgen_reply import Record

_LAG_PROBE_S = 0.02


class Planned(msgspec.Struct):
    """One request to send. `due_s`, seconds after the start, matters in an open loop only."""

    index: int
    model: str
    body: bytes
    due_s: float = 0.0


class Load(msgspec.Struct):
    """The requests of one generator process. `concurrency` None means an open loop.

    `duration_s` ends a closed loop, whose requests then repeat from the first."""

    url: str
    path: str
    requests: list[Planned]
    api_key: str | None = None
    concurrency: int | None = None
    duration_s: float | None = None
    timeout_s: float = 600.0
    start_s: float = 0.0
    """`time.monotonic` of the common zero."""
    keep_text: bool = False


class Outcome(msgspec.Struct):
    records: list[Record]
    cpu_s: float
    """Processor time of the generator itself."""
    loop_lag_s: list[float]
    """How late its event loop woke from short sleeps, sampled through the run."""


Progress = Callable[[int], None]
"""Receives how many requests have ended so far."""


async def generate(load: Load, progress: Progress) -> Outcome:
    """Send everything and wait for every answer."""
    client = Client(load.url, load.api_key, load.start_s, load.timeout_s)
    records: list[Record] = []
    lags: list[float] = []
    probe = asyncio.create_task(_probe_lag(lags))
    cpu_before_s = _cpu_s()
    await asyncio.sleep(max(0.0, load.start_s - time.monotonic()))

    async def run(planned: Planned, due_s: float) -> None:
        record = Record(index=planned.index, model=planned.model, due_s=due_s)
        records.append(record)
        await client.post(load.path, planned.body, record, keep_text=load.keep_text)
        progress(len(records))

    try:
        if load.concurrency is None:
            await _open_loop(load, run)
        else:
            await _closed_loop(load, load.concurrency, run)
    finally:
        probe.cancel()
        await client.close()
    return Outcome(records, _cpu_s() - cpu_before_s, lags)


Run = Callable[[Planned, float], Coroutine[Any, Any, None]]


async def _open_loop(load: Load, run: Run) -> None:
    pending: set[asyncio.Task[None]] = set()
    for planned in load.requests:
        wait_s = load.start_s + planned.due_s - time.monotonic()
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        task = asyncio.create_task(run(planned, planned.due_s))
        pending.add(task)
        task.add_done_callback(pending.discard)
    if pending:
        await asyncio.gather(*pending)


async def _closed_loop(load: Load, concurrency: int, run: Run) -> None:
    upcoming = _until(load.requests, load.duration_s, load.start_s)

    async def user() -> None:
        for planned in upcoming:
            await run(planned, time.monotonic() - load.start_s)

    await asyncio.gather(*(user() for _ in range(concurrency)))


def _until(
    requests: Sequence[Planned], duration_s: float | None, start_s: float
) -> Iterator[Planned]:
    if duration_s is None:
        yield from requests
        return
    sent = 0
    while time.monotonic() - start_s < duration_s:
        planned = requests[sent % len(requests)]
        yield msgspec.structs.replace(planned, index=sent)
        sent += 1


async def _probe_lag(lags: list[float]) -> None:
    while True:
        before_s = time.monotonic()
        await asyncio.sleep(_LAG_PROBE_S)
        lags.append(max(0.0, time.monotonic() - before_s - _LAG_PROBE_S))


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
