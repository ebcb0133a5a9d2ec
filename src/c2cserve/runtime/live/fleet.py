"""All worker processes of a server: kept running, one per slice.

A worker that dies or hangs is replaced at once; one that keeps dying is replaced with growing
delays. What the controller must know of it comes out of `reap`.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from c2cserve.core.machine import Slice
from c2cserve.runtime.live.messages import Quit, ToWorker, WorkerConfig
from c2cserve.runtime.live.workers import Spawner, Worker, next_config

log = logging.getLogger(__name__)

_END_POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class FleetSettings:
    beat_timeout_s: float = 5.0
    """A worker silent for longer is hung (it beats every half second, also while it computes)."""
    step_timeout_s: float = 300.0
    """A single step that takes longer is hung."""
    stall_timeout_s: float = 60.0
    """A slice that has had requests for longer without a step being done is in trouble."""
    start_timeout_s: float = 120.0
    start_tries: int = 3
    """Failed starts in a row, with no slice up, after which the server gives up."""
    backoff_max_s: float = 30.0


class FleetDown(Exception):
    """No worker can be started."""


@dataclass(slots=True)
class Slot:
    """A slice and its current worker, if one runs."""

    config: WorkerConfig
    worker: Worker | None = None
    leaving: Worker | None = None
    """The one before, killed but not gone: what it holds of its device is not free yet."""
    started_s: float = 0.0
    restart_at_s: float = 0.0
    failures: int = 0
    """Incarnations in a row that died before they were up for ten seconds."""

    @property
    def slice(self) -> Slice:
        return self.config.slice

    @property
    def restarts(self) -> int:
        """Incarnations after the first (`config` is the next one's)."""
        return max(0, self.config.epoch - 2)

    @property
    def state(self) -> str:
        if self.worker is None:
            return "lost"
        return "up" if self.worker.up else "starting"


class Fleet:
    """Used by the controller's thread alone, except for reading slots."""

    def __init__(
        self, configs: Sequence[WorkerConfig], prefix: Path, settings: FleetSettings
    ) -> None:
        self._prefix = prefix
        self.settings = settings
        self.slots = {config.slice.id: Slot(config) for config in configs}
        self._spawner = Spawner()

    @property
    def up(self) -> list[Worker]:
        return [w for slot in self.slots.values() if (w := slot.worker) is not None and w.up]

    def worker(self, slice_id: str) -> Worker | None:
        """The slice's worker if it can take messages."""
        worker = self.slots[slice_id].worker
        return worker if worker is not None and worker.up else None

    def broadcast(self, message: ToWorker) -> None:
        for worker in self.up:
            worker.send(message)

    def start_due(self, now: float) -> None:
        """(Re)start every slice without a worker whose delay has passed, once the last one is gone;
        keep a spare process once all are up. Waits for nobody."""
        for slot in self.slots.values():
            if slot.leaving is not None and slot.leaving.exit_code is not None:
                slot.leaving.close()
                slot.leaving = None
            if slot.worker or slot.leaving or now < slot.restart_at_s:
                continue
            slot.worker = Worker(slot.config, self._prefix, self._spawner.take())
            slot.config = next_config(slot.config)
            slot.started_s = now
        if all(slot.state == "up" for slot in self.slots.values()):
            self._spawner.keep_spare()

    def reap(self, now: float) -> Iterator[tuple[Worker, str]]:
        """Workers found dead, hung or failed to start, with the reason; the caller takes what each
        still said. Raises `FleetDown` when nothing can be started."""
        for slot in self.slots.values():
            worker = slot.worker
            if worker is None or (reason := self._verdict(slot, worker, now)) is None:
                continue
            worker.kill()
            log.error("worker of slice %s (pid %d): %s", slot.slice.id, worker.pid, reason)
            yield worker, reason
            was_up = worker.up and now - slot.started_s > 10.0
            slot.worker, slot.leaving = None, worker
            slot.failures = 0 if was_up else slot.failures + 1
            if slot.failures >= self.settings.start_tries and not self.up:
                raise FleetDown(f"slice {slot.slice.id} does not start: {reason}")
            delay_s = 0.0 if was_up or slot.failures < 2 else 0.5 * 2**slot.failures
            slot.restart_at_s = now + min(delay_s, self.settings.backoff_max_s)

    def _verdict(self, slot: Slot, worker: Worker, now: float) -> str | None:
        if (code := worker.exit_code) is not None:
            return f"killed by signal {-code}" if code < 0 else f"exited with status {code}"
        if worker.ending:
            return "killed, and not gone yet"
        if not worker.up and now - slot.started_s > self.settings.start_timeout_s:
            return f"not up after {self.settings.start_timeout_s:.0f} s"
        limits = self.settings.beat_timeout_s, self.settings.step_timeout_s
        return worker.hung(now, *limits)

    def close(self, grace_s: float) -> None:
        """End all workers and reap them. Workers that are up are told to quit, all at the same
        time, and get `grace_s`; the others have nothing to finish and are killed at once."""
        began_s = time.monotonic()
        workers = [w for slot in self.slots.values() if (w := slot.worker) is not None]
        for worker in workers:
            if worker.up:
                worker.send(Quit())
            else:
                worker.kill()
        self._spawner.close()
        while any(w.exit_code is None for w in workers) and time.monotonic() - began_s < grace_s:
            time.sleep(_END_POLL_S)
        # Each is killed before any is waited for: a driver takes its time with every process.
        for worker in workers:
            worker.kill()
        for slot in self.slots.values():
            for worker in (slot.worker, slot.leaving):
                if worker is not None:
                    worker.close()
            slot.worker = slot.leaving = None
        log.info("all workers ended within %.2f s", time.monotonic() - began_s)
