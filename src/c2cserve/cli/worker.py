"""`c2cserve worker`: one slice's process, started by `c2cserve serve`."""

import ctypes
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from c2cserve.core.actions import SliceAction
from c2cserve.core.events import SliceEvent
from c2cserve.policy.slice import SlicePolicy
from c2cserve.runtime.driver import run
from c2cserve.runtime.live.channel import Channel
from c2cserve.runtime.live.logs import setup_logging
from c2cserve.runtime.live.messages import Measured, WorkerConfig
from c2cserve.runtime.live.slice_world import Quitting, SliceWorld, Usage
from c2cserve.runtime.live.status_page import StatusPage
from c2cserve.runtime.ports import Recorder
from c2cserve.runtime.record import Record, no_record

log = logging.getLogger(__name__)

_MAX_IN_FLIGHT = 1
_PR_SET_PDEATHSIG = 1
_LINGER_S = 1.0
_NO_ENGINE = 3
"""Exit status when the slice's hardware or what it needs is not there."""


def worker() -> None:
    """Standard input is its channel, its configuration the first message. Ends with its server."""
    _die_with(os.getppid())
    # Before the configuration is read: a spare process has done the slow part when it is needed.
    from c2cserve.cli.worker_engine import NoEngine, WorkerEngine

    channel = Channel(socket.fromfd(sys.stdin.fileno(), socket.AF_UNIX, socket.SOCK_STREAM))
    config = msgspec.json.decode(channel.next(), type=WorkerConfig)
    setup_logging(f"worker/{config.slice.id}", config.log_level, config.log_format)
    os.sched_setaffinity(0, config.slice.cpus)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the server decides when to end
    policy = SlicePolicy(config.slice, _MAX_IN_FLIGHT)
    page = StatusPage(Path(config.status_path), create=False)
    world = SliceWorld(channel, page, _usage(policy), _measured(policy))
    try:
        engine = WorkerEngine(config.slice, world)
    except NoEngine as error:
        log.error("slice %s can not start: %s", config.slice.id, error)
        sys.exit(_NO_ENGINE)
    world.start(engine, engine.isa, config.epoch)
    gc.freeze()  # what is there now stays: the collector need not look at it again
    failed = False
    try:
        run(policy, world, world, _recorder(config))
    except Quitting:
        log.info("done")
    except Exception:
        log.exception("slice %s ends", config.slice.id)
        failed = True
    world.stop()
    channel.drain(_LINGER_S)
    if failed:
        os._exit(1)  # a GPU that failed can keep destructors waiting for ever


def _die_with(parent: int) -> None:
    """Be killed when the server's controller ends, however it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)  # it ended before the line above


def _recorder(config: WorkerConfig) -> Recorder[SliceEvent, SliceAction]:
    if config.record_path is None:
        return no_record
    stream = f"{config.slice.id}/{config.epoch}"
    arguments = {"slice": config.slice, "max_in_flight": _MAX_IN_FLIGHT}
    return Record(Path(config.record_path), stream, "slice", arguments)


def _usage(policy: SlicePolicy) -> Callable[[], Usage]:
    def usage() -> Usage:
        return Usage(
            policy.running, policy.waiting, policy.arena.held_bytes, policy.cached_tokens,
            policy.preemptions,
        )  # fmt: skip

    return usage


def _measured(policy: SlicePolicy) -> Callable[[], Sequence[Measured]]:
    def measured() -> list[Measured]:
        times = policy.step_times().items()
        return [Measured(name, t.decode_s, t.prefill_token_s) for name, t in times if t.decode_s]

    return measured
