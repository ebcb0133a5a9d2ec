"""Slices of one GPU that compute at once: one is timed while its neighbours keep the link busy."""

import contextlib
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import torch

from c2cserve.devices.partitions import Partition, split_sms
from c2cserve.kernels.gpu.aot.repository import Repository
from c2cserve.kernels.gpu.launch_context import LaunchContext
from c2cserve.profiling.survey import Refused

_REPLAYS = 4
"""Replays of the graph that is timed. The first does not count."""
_ATTEMPTS = 3
_QUEUED = 3
"""Replays in every neighbour's queue, so that none becomes idle while the host feeds another."""


@dataclass(frozen=True, slots=True)
class Slice:
    """Some SMs of a GPU. What `context` launches inside `use` stays on them."""

    context: LaunchContext
    stream: torch.cuda.Stream
    partition: Partition | None = None
    """The partition of SMs; None if only the context bounds its grids."""

    @contextlib.contextmanager
    def use(self) -> Generator[None]:
        with torch.cuda.stream(self.stream):
            yield

    def replay(self, graph: torch.cuda.CUDAGraph) -> torch.cuda.Event:
        """Enqueue a replay. Return the event at its end."""
        with self.use():
            graph.replay()
            done = torch.cuda.Event()
            done.record(self.stream)
            return done


def cut_slices(repository: Repository, sms: int, count: int) -> list[Slice]:
    """Return `count` slices that do not overlap. Raises `PartitionError`.

    They may overlap with slices of an earlier call, which must not be in use any more.
    """
    cut = split_sms(repository.device, sms, count)
    return [
        Slice(LaunchContext(repository.device, repository, one.sms), one.stream, one) for one in cut
    ]


Streaming = tuple[Slice, torch.cuda.CUDAGraph]
"""A neighbour and the graph that it replays."""


def beside_s(own: Slice, graph: torch.cuda.CUDAGraph, crowd: Sequence[Streaming]) -> float:
    """Return the seconds of the graph while every neighbour replays its own without a break.

    It is the median over replays. Raises `Refused` if a neighbour became idle.
    """
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(_REPLAYS + 1)]

    def timed() -> torch.cuda.Event:
        with own.use():
            for mark in marks[:-1]:
                mark.record()
                graph.replay()
            marks[-1].record()
        return marks[-1]

    for _ in range(_ATTEMPTS):
        torch.cuda.synchronize()
        if while_busy(crowd, timed):
            return median(begin.elapsed_time(end) / 1e3 for begin, end in pairwise(marks[1:]))
    raise Refused("its neighbours ended before it did: this host is too slow to keep them at work")


def while_busy(crowd: Sequence[Streaming], work: Callable[[], torch.cuda.Event]) -> bool:
    """Enqueue `work` once all neighbours have begun, and keep them busy until its event is done.
    Return False if one of them became idle meanwhile."""
    queues = [deque(own.replay(graph) for _ in range(_QUEUED)) for own, graph in crowd]
    firsts = [queue[0] for queue in queues]
    while not all(first.query() for first in firsts):
        _feed(crowd, queues)
    done, busy = work(), True
    while not done.query():
        busy = _feed(crowd, queues) and busy
    return busy


def _feed(crowd: Sequence[Streaming], queues: Sequence[deque[torch.cuda.Event]]) -> bool:
    """Enqueue another replay for each slice that finished one. Return False if one was idle."""
    busy = True
    for (own, graph), queue in zip(crowd, queues, strict=True):
        busy = busy and not queue[-1].query()
        if queue[0].query():
            queue.popleft()
            queue.append(own.replay(graph))
    return busy
