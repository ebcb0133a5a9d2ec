"""One worker process: started, listened to, watched, killed."""

import logging
import os
import socket
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from c2cserve.core.machine import Slice
from c2cserve.core.policy_names import OWN, PolicyName
from c2cserve.serving.ipc.channel import Channel
from c2cserve.serving.ipc.forks import Child, ForkServer
from c2cserve.serving.ipc.messages import (
    Attach,
    Detach,
    Reset,
    ToController,
    ToWorker,
    WorkerConfig,
    decode_to_controller,
    encode,
)
from c2cserve.serving.ipc.status_page import Field, StatusPage
from c2cserve.serving.ipc.worker_forks import FORK_SERVERS
from c2cserve.serving.logs import LogFormat

log = logging.getLogger(__name__)

_EXITING = 0x4
"""PF_EXITING among a process's flags, the seventh field behind its name in /proc/PID/stat."""
_STAT_BYTES = 4096


class Garbled(Exception):
    """A worker sent bytes that are not a message. Nothing that it sends later is read."""


@dataclass(frozen=True, slots=True)
class Spawned:
    """A worker process and the controller's end of its channel. The other end is its standard
    input.

    All descriptors for watching the process are opened at its start. Finding it dead later needs no
    more, so a shortage of descriptors cannot look like its death.
    """

    process: Child
    channel: Channel
    pidfd: int
    stat_fd: int
    """A descriptor of /proc/PID/stat."""

    @classmethod
    def watch(cls, process: Child, channel: Channel) -> "Spawned":
        """Open what watching the process takes. Raises OSError, and then leaves nothing open."""
        pidfd = os.pidfd_open(process.pid)
        try:
            stat_fd = os.open(f"/proc/{process.pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            os.close(pidfd)
            raise
        return cls(process, channel, pidfd, stat_fd)

    @property
    def ending(self) -> bool:
        """Whether it was killed and is exiting. A GPU's driver may take seconds to free its memory.
        Until then its channel stays open and its pidfd shows nothing."""
        try:
            stat = os.pread(self.stat_fd, _STAT_BYTES, 0)
        except ProcessLookupError:
            return True
        return bool(int(stat.rpartition(b")")[2].split()[6]) & _EXITING)

    def end(self) -> None:
        """Kill the process if need be, and reap it."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.channel.close()
        os.close(self.pidfd)
        os.close(self.stat_fd)


class Spawner:
    """Starts worker processes, as forks of one process that has imported what they need.

    So a lost worker is replaced within milliseconds, also the next one after it.
    """

    def __init__(self, timeout_s: float) -> None:
        """`timeout_s`: a fork server that takes longer to start a worker is replaced."""
        self._timeout_s = timeout_s
        self._forks: ForkServer | None = None
        self._asked: Channel | None = None
        """The controller's end of the channel of the worker that was asked for."""
        self._asked_s = 0.0

    @property
    def awaited_fd(self) -> int | None:
        """The descriptor that becomes readable when `take` has news, if it is awaiting any."""
        return None if self._asked is None or self._forks is None else self._forks.fileno()

    def keep_ready(self) -> None:
        """Have a fork server, and so no delay when a worker is needed. Raises OSError."""
        if self._forks is not None and self._forks.exit_code is not None:
            log.error("the fork server ended: %s", self._drop())
        if self._forks is None:
            self._forks = FORK_SERVERS.take()

    def take(self) -> Spawned | None:
        """Return a new worker process. None: it is being started, and a later call returns it.

        Raises OSError, leaving nothing behind."""
        if self._asked is None:
            self.keep_ready()
            self._ask()
        forks, channel = self._forks, self._asked
        assert forks is not None
        assert channel is not None
        try:
            child = forks.answer()
        except EOFError as error:
            raise OSError(f"the fork server ended: {self._drop()}") from error
        except OSError:
            self._give_up_asking()
            raise
        if child is None:
            if time.monotonic() - self._asked_s > self._timeout_s:
                self._drop()
                raise TimeoutError(f"the fork server took more than {self._timeout_s:g} s")
            return None
        self._asked = None
        return self._watch(child, channel)

    def _ask(self) -> None:
        assert self._forks is not None
        mine, its = socket.socketpair()
        with its:
            try:
                self._forks.ask(its)
            except OSError:
                mine.close()
                raise
        self._asked, self._asked_s = Channel(mine), time.monotonic()

    def _watch(self, child: Child, channel: Channel) -> Spawned:
        try:
            return Spawned.watch(child, channel)
        except OSError:
            child.kill()
            child.wait()
            channel.close()
            raise

    def _drop(self) -> str:
        """End the fork server, and say how it ended."""
        forks, self._forks = self._forks, None
        self._give_up_asking()
        return "" if forks is None else exit_text(forks.close())

    def _give_up_asking(self) -> None:
        """A worker that comes nevertheless finds its channel closed, and ends."""
        if self._asked is not None:
            self._asked.close()
            self._asked = None

    def close(self) -> None:
        self._drop()


def exit_text(status: int) -> str:
    return f"killed by signal {-status}" if status < 0 else f"exited with status {status}"


class Worker:
    """An incarnation (`epoch`) of a slice's worker process.

    Status pages lie beside the pool's segments under the instance's name, so that the cleanup of a
    dead run's segments removes them too.
    """

    def __init__(self, template: WorkerConfig, prefix: Path, spawned: Spawned) -> None:
        """Raises OSError if there is no room for its page; `spawned` is not used then."""
        self.slice: Slice = template.slice
        self.epoch = template.epoch
        self.page = StatusPage(Path(f"{prefix}.{self.slice.id}.{self.epoch}.status"), create=True)
        self.up = False
        self.attached: list[str] = []
        """Models in the order of their `Attach` messages."""
        self.segments: dict[str, str] = {}
        """Models that it was asked to attach and not to detach -> their segments."""
        self.resetting = 0
        """The number of the last `Reset` until its `ResetDone` arrives, else 0."""
        self._received: deque[bytes] = deque()
        self._garbled = False
        self._spawned = spawned
        self.channel = spawned.channel
        self.pidfd = spawned.pidfd
        config = msgspec.structs.replace(template, status_path=str(self.page.path))
        self.channel.send(msgspec.json.encode(config))

    @property
    def pid(self) -> int:
        return self._spawned.process.pid

    @property
    def exit_code(self) -> int | None:
        return self._spawned.process.poll()

    @property
    def ending(self) -> bool:
        """Whether it was killed and is exiting."""
        return self._spawned.ending

    def send(self, message: ToWorker) -> None:
        """Send without blocking. A dead worker is no failure: its requests are placed again. A
        message that cannot be encoded raises, and nothing of it is sent."""
        self.channel.send(encode(message))

    def attach(self, message: Attach) -> None:
        """Send `Attach`, once for each segment of a model."""
        model = message.spec.id
        if self.segments.get(model) != message.segment:
            self.send(message)
            self.attached.append(model)
            self.segments[model] = message.segment

    def detach(self, model: str) -> None:
        if self.segments.pop(model, None) is not None:
            self.send(Detach(model))

    def reset(self, number: int) -> None:
        """Have all its requests withdrawn and all its models deactivated."""
        self.resetting = number
        self.send(Reset(number))

    def receive(self) -> Iterator[ToController]:
        """Yield each message once. Messages that the caller does not take stay for the next call.
        Raises `Garbled`."""
        self._received.extend(self.channel.receive())
        while self._received and not self._garbled:
            try:
                message = decode_to_controller(self._received.popleft())
            except msgspec.MsgspecError as error:
                self._garbled = True
                raise Garbled(str(error)) from error
            yield message

    def hung(
        self, now: float, watched_s: float, beat_timeout_s: float, step_timeout_s: float
    ) -> str | None:
        """Return why this worker counts as hung, or None. `watched_s`: how long it has been watched
        without a pause; no silence counts for longer."""
        if not self.up:
            return None
        silent_s = min(watched_s, now - self.page[Field.BEAT_S])
        if silent_s > beat_timeout_s:
            return f"no sign of life for {silent_s:.1f} s"
        if (stalled_s := min(watched_s, self.stalled_s(now))) > step_timeout_s:
            return f"it has had requests for {stalled_s:.1f} s, and no step was done"
        started = self.page[Field.STEP_STARTED_S]
        if started and min(watched_s, now - started) > step_timeout_s:
            return f"one step has been running for {now - started:.1f} s"
        return None

    def stalled_s(self, now: float) -> float:
        """Return how long the slice has had requests without completing a step. Time spent waiting
        for weights does not count; failed steps do not count as completed."""
        if not (self.up and self.page.has_requests):
            return 0.0
        return max(0.0, now - self.page[Field.PROGRESS_S])

    def kill(self) -> None:
        if self.exit_code is None:
            self._spawned.process.kill()

    def close(self) -> None:
        """Reap the process (killing it if need be) and remove its page."""
        self._spawned.end()
        self.page.remove()


def first_config(
    slice_: Slice, log_level: str, log_format: LogFormat, record: str | None,
    policy: PolicyName = OWN,
) -> WorkerConfig:  # fmt: skip
    """Return the template of a slice's first incarnation; `next_config` makes the later ones."""
    return WorkerConfig(slice_, 1, "", log_level, log_format, record, policy)


def next_config(config: WorkerConfig) -> WorkerConfig:
    return msgspec.structs.replace(config, epoch=config.epoch + 1)
