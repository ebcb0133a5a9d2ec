"""One load over several generator processes: messages over pipes, one clock (CLOCK_MONOTONIC)."""

import asyncio
import sys
import time
from asyncio import StreamReader
from asyncio.subprocess import PIPE
from collections.abc import Callable

import msgspec

from c2cserve.bench.loadgen import Load, Outcome, Progress, generate
from c2cserve.terminal.output import CliError

_START_DELAY_S = 1.0
"""Time in which every process comes up before the common start."""
_COUNT_EVERY_S = 0.25


class Count(msgspec.Struct, tag=True):
    ended: int


class Done(msgspec.Struct, tag=True):
    outcome: Outcome


_to_parent: msgspec.msgpack.Decoder[Count | Done] = msgspec.msgpack.Decoder(Count | Done)
_encoder = msgspec.msgpack.Encoder()


async def generate_with(load: Load, processes: int, progress: Progress) -> Outcome:
    """Run a load in this process (1) or split over `processes`; sets the load's start.

    Raises `CliError` when a closed loop has fewer users than there are processes.
    """
    if load.concurrency is not None and load.concurrency < processes:
        raise CliError(f"{load.concurrency} users cannot be split over {processes} processes", 2)
    if processes == 1:
        load.start_s = time.monotonic()
        return await generate(load, progress)
    load.start_s = time.monotonic() + _START_DELAY_S
    counts = [0] * processes

    def count(part: int, ended: int) -> None:
        counts[part] = ended
        progress(sum(counts))

    parts = [_share(load, part, processes) for part in range(processes)]
    outcomes = await asyncio.gather(*(_child(share, i, count) for i, share in enumerate(parts)))
    return Outcome(
        records=[record for outcome in outcomes for record in outcome.records],
        cpu_s=sum(outcome.cpu_s for outcome in outcomes),
        loop_lag_s=[lag for outcome in outcomes for lag in outcome.loop_lag_s],
    )


def _share(load: Load, part: int, processes: int) -> Load:
    concurrency = load.concurrency
    if concurrency is not None:
        concurrency = concurrency // processes + (part < concurrency % processes)
    return msgspec.structs.replace(
        load, requests=load.requests[part::processes], concurrency=concurrency
    )


async def _child(load: Load, part: int, count: Callable[[int, int], None]) -> Outcome:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "c2cserve.bench.loadgen_processes", stdin=PIPE, stdout=PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(_encoder.encode(load))
        process.stdin.close()
        while True:
            message = _to_parent.decode(await _read_frame(process.stdout))
            if isinstance(message, Done):
                return message.outcome
            count(part, message.ended)
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        raise CliError(f"generator process {part} ended before its load did") from error
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _read_frame(stream: StreamReader) -> bytes:
    size = int.from_bytes(await stream.readexactly(8), "little")
    return await stream.readexactly(size)


def _write_frame(message: Count | Done) -> None:
    data = _encoder.encode(message)
    sys.stdout.buffer.write(len(data).to_bytes(8, "little") + data)
    sys.stdout.buffer.flush()


def _run_child() -> None:
    """Run a load from stdin. Write counts and at last the outcome to stdout."""
    load = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Load)
    counted_s = 0.0

    def progress(ended: int) -> None:
        nonlocal counted_s
        if time.monotonic() - counted_s > _COUNT_EVERY_S:
            counted_s = time.monotonic()
            _write_frame(Count(ended))

    _write_frame(Done(asyncio.run(generate(load, progress))))


if __name__ == "__main__":
    _run_child()
