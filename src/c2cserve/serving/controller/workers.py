"""One worker process: started, listened to, watched, killed."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from c2cserve.core.machine import Slice
from c2cserve.runtime.environment import child_environment
from c2cserve.serving.ipc.channel import Channel
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
from c2cserve.serving.logs import LogFormat

# The kernels bring their own thread pool; a library that spins up another one per worker would
# fight it for the slice's cores.
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


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

    process: "subprocess.Popen[bytes]"
    channel: Channel
    pidfd: int
    stat_fd: int
    """A descriptor of /proc/PID/stat."""

    @classmethod
    def watch(cls, process: "subprocess.Popen[bytes]", channel: Channel) -> "Spawned":
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


def spawn() -> Spawned:
    """Start a worker process. Raises OSError, leaving nothing behind."""
    with contextlib.ExitStack() as undo:
        mine, its = socket.socketpair()
        undo.callback(mine.close)
        with its:
            process = subprocess.Popen(
                [sys.executable, "-m", "c2cserve.cli.main", "worker"],
                stdin=its.fileno(),
                env=child_environment(**_ONE_THREAD),
                process_group=0,  # a terminal's ctrl-C is for the server, which drains first
            )
        undo.callback(process.wait)
        undo.callback(process.kill)
        spawned = Spawned.watch(process, Channel(mine))
        undo.pop_all()
    return spawned


class Spawner:
    """Starts worker processes, and keeps one in reserve.

    A fresh process spends seconds importing its array library. The spare one has done that and
    waits for its configuration: a lost worker is replaced within milliseconds.
    """

    def __init__(self) -> None:
        self._spare: Spawned | None = None

    def take(self) -> Spawned:
        """Return the spare process if it is alive, else a new one. Raises OSError."""
        self.keep_spare()
        spare, self._spare = self._spare, None
        assert spare is not None
        return spare

    def keep_spare(self) -> None:
        """Start a spare process unless there is a live one. Raises OSError."""
        if self._spare is not None and self._spare.process.poll() is not None:
            self._spare.end()
            self._spare = None
        if self._spare is None:
            self._spare = spawn()

    def close(self) -> None:
        if self._spare is not None:
            self._spare.end()


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
            self._spawned.process.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """Reap the process (killing it if need be) and remove its page."""
        self._spawned.end()
        self.page.remove()


def first_config(
    slice_: Slice, log_level: str, log_format: LogFormat, record: str | None
) -> WorkerConfig:
    """Return the template of a slice's first incarnation; `next_config` makes the later ones."""
    return WorkerConfig(slice_, 1, "", log_level, log_format, record)


def next_config(config: WorkerConfig) -> WorkerConfig:
    return msgspec.structs.replace(config, epoch=config.epoch + 1)
