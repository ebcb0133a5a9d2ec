"""Faults of a GPU's relays, made by hand, for the benchmark and the tests of transfers."""

import contextlib
from collections.abc import Callable, Generator

import torch

from c2cserve.kernels.gpu.driver import wait_at_least
from c2cserve.transfer.engine import TransferEngine
from c2cserve.transfer.gpus import use
from c2cserve.transfer.library import library
from c2cserve.transfer.moves import Port

_LANES = 8
"""No link has as many streams for relays."""


def relay_streams(engine: TransferEngine, gpu: int) -> list[int]:
    """Return the streams in which a GPU relays."""
    native = engine._native()
    found = [
        library().c2c_transfers_relay_stream(native, link, lane)
        for link, port in enumerate(engine._ports)
        if port in (Port(gpu, "in"), Port(gpu, "out"))
        for lane in range(_LANES)
    ]
    return [stream for stream in found if stream is not None]


@contextlib.contextmanager
def stalling(engine: TransferEngine, gpu: int) -> Generator[Callable[[], None]]:
    """Yield a function that lets the streams of a GPU's relays stand still after what they have.
    At the end they go on, and what was launched meanwhile runs."""
    streams = relay_streams(engine, gpu)
    flag = torch.zeros(1, dtype=torch.int32, pin_memory=True)

    def stall() -> None:
        with use(gpu):
            for stream in streams:
                wait_at_least(stream, flag.data_ptr(), 1)

    try:
        yield stall
    finally:
        flag.fill_(1)
        torch.cuda.synchronize(gpu)
