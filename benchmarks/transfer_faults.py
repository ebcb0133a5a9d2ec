"""Faults of a GPU's relays, made by hand, for the benchmark and the tests of transfers."""

import contextlib
from collections.abc import Callable, Generator

import torch

from c2cserve.kernels.gpu.driver import wait_at_least
from c2cserve.transfer.gpu.contexts import use
from c2cserve.transfer.gpu.flags import Flags
from c2cserve.transfer.gpu.links import GpuLinks


@contextlib.contextmanager
def stalling(links: GpuLinks, gpu: int) -> Generator[Callable[[], None]]:
    """Yield a function that lets the streams of a GPU's relays stand still after what they have.
    At the end they go on, and what was launched meanwhile runs."""
    streams = [
        int(slot.stream) for (port, _), slot in links._relay_slots.items() if port.gpu == gpu
    ]
    with use(gpu):
        flag = Flags(1)

    def stall() -> None:
        with use(gpu):
            for stream in streams:
                wait_at_least(stream, flag.address(0), 1)

    try:
        yield stall
    finally:
        flag[0] = 1
        torch.cuda.synchronize(gpu)
        flag.close()
