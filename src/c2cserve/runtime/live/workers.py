"""One worker process: started, listened to, watched, killed."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from c2cserve.core.machine import Slice
from c2cserve.runtime.live.channel import Channel
from c2cserve.runtime.live.logs import LogFormat
from c2cserve.runtime.live.messages import (
    ToController,
    ToWorker,
    WorkerConfig,
    decode_to_controller,
    encode,
)
from c2cserve.runtime.live.status_page import Field, StatusPage

# The kernels bring their own thread pool; a library that spins up another one per worker would
# fight it for the slice's cores.
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


_EXITING = 0x4
"""PF_EXITING among a process's flags, the seventh field behind its name in /proc/PID/stat."""


@dataclass(frozen=True, slots=True)
class Spawned:
    """A worker process and our end of its channel: it has the other as its standard input."""

    process: "subprocess.Popen[bytes]"
    channel: Channel

    def end(self) -> None:
        """Kill it if need be, and reap it."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.channel.close()


class Spawner:
    """Starts worker processes, and keeps one in reserve.

    A fresh process spends seconds importing its array library. The spare one has done that and
    waits for its configuration: a lost worker is replaced within milliseconds.
    """

    def __init__(self) -> None:
        self._spare: Spawned | None = None

    def take(self) -> Spawned:
        """The spare process if it is alive, else a new one."""
        self.keep_spare()
        spare, self._spare = self._spare, None
        assert spare is not None
        return spare

    def keep_spare(self) -> None:
        if self._spare is not None and self._spare.process.poll() is not None:
            self._spare.end()
            self._spare = None
        if self._spare is None:
            self._spare = self._start()

    @staticmethod
    def _start() -> Spawned:
        mine, its = socket.socketpair()
        with its:
            process = subprocess.Popen(
                [sys.executable, "-m", "c2cserve.cli.main", "worker"],
                stdin=its.fileno(),
                env={**os.environ, **_ONE_THREAD},
                process_group=0,  # a terminal's ctrl-C is for the server, which drains first
            )
        return Spawned(process, Channel(mine))

    def close(self) -> None:
        if self._spare is not None:
            self._spare.end()


class Worker:
    """An incarnation (`epoch`) of a slice's worker process.

    Status pages lie beside the pool's segments under the instance's name, so that whatever removes
    a dead run's segments removes them too.
    """

    def __init__(self, template: WorkerConfig, prefix: Path, spawned: Spawned) -> None:
        self.slice: Slice = template.slice
        self.epoch = template.epoch
        self.page = StatusPage(Path(f"{prefix}.{self.slice.id}.{self.epoch}.status"), create=True)
        self.up = False
        self.attached: list[str] = []
        self._spawned = spawned
        self.channel = spawned.channel
        self.pidfd = os.pidfd_open(self.pid)
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
        """Killed and on its way out. With a GPU's driver taking its memory apart that takes
        seconds, in which its channel stays open and nobody is told of its end."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:
            return True
        return bool(int(stat.rpartition(")")[2].split()[6]) & _EXITING)

    def send(self, message: ToWorker) -> None:
        """Never blocks and never fails: what a dead worker does not get is placed again."""
        self.channel.send(encode(message))

    def receive(self) -> Iterator[ToController]:
        for data in self.channel.receive():
            yield decode_to_controller(data)

    def hung(self, now: float, beat_timeout_s: float, step_timeout_s: float) -> str | None:
        """Why this worker must be considered hung, or None."""
        if not self.up:
            return None
        silent_s = now - self.page[Field.BEAT_S]
        if silent_s > beat_timeout_s:
            return f"no sign of life for {silent_s:.1f} s"
        if (stalled_s := self.stalled_s(now)) > step_timeout_s:
            return f"it has had requests for {stalled_s:.1f} s, and no step was done"
        started = self.page[Field.STEP_STARTED_S]
        if started and now - started > step_timeout_s:
            return f"one step has been running for {now - started:.1f} s"
        return None

    def stalled_s(self, now: float) -> float:
        """How long the slice has had requests without a step being done (or waiting for weights).
        Failed steps do not count as done."""
        page = self.page
        busy = page[Field.RUNNING] or page[Field.WAITING]
        return max(0.0, now - page[Field.PROGRESS_S]) if self.up and busy else 0.0

    def kill(self) -> None:
        if self.exit_code is None:
            self._spawned.process.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """Reap the process (killing it if need be) and remove its page."""
        self._spawned.end()
        os.close(self.pidfd)
        self.page.remove()


def first_config(
    slice_: Slice, log_level: str, log_format: LogFormat, record: str | None
) -> WorkerConfig:
    """The template of a slice's first incarnation; `next_config` makes the following ones."""
    return WorkerConfig(slice_, 1, "", log_level, log_format, record)


def next_config(config: WorkerConfig) -> WorkerConfig:
    return msgspec.structs.replace(config, epoch=config.epoch + 1)
