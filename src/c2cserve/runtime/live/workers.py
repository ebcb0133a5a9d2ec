"""One worker process: started, listened to, watched, killed."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import zmq

from c2cserve.core.machine import Slice
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


class Spawner:
    """Starts worker processes, and keeps one in reserve.

    A fresh process spends seconds importing its array library. The spare one has done that and
    waits for its configuration: a lost worker is replaced within milliseconds.
    """

    def __init__(self) -> None:
        self._spare: subprocess.Popen[bytes] | None = None

    def take(self) -> "subprocess.Popen[bytes]":
        """The spare process if it is alive, else a new one."""
        spare, self._spare = self._spare, None
        if spare is not None and spare.poll() is None:
            return spare
        return self._start()

    def keep_spare(self) -> None:
        if self._spare is None or self._spare.poll() is not None:
            self._spare = self._start()

    @staticmethod
    def _start() -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            [sys.executable, "-m", "c2cserve.cli.main", "worker"],
            stdin=subprocess.PIPE,
            env={**os.environ, **_ONE_THREAD},
            process_group=0,  # a terminal's ctrl-C is for the server, which drains first
        )

    def close(self) -> None:
        if self._spare is not None:
            self._spare.kill()
            self._spare.wait()
            assert self._spare.stdin is not None
            self._spare.stdin.close()


class Worker:
    """An incarnation (`epoch`) of a slice's worker process and the socket to it.

    Sockets and status pages lie beside the pool's segments under the instance's name, so that
    whatever removes a dead run's segments removes them too.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        template: WorkerConfig,
        prefix: Path,
        process: "subprocess.Popen[bytes]",
    ) -> None:
        self.slice: Slice = template.slice
        self.epoch = template.epoch
        base = f"{prefix}.{self.slice.id}.{self.epoch}"
        self._socket_path = Path(f"{base}.sock")
        self.page = StatusPage(Path(f"{base}.status"), create=True)
        self.up = False
        self.attached: list[str] = []
        self.socket = context.socket(zmq.PAIR)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.set_hwm(0)
        self.socket.bind(f"ipc://{self._socket_path}")
        config = msgspec.structs.replace(
            template, endpoint=f"ipc://{self._socket_path}", status_path=str(self.page.path)
        )
        self.process = process
        self.pidfd = os.pidfd_open(process.pid)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # dead already: its pidfd says so
            process.stdin.write(msgspec.json.encode(config))
            process.stdin.close()

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def exit_code(self) -> int | None:
        return self.process.poll()

    def send(self, message: ToWorker) -> None:
        """Never blocks and never fails: what a dead worker does not get is placed again."""
        try:
            self.socket.send(encode(message), flags=zmq.NOBLOCK)
        except zmq.Again:
            return

    def receive(self) -> Iterator[ToController]:
        while True:
            try:
                data = self.socket.recv(flags=zmq.NOBLOCK)
            except zmq.Again:
                return
            yield decode_to_controller(data)

    def hung(self, now: float, beat_timeout_s: float, step_timeout_s: float) -> str | None:
        """Why this worker must be considered hung, or None."""
        if not self.up:
            return None
        silent_s = now - self.page[Field.BEAT_S]
        if silent_s > beat_timeout_s:
            return f"no sign of life for {silent_s:.1f} s"
        started = self.page[Field.STEP_STARTED_S]
        if started and now - started > step_timeout_s:
            return f"one step has been running for {now - started:.1f} s"
        return None

    def kill(self) -> None:
        if self.exit_code is None:
            self.process.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """Reap the process (killing it if need be) and remove its socket and page."""
        self.kill()
        self.process.wait()
        os.close(self.pidfd)
        self.socket.close()
        self.page.remove()
        self._socket_path.unlink(missing_ok=True)


def first_config(
    slice_: Slice, log_level: str, log_format: LogFormat, record: str | None
) -> WorkerConfig:
    """The template of a slice's first incarnation; `next_config` makes the following ones."""
    return WorkerConfig(slice_, 1, "", "", log_level, log_format, record)


def next_config(config: WorkerConfig) -> WorkerConfig:
    return msgspec.structs.replace(config, epoch=config.epoch + 1)
