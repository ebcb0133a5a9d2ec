"""Slices of one GPU at work at once: one is timed, its neighbours keep the link busy meanwhile."""

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
"""Replays of the graph that is timed; the first does not count."""
_ATTEMPTS = 3
_AHEAD = 3
"""Replays every neighbour has before it, so that none runs dry while the host looks elsewhere."""


@dataclass(frozen=True, slots=True)
class Slice:
    """Some SMs: what `context` launches inside `use` stays on them."""

    context: LaunchContext
    stream: torch.cuda.Stream
    partition: Partition | None = None
    """Keeps the SMs; None where the context bounds its grids and nothing else."""

    @contextlib.contextmanager
    def use(self) -> Generator[None]:
        with torch.cuda.stream(self.stream):
            yield

    def replay(self, graph: torch.cuda.CUDAGraph) -> torch.cuda.Event:
        """Returns what happens when it is done."""
        with self.use():
            graph.replay()
            done = torch.cuda.Event()
            done.record(self.stream)
            return done


def cut_slices(repository: Repository, sms: int, count: int) -> list[Slice]:
    """`count` slices that do not overlap. They may overlap with those of an earlier call, which
    must not be in use then. Raises `PartitionError`."""
    cut = split_sms(repository.device, sms, count)
    return [
        Slice(LaunchContext(repository.device, repository, one.sms), one.stream, one) for one in cut
    ]


Streaming = tuple[Slice, torch.cuda.CUDAGraph]
"""A neighbour and what it replays."""


def beside_s(own: Slice, graph: torch.cuda.CUDAGraph, crowd: Sequence[Streaming]) -> float:
    """Seconds of the graph while every neighbour replays its own without a break: the median over
    replays. Raises `Refused` if a neighbour ran dry."""
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
    """Enqueue `work` once all neighbours are at theirs, and give them more until its event is done.
    False if one of them had nothing to do meanwhile."""
    queues = [deque(own.replay(graph) for _ in range(_AHEAD)) for own, graph in crowd]
    firsts = [queue[0] for queue in queues]
    while not all(first.query() for first in firsts):
        _feed(crowd, queues)
    done, busy = work(), True
    while not done.query():
        busy = _feed(crowd, queues) and busy
    return busy


def _feed(crowd: Sequence[Streaming], queues: Sequence[deque[torch.cuda.Event]]) -> bool:
    """A slice that is done with a replay gets another. False if a slice had nothing left to do."""
    busy = True
    for (own, graph), queue in zip(crowd, queues, strict=True):
        busy = busy and not queue[-1].query()
        if queue[0].query():
            queue.popleft()
            queue.append(own.replay(graph))
    return busy
