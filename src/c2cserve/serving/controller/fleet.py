"""All worker processes of a server: kept running, one per slice.

A worker that dies or hangs is replaced at once. A worker that keeps dying is replaced with growing
delays, for ever. Once a slice has been up, no fault of workers ends the server. `reap`
yields what the controller must know of it.
"""

import logging
import select
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from c2cserve.core.backoff import back_off_s
from c2cserve.core.machine import Slice
from c2cserve.serving.controller.reserve import Reserve
from c2cserve.serving.controller.workers import Spawner, Worker, exit_text, next_config
from c2cserve.serving.ipc.messages import Quit, WorkerConfig

log = logging.getLogger(__name__)

_END_POLL_S = 0.01
_BACK_OFF_FIRST_S = 2.0
_FORKS_RETRY_S = 5.0
_PAUSE_S = 2.0
"""Workers are checked several times a second. After a longer gap, the server itself did not run."""
_SOUND_S = 10.0
"""A worker that was up for longer has started successfully."""
_START_FDS = 8
"""Most file descriptors that are open only while a worker starts."""
_FORKS_FDS = 2
"""Descriptors for the fork server, and for the channel of a worker that it was asked for."""
_WORKER_FDS = 4
"""Descriptors that a worker keeps: its channel, its pidfd, its stat file, the mapping of its
page."""


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
    """Failed starts in a row after which the server gives up, if no slice has ever been up."""
    backoff_max_s: float = 30.0


class FleetDown(Exception):
    """No worker can be started, and none ever was."""


@dataclass(frozen=True, slots=True)
class Outage:
    """Why no slice is up, and in how many seconds the next start is due (0: one starts now)."""

    reason: str
    retry_s: float


@dataclass(slots=True)
class WorkerSlot:
    """A slice and its current worker, if one runs."""

    config: WorkerConfig
    worker: Worker | None = None
    previous: Worker | None = None
    """The worker before, killed but not gone: the device memory that it holds is not free yet."""
    started_s: float = 0.0
    restart_at_s: float = 0.0
    deaths: int = 0
    """Consecutive incarnations that died before they were up for ten seconds."""
    refusals: int = 0
    """Starts in a row that the machine refused: no room, no processes. A worker that comes up ends
    them, so that its death is not taken for one more failure of the same kind."""
    reason: str = ""
    """Why the last incarnation ended."""
    awaited: bool = False
    """Its next worker's process was asked for."""

    @property
    def failures(self) -> int:
        """Failures in a row, which delay the next start."""
        return self.deaths + self.refusals

    @property
    def backs_off(self) -> bool:
        """Whether its workers fail again and again, and none is up."""
        return self.failures > 1 and not (self.worker is not None and self.worker.up)

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
            return "starting" if self.awaited else "lost"
        return "up" if self.worker.up else "starting"


class Fleet:
    """Used by the controller's thread alone, except for reading slots."""

    def __init__(
        self, configs: Sequence[WorkerConfig], prefix: Path, settings: FleetSettings
    ) -> None:
        self._prefix = prefix
        self.settings = settings
        self.slots = {config.slice.id: WorkerSlot(config) for config in configs}
        self._spawner = Spawner(settings.start_timeout_s)
        self._excused: set[str] = set()
        """Slices whose worker died because of a request."""
        self._forks_due_s = 0.0
        self._forks_failing = False
        self._reserve = Reserve(_START_FDS + _FORKS_FDS + _WORKER_FDS * len(configs))
        self._ever_up = False
        self._reaped_s = self._watching_since_s = 0.0

    @property
    def up(self) -> list[Worker]:
        return [w for slot in self.slots.values() if (w := slot.worker) is not None and w.up]

    def worker(self, slice_id: str) -> Worker | None:
        """The slice's worker if it can take messages."""
        worker = self.slots[slice_id].worker
        return worker if worker is not None and worker.up else None

    def outage(self, now: float) -> Outage | None:
        """None while a slice is up, or may come up without delay. Callable from any thread."""
        slots = list(self.slots.values())
        if not all(slot.backs_off for slot in slots):
            return None
        starts = [0.0 if one.worker or one.previous else one.restart_at_s - now for one in slots]
        reasons = sorted({f"slice {slot.slice.id}: {slot.reason}" for slot in slots})
        return Outage(f"no slice is up ({'; '.join(reasons)})", max(0.0, min(starts)))

    def poll(self, wake_fd: int, timeout_s: float) -> bool:
        """Wait until `wake_fd` is readable, a worker has something, or the time is over. Return
        whether a worker has ended, or `start_due` can go on."""
        poller = select.poll()
        poller.register(wake_fd, select.POLLIN)
        for slot in self.slots.values():
            if slot.worker is not None:
                poller.register(slot.worker.pidfd, select.POLLIN)
                if not slot.worker.channel.closed:
                    poller.register(slot.worker.channel, slot.worker.channel.interest)
        if (awaited := self._spawner.awaited_fd) is not None:
            poller.register(awaited, select.POLLIN)
        ready = dict(poller.poll(max(1, int(timeout_s * 1000))))
        ended = any(one.worker and one.worker.pidfd in ready for one in self.slots.values())
        return awaited in ready or ended

    def start_due(self, now: float) -> None:
        """Start a worker on every slice that has none, if its delay has passed and its last worker
        is gone. Never blocks: a worker whose process is not there yet is started by a later call.
        Raises `FleetDown` when no worker can be started, and none ever could."""
        for slot in self.slots.values():
            if slot.previous is not None and slot.previous.exit_code is not None:
                slot.previous.close()
                slot.previous = None
            if slot.worker or slot.previous or now < slot.restart_at_s:
                continue
            try:
                with self._reserve.lent():
                    slot.worker = self._start(slot.config)
            except OSError as error:
                # No descriptors, processes or shared memory now: that is not for ever.
                slot.awaited = False
                slot.refusals += 1
                self._failed(slot, f"cannot be started: {error}", now)
                continue
            slot.awaited = slot.worker is None
            if slot.worker is not None:
                slot.config = next_config(slot.config)
                slot.started_s = now
        if now >= self._forks_due_s:
            self._keep_ready(now)

    def _start(self, config: WorkerConfig) -> Worker | None:
        """Start one worker if there is a process for it. Raises OSError."""
        spawned = self._spawner.take()
        if spawned is None:
            return None
        try:
            return Worker(config, self._prefix, spawned)
        except OSError:
            spawned.end()
            raise

    def _keep_ready(self, now: float) -> None:
        """Replace a fork server that ended while no slice was waiting for it."""
        self._forks_due_s = now + _FORKS_RETRY_S
        try:
            self._spawner.keep_ready()
            self._forks_failing = False
        except OSError as error:
            if not self._forks_failing:
                log.error("no fork server for now: %s", error)
            self._forks_failing = True

    def _failed(self, slot: WorkerSlot, reason: str, now: float) -> None:
        """Note why an incarnation failed, and delay the next one. Raises `FleetDown`."""
        if reason != slot.reason:
            log.error("worker of slice %s: %s", slot.slice.id, reason)
        slot.reason = reason
        if slot.failures >= self.settings.start_tries and not self._ever_up:
            raise FleetDown(f"slice {slot.slice.id} does not start: {reason}")
        delay_s = 0.0
        if slot.failures > 1:
            most_s = self.settings.backoff_max_s
            delay_s = back_off_s(slot.failures - 2, _BACK_OFF_FIRST_S, most_s)
        slot.restart_at_s = now + delay_s

    def excuse(self, slice_id: str) -> None:
        """Start the successor of the worker that `reap` has just yielded without delay. That worker
        died with a request with which others had died before. Such deaths are few
        (`policy.cluster.suspects`)."""
        self._excused.add(slice_id)

    def reap(self, now: float) -> Iterator[tuple[Worker, str]]:
        """Yield workers that are dead, hung or did not start, with the reason. The caller receives
        the last messages of each. Raises `FleetDown` when no worker can be started, and none ever
        could."""
        self._ever_up |= bool(self.up)
        if now - self._reaped_s > _PAUSE_S:  # the whole machine may have been stopped meanwhile
            self._watching_since_s = now
        self._reaped_s = now
        for slot in self.slots.values():
            worker = slot.worker
            if worker is not None and worker.up:
                slot.refusals = 0
            if worker is None or (reason := self._verdict(slot, worker, now)) is None:
                continue
            worker.kill()
            log.error("worker of slice %s (pid %d): %s", slot.slice.id, worker.pid, reason)
            yield worker, reason
            slot.worker, slot.previous = None, worker
            excused = slot.slice.id in self._excused
            self._excused.discard(slot.slice.id)
            sound = worker.up and now - slot.started_s > _SOUND_S
            if sound or excused:
                slot.deaths = 0 if sound else slot.deaths
                slot.reason, slot.restart_at_s = reason, now
            else:
                slot.deaths += 1
                slot.reason = reason  # logged above
                self._failed(slot, reason, now)

    def _verdict(self, slot: WorkerSlot, worker: Worker, now: float) -> str | None:
        if (code := worker.exit_code) is not None:
            return exit_text(code)
        if worker.ending:
            return "killed, and not gone yet"
        if not worker.up and now - slot.started_s > self.settings.start_timeout_s:
            return f"not up after {self.settings.start_timeout_s:.0f} s"
        limits = self.settings.beat_timeout_s, self.settings.step_timeout_s
        return worker.hung(now, now - self._watching_since_s, *limits)

    def close(self, grace_s: float) -> None:
        """End all workers and reap them. Workers that are up get `Quit`, all at the same time, and
        `grace_s` to end. The others have nothing to finish and are killed at once."""
        began_s = time.monotonic()
        workers = [w for slot in self.slots.values() if (w := slot.worker) is not None]
        for worker in workers:
            if worker.up:
                worker.send(Quit())
            else:
                worker.kill()
        self._spawner.close()
        self._reserve.close()
        while any(w.exit_code is None for w in workers) and time.monotonic() - began_s < grace_s:
            time.sleep(_END_POLL_S)
        # Each is killed before any is waited for: a driver takes its time with every process.
        for worker in workers:
            worker.kill()
        for slot in self.slots.values():
            for worker in (slot.worker, slot.previous):
                if worker is not None:
                    worker.close()
            slot.worker = slot.previous = None
        log.info("all workers ended within %.2f s", time.monotonic() - began_s)
