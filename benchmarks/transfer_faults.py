"""Faults of a GPU's relays, made by hand, for the benchmark and the tests of transfers."""

import contextlib
from collections.abc import Generator

import torch

from c2cserve.kernels.gpu.driver import wait_at_least
from c2cserve.transfer.gpu.contexts import use
from c2cserve.transfer.gpu.flags import Flags
from c2cserve.transfer.gpu.links import GpuLinks


@contextlib.contextmanager
def stalled_relays(links: GpuLinks, gpu: int) -> Generator[None]:
    """Let the streams of a GPU's relays stand still, after what they have, until the end. What was
    launched meanwhile runs then."""
    with use(gpu):
        flag = Flags(1)
        for (port, _), slot in links._relay_slots.items():
            if port.gpu == gpu:
                wait_at_least(int(slot.stream), flag.address(0), 1)
    try:
        yield
    finally:
        flag[0] = 1
        torch.cuda.synchronize(gpu)
        flag.close()
