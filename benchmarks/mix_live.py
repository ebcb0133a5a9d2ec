"""Cells of `weights_mix.py` on a live server: requests when they are due, and what came of them."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from catalogue_files import Pick
from catalogue_server import Server, ServerFailed
from mix_load import Answer, Mix, warm_up
from mix_times import Times, measure_times

from c2cserve.bench.loadgen import Load, generate
from c2cserve.bench.loadgen_reply import Record
from c2cserve.bench.plan import Shape
from c2cserve.bench.prompts import Endpoint, Options, Prompts, Style

_START_S = 0.2
_ALONE_S = 120.0
"""Longest time of a request that warms up or is measured alone."""
_IDLE_S, _POLL_S = 30.0, 0.2
_TOLD_S = 10.0
_REFUSALS = ("http 429", "http 503")
_COUNTER = "c2cserve:slice_"

Tell = Callable[[str], None]


class LiveArena:
    """A server with one arena size, within `with`."""

    def __init__(
        self, catalog: Path, log: Path, arguments: Sequence[str], mix: Mix, made: Pick, tell: Tell
    ) -> None:
        self._server = Server(catalog, log, arguments)
        self._mix, self._made, self._tell = mix, made, tell
        self._prompts = Prompts(0, Options(ignore_eos=True))

    def __enter__(self) -> Self:
        self._server.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self._server.__exit__(kind, error, trace)

    def wait_ready(self, limit_s: float) -> int:
        """Return the bytes of the slice's arena once all models are in the pool. Raises
        ServerFailed."""
        self._server.wait_ready(limit_s, self._tell)
        [slice_] = self._server.state()["slices"]
        return int(slice_["kv_total_bytes"])

    def times(self, source: str) -> Times:
        """Measure step times. Raises ServerFailed, ValueError."""
        models = {entry.shape: entry.id for entry in reversed(self._made.entries)}
        return measure_times(
            self._mix, models, self._send_alone, source, lambda: _risen({}, self._server.metrics())
        )

    def run(self, asked: Sequence[Shape], answer_s: float) -> tuple[list[Answer], dict[str, float]]:
        """Send requests when they are due. Each may take `answer_s`, so the run ends so long after
        the last of them. Return their answers, and by how much the slice's counters rose.

        Raises ServerFailed if the server does not come to rest afterwards."""
        self._send_alone(warm_up(self._mix, [entry.id for entry in self._made.entries]), 1)
        before = self._server.metrics()
        records = self._send(asked, None, answer_s)
        after = self._server.metrics()
        self._rest()
        return [_answer(record) for record in records], _risen(before, after)

    def last_words(self) -> str:
        return self._server.last_words()

    def _send_alone(self, asked: Sequence[Shape], concurrency: int | None) -> Sequence[Record]:
        """Send requests that do not count. Some of several at a time may be refused. Raises
        ServerFailed if another one is not answered."""
        records = self._send(asked, concurrency, _ALONE_S)
        for record in records:
            if not record.ok and (concurrency == 1 or record.error not in _REFUSALS):
                raise ServerFailed(f"{record.model}: {record.error}: {record.error_detail}")
        return records

    def _send(
        self, asked: Sequence[Shape], concurrency: int | None, answer_s: float
    ) -> list[Record]:
        styles = {entry.id: Style(ids=True) for entry in self._made.entries}
        load = Load(
            self._server.url, Endpoint.COMPLETIONS.path, self._prompts.plan(asked, styles),
            concurrency=concurrency, timeout_s=answer_s, start_s=time.monotonic() + _START_S,
        )  # fmt: skip
        told_s = time.monotonic()
        ended = 0

        def progress(_: int) -> None:
            nonlocal told_s, ended
            ended += 1
            if time.monotonic() - told_s > _TOLD_S:
                told_s = time.monotonic()
                self._tell(f"{ended} of {len(asked)} requests have ended")

        return asyncio.run(generate(load, progress)).records

    def _rest(self) -> None:
        """Wait until the server has no requests: those whose clients left end, too."""
        until_s = time.monotonic() + _IDLE_S
        while time.monotonic() < until_s:
            state = self._server.state()
            if not state["running"] + state["waiting"]:
                return
            time.sleep(_POLL_S)
        raise ServerFailed(f"requests go on {_IDLE_S:.0f} s after their clients left")


def _risen(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Return by how much the slice's counters rose."""
    return {
        name.removeprefix(_COUNTER): value - before.get(name, 0.0)
        for name, value in after.items()
        if name.startswith(_COUNTER) and name.endswith("_total")
    }


def _answer(record: Record) -> Answer:
    ttft_s = record.ttft_s if record.first_s >= 0 else None
    if record.ok:
        return Answer(record.model, "answered", ttft_s, record.tpot_s)
    if record.error in _REFUSALS:
        return Answer(record.model, "refused", why=record.error)
    if record.error == "timeout":
        return Answer(record.model, "unanswered", ttft_s)
    why = f"{record.error}: {record.error_detail}".removesuffix(": ")
    return Answer(record.model, "failed", ttft_s, why=why)
