"""`c2cserve worker`: one slice's process, started by `c2cserve serve`."""

import ctypes
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Never, NoReturn

import msgspec

from c2cserve.core.actions import SliceAction
from c2cserve.core.events import SliceEvent
from c2cserve.core.machine import Slice
from c2cserve.policy.slice.policy import SlicePolicy
from c2cserve.runtime.driver import run
from c2cserve.runtime.ports import Recorder
from c2cserve.runtime.record import Record, no_record
from c2cserve.serving.ipc.channel import Channel
from c2cserve.serving.ipc.messages import Measured, WorkerConfig
from c2cserve.serving.ipc.status_page import StatusPage
from c2cserve.serving.logs import setup_logging
from c2cserve.serving.worker.shared_gpu_process import lodge, open_house
from c2cserve.serving.worker.slice_engine import Usage
from c2cserve.serving.worker.slice_world import Quitting, SliceWorld

if TYPE_CHECKING:
    from c2cserve.serving.worker.engine_host import WorkerEngine

log = logging.getLogger(__name__)

_MAX_IN_FLIGHT = 2
"""Steps of a GPU slice: the next one is launched while one runs. A CPU slice computes them on the
thread that plans them."""
_CPU_NICE = 5
"""Of CPU slices. They compute without pause on cores that the server and its text processes use as
well: with equal rights, each hop of a request between these waits for its turn behind a step."""
_PR_SET_PDEATHSIG = 1
_LINGER_S = 1.0
_NO_ENGINE = 3
"""Exit status when the slice's hardware or what it needs is not there."""


def worker() -> None:
    """Standard input is its channel, its configuration the first message. Ends with its server."""
    _die_with(os.getppid())
    # Before the configuration is read: a spare process has done the slow part when it is needed.
    from c2cserve.serving.worker.engine_host import WorkerEngine

    end = socket.fromfd(sys.stdin.fileno(), socket.AF_UNIX, socket.SOCK_STREAM)
    channel = Channel(end)
    message = channel.next()
    config = msgspec.json.decode(message, type=WorkerConfig)
    setup_logging(f"worker/{config.slice.id}", config.log_level, config.log_format)
    os.sched_setaffinity(0, config.slice.cpus)
    if config.slice.kind == "cpu":
        os.nice(_CPU_NICE)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the server decides when to end
    if config.slice.kind == "green":
        _share_gpu(config, message, end)
    else:
        _serve(config, channel, partial(WorkerEngine, config.slice))
    _end(0)


def _share_gpu(config: WorkerConfig, message: bytes, end: socket.socket) -> None:
    """One process computes for all slices that are parts of this one's GPU."""
    from c2cserve.serving.worker.engine_host import SharedGpu, WorkerEngine

    share = config.slice.gpu
    assert share is not None
    shared = SharedGpu(share)

    def serve(data: bytes, channel: socket.socket) -> None:
        lodger = msgspec.json.decode(data, type=WorkerConfig)
        make = partial(WorkerEngine, lodger.slice, shared=shared)
        _serve(lodger, Channel(channel), make)

    name = f"c2cserve.{os.getppid()}.{share.uuid}"
    while True:
        house = open_house(name, serve, lambda: os._exit(1))
        if house is not None:
            serve(message, end)
            house.close()
            return
        status = lodge(name, message, end)
        if status is not None:
            _end(status)


def _serve(
    config: WorkerConfig, channel: Channel, make: "Callable[[SliceWorld], WorkerEngine]"
) -> None:
    """One slice, on the calling thread, until it is told to quit. Ends the process if it fails."""
    from c2cserve.serving.worker.engine_host import NoEngine

    policy = SlicePolicy(config.slice, _max_in_flight(config.slice))
    page = StatusPage(Path(config.status_path), create=False)
    world = SliceWorld(channel, page, _usage(policy), _measured(policy))
    try:
        engine = make(world)
    except NoEngine as error:
        log.error("slice %s can not start: %s", config.slice.id, error)
        os._exit(_NO_ENGINE)
    world.start(engine, engine.isa, config.epoch)
    gc.freeze()  # what is there now stays: the collector need not look at it again
    failed = False
    try:
        run(policy, world, world, _recorder(config))
    except Quitting:
        log.info("slice %s is done", config.slice.id)
    except Exception:
        log.exception("slice %s ends", config.slice.id)
        failed = True
    world.stop()
    channel.drain(_LINGER_S)
    if failed:
        os._exit(1)  # a GPU that failed can keep destructors waiting for ever


def _end(status: int) -> NoReturn:
    """End the process without taking anything in it apart. Whatever a worker holds, the kernel and
    the driver take back faster: destructors unregister the pool page by page, one after another."""
    logging.shutdown()
    os._exit(status)


def _max_in_flight(slice_: Slice) -> int:
    return 1 if slice_.gpu is None else _MAX_IN_FLIGHT


def _die_with(parent: int) -> None:
    """Be killed when the server's controller ends, however it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)  # it ended before the line above


def _recorder(config: WorkerConfig) -> Recorder[SliceEvent, SliceAction]:
    if config.record_path is None:
        return no_record
    stream = f"{config.slice.id}/{config.epoch}"
    arguments = {"slice": config.slice, "max_in_flight": _max_in_flight(config.slice)}
    return Record(Path(config.record_path), stream, "slice", arguments)


def _usage(policy: SlicePolicy[Never]) -> Callable[[], Usage]:
    def usage() -> Usage:
        return Usage(
            policy.running, policy.waiting, policy.arena.held_bytes, policy.cached_tokens,
            policy.preemptions, policy.retries, policy.given_up,
        )  # fmt: skip

    return usage


def _measured(policy: SlicePolicy[Never]) -> Callable[[], Sequence[Measured]]:
    def measured() -> list[Measured]:
        times = policy.step_times().items()
        return [Measured(name, t.decode_s, t.prefill_token_s) for name, t in times if t.decode_s]

    return measured
