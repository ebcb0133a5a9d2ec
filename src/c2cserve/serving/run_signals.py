"""What signals do while a server runs: drain, end, read files again."""

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Protocol

from c2cserve.core.model import ModelState
from c2cserve.runtime.gateway import Snapshot
from c2cserve.server.access.gate import Gate
from c2cserve.server.tls import Tls
from c2cserve.serving.start_signals import StartSignals

log = logging.getLogger(__name__)

HangUp = Callable[[], Awaitable[None]]


class Drainable(Protocol):
    @property
    def draining(self) -> bool: ...

    def drain(self) -> None: ...

    def abort(self, reason: str) -> None: ...

    def snapshot(self) -> Snapshot: ...


class _Files(Protocol):
    @property
    def keys_file(self) -> Path | None: ...

    @property
    def usage_log(self) -> Path | None: ...


def hang_ups_of(tls: Tls | None, gate: Gate, files: _Files) -> list[HangUp]:
    """Return what SIGHUP asks for."""
    found: list[HangUp] = [] if tls is None else [tls.hang_up]
    if files.keys_file or files.usage_log:
        found.append(gate.hang_up)
    return found


def is_starting(now: Snapshot) -> bool:
    """Whether a server cannot have answered anything yet: no slice was ever up, or no model is in
    the pool."""
    never_up = all(one.state != "up" and not one.restarts for one in now.slices)
    loaded = any(model.state is ModelState.READY for model in now.models)
    return never_up or not (loaded or now.running)


class RunSignals:
    """The handlers of a server that can drain. They replace those of its start."""

    def __init__(
        self, gateway: Drainable, signals: StartSignals, drain_timeout_s: float,
        hang_ups: Sequence[HangUp],
    ) -> None:  # fmt: skip
        """`hang_ups`: what SIGHUP asks for. If there is nothing, SIGHUP drains the server
        (StartSignals)."""
        self._gateway = gateway
        self._signals = signals
        self._drain_timeout_s = drain_timeout_s
        self._hang_ups = hang_ups
        self._hanging_up: set[asyncio.Future[None]] = set()

    def install(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._drain)
        loop.add_signal_handler(signal.SIGINT, self._interrupt)
        if self._hang_ups or self._signals.ends_by_hang_up:
            loop.add_signal_handler(signal.SIGHUP, self._hang_up)
        if self._signals.hung_up:
            self._hang_up()

    def _interrupt(self) -> None:
        """End at once if the server is still starting; else drain."""
        if not self._gateway.draining and is_starting(self._gateway.snapshot()):
            self._signals.interrupted = True
            self._gateway.abort("the server was interrupted while it started")
            return
        self._drain()

    def _drain(self) -> None:
        """First signal: finish what is there. Second, or out of time: end."""
        if self._gateway.draining:
            self._gateway.abort("stopped by a second signal; running requests were cut")
            return
        log.info("draining")
        self._gateway.drain()
        timeout_s = self._drain_timeout_s
        reason = f"drain took more than {timeout_s:g} s; running requests were cut"
        asyncio.get_running_loop().call_later(timeout_s, self._gateway.abort, reason)

    def _hang_up(self) -> None:
        """Read again what SIGHUP asks for. A terminal that closes sends it more than once: it is
        never the second signal of `_drain`."""
        if not self._hang_ups and not self._gateway.draining:
            self._drain()
        for handle in self._hang_ups:
            task = asyncio.ensure_future(handle())
            self._hanging_up.add(task)
            task.add_done_callback(self._hanging_up.discard)
