"""The fork server of `c2cserve serve`, and one slice's process."""

import errno
import gc
import logging
import os
import signal
import socket
import stat
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import msgspec

from c2cserve.core.actions import BaselineSliceAction, SliceAction
from c2cserve.core.events import SliceEvent
from c2cserve.policy.by_name import hybrid_alpha, slice_policy
from c2cserve.policy.slice.policy import SlicePolicy
from c2cserve.policy.slice.prefix_tier import PrefixTier
from c2cserve.policy.slice.strategies import live_steps_in_flight
from c2cserve.processes.collector import collect_rarely
from c2cserve.processes.parent_death import end_with_parent
from c2cserve.processes.standard_streams import open_missing_streams
from c2cserve.runtime.driver import run
from c2cserve.runtime.ports import Recorder, no_record
from c2cserve.runtime.record import Record
from c2cserve.runtime.slice_stats import SliceStats
from c2cserve.serving.ipc.channel import Channel
from c2cserve.serving.ipc.forks import PID
from c2cserve.serving.ipc.messages import Measured, WorkerConfig
from c2cserve.serving.ipc.status_page import StatusPage
from c2cserve.serving.logs import setup_logging
from c2cserve.serving.worker.shared_gpu_process import join_shared_process, open_shared_process
from c2cserve.serving.worker.world import Quitting, WorkerWorld

if TYPE_CHECKING:
    from c2cserve.serving.worker.engine_host import WorkerEngine

log = logging.getLogger(__name__)

_LINGER_S = 1.0
_ORPHAN_POLL_S = 0.0005
_NO_ENGINE = 3
"""Exit status when the slice's hardware, or a library that it needs, is missing."""


def worker() -> None:
    """Start workers until the server ends: each is a fork of this process, which has imported what
    they need. The standard input is the other end of a `serving.ipc.forks.ForkServer`."""
    open_missing_streams()
    if not stat.S_ISSOCK(os.fstat(0).st_mode):
        sys.exit("a worker is started by `c2cserve serve`, which talks to it")
    server = os.getppid()
    _die_with(server)
    # This is the slow part of a worker's start. Nothing of it is garbage: collections would take a
    # fifth more, and one at the end a tenth.
    gc.disable()
    from c2cserve.serving.worker import engine_host as engine_host

    gc.enable()
    gc.freeze()  # a collection writes to objects, and pages that are written to are not shared
    end = fork_on_request(socket.socket(fileno=os.dup(sys.stdin.fileno())))
    if end is None:
        _end(0)
    os.dup2(end, sys.stdin.fileno())
    os.close(end)
    _die_with(server)
    _serve_slice()


def fork_on_request(control: socket.socket) -> int | None:
    """Fork each time that a `serving.ipc.forks.ForkServer` asks for it at the other end.

    Return in each child, with the descriptor that came with the request. Return None in this
    process when the other end is gone. Raises OSError."""
    while True:
        asked, ends, _, _ = socket.recv_fds(control, 1, 1)
        if not asked:
            return None
        answer = _fork()
        if answer == 0:
            control.close()
            return ends[0]
        os.close(ends[0])
        control.send(PID.pack(answer))


def _fork() -> int:
    """Fork, leaving the child to the server. Return the child's process id or minus an errno, and 0
    in the child."""
    readable, writable = os.pipe()
    try:
        middle = os.fork()
    except OSError as error:
        os.close(readable)
        os.close(writable)
        return -_errno(error)
    if middle == 0:
        return _fork_and_end(writable, readable)
    os.close(writable)
    os.waitpid(middle, 0)
    answer = os.read(readable, PID.size)
    os.close(readable)
    return PID.unpack(answer)[0] if answer else -errno.EAGAIN


def _fork_and_end(writable: int, readable: int) -> int:
    """Fork, write the child's process id or minus an errno, and end. Return 0 in the child, once it
    is an orphan. It has a process group of its own: a terminal's ctrl-C is for the server, which
    drains first."""
    middle = os.getpid()
    try:
        answer = os.fork()
    except OSError as error:
        answer = -_errno(error)
    if answer > 0:
        os.setpgid(answer, answer)
    if answer != 0:
        os.write(writable, PID.pack(answer))
        os._exit(0)
    os.close(readable)
    os.close(writable)
    while os.getppid() == middle:
        time.sleep(_ORPHAN_POLL_S)
    return 0


def _errno(error: OSError) -> int:
    return error.errno or errno.EAGAIN


def _serve_slice() -> NoReturn:
    """Serve one slice, and end this process. The standard input is its channel; the first message
    is its configuration."""
    from c2cserve.serving.worker.engine_host import WorkerEngine

    end = socket.fromfd(sys.stdin.fileno(), socket.AF_UNIX, socket.SOCK_STREAM)
    channel = Channel(end)
    try:
        message = channel.next()
    except EOFError:  # the server has no use for this worker any more
        _end(0)
    config = msgspec.json.decode(message, type=WorkerConfig)
    setup_logging(f"worker/{config.slice.id}", config.log_level, config.log_format)
    os.sched_setaffinity(0, config.slice.cpus)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the server decides when to end
    if config.slice.kind == "green":
        _serve_part_of_gpu(config, message, end)
    else:
        make = partial(WorkerEngine, config.slice, hybrid_alpha=hybrid_alpha(config.policy))
        _serve(config, channel, make)
    _end(0)


def _serve_part_of_gpu(config: WorkerConfig, message: bytes, end: socket.socket) -> None:
    """Serve a part of a GPU: one process computes for all slices that are parts of the same GPU."""
    from c2cserve.serving.worker.engine_host import WorkerEngine
    from c2cserve.serving.worker.shared_gpu import SharedGpu

    share = config.slice.gpu
    assert share is not None
    shared = SharedGpu(share)

    def serve(data: bytes, channel: socket.socket) -> None:
        member = msgspec.json.decode(data, type=WorkerConfig)
        alpha = hybrid_alpha(member.policy)
        make = partial(WorkerEngine, member.slice, shared=shared, hybrid_alpha=alpha)
        _serve(member, Channel(channel), make)

    name = f"c2cserve.{os.getppid()}.{share.uuid}"
    while True:
        process = open_shared_process(name, serve, lambda: _end(1))
        if process is not None:
            serve(message, end)
            process.close()
            return
        status = join_shared_process(name, message, end)
        if status is not None:
            _end(status)


def _serve(
    config: WorkerConfig, channel: Channel, make: "Callable[[WorkerWorld], WorkerEngine]"
) -> None:
    """Serve one slice on the calling thread until `Quit`. A failure ends the process."""
    from c2cserve.serving.worker.shared_gpu import NoEngine

    policy = slice_policy(config.policy, config.slice, live_steps_in_flight(config.slice))
    page = StatusPage(Path(config.status_path), create=False)
    world = WorkerWorld(channel, page, _policy_stats(policy), _measured(policy))
    try:
        engine = make(world)
    except NoEngine as error:
        log.error("slice %s cannot start: %s", config.slice.id, error)
        _end(_NO_ENGINE)
    world.start(engine, engine.isa, config.epoch)
    collect_rarely()
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
        _end(1)  # a GPU that failed can keep destructors waiting for ever


def _end(status: int) -> NoReturn:
    """End the process without running destructors. The kernel and the driver take memory back
    faster: destructors would unregister the pool page by page."""
    logging.shutdown()
    os._exit(status)


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when the server ends, in whatever way."""
    end_with_parent()
    if os.getppid() != parent:
        sys.exit(1)  # it ended before the line above


def _recorder(config: WorkerConfig) -> Recorder[SliceEvent, SliceAction | BaselineSliceAction]:
    if config.record_path is None:
        return no_record
    stream = f"{config.slice.id}/{config.epoch}"
    most = live_steps_in_flight(config.slice)
    arguments = {"slice": config.slice, "max_in_flight": most, "policy": config.policy}
    return Record(Path(config.record_path), stream, "slice", arguments)


def _policy_stats(policy: SlicePolicy[BaselineSliceAction]) -> Callable[[], SliceStats]:
    def stats() -> SliceStats:
        return SliceStats(
            running=policy.running, waiting=policy.waiting, kv_used_bytes=policy.arena.held_bytes,
            cached_tokens=policy.cached_tokens, preemptions=policy.preemptions,
            kv_drops=policy.kv_drops,
            step_retries=policy.retries, retries_failed=policy.given_up,
            contended_seconds=policy.contended_s, prefix_arena_hits=policy.arena_hits,
            turns=policy.turns,
            **_tier_stats(policy.prefixes),
        )  # fmt: skip

    return stats


def _tier_stats(tier: PrefixTier | None) -> dict[str, int]:
    if tier is None:
        return {}
    return {
        "cached_host_tokens": tier.tokens, "prefix_host_hits": tier.hits,
        "prefix_slower_tokens": tier.slower_tokens,
    }  # fmt: skip


def _measured(policy: SlicePolicy[BaselineSliceAction]) -> Callable[[], Sequence[Measured]]:
    def measured() -> list[Measured]:
        times = ((name, time.settled) for name, time in policy.step_times().items())
        return [Measured(name, *one) for name, one in times if one is not None]

    return measured


if __name__ == "__main__":
    worker()
