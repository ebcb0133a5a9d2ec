"""Several slices of one GPU at work at once, each on SMs of its own, all over one link."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from gemm_run import Bench
from gemm_summary import seconds_at_once

from c2cserve.devices.partitions import Partition, split_sms
from c2cserve.kernels.gpu.gemm.measure import Step, capture
from c2cserve.kernels.gpu.launch_context import LaunchContext

_GATE_CYCLES = 60_000_000
"""About 30 ms: longer than it takes to enqueue all slices' graphs."""
_WARM = 8
"""Steps: all linears of a layer, in both of a context's slots."""


@dataclass(frozen=True, slots=True)
class Slice:
    """A context whose launches stay on the SMs of a stream."""

    context: LaunchContext
    stream: torch.cuda.Stream
    partition: Partition | None
    """Keeps the SMs; None for the whole GPU."""

    @contextmanager
    def use(self) -> Iterator[None]:
        """Launches go to this slice."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            yield
        self.stream.synchronize()


def partitions(bench: Bench, sms: int, count: int) -> list[Slice]:
    """`count` slices of `sms` SMs that do not overlap; one slice of all SMs is the GPU itself.
    Those of an earlier call must not be in use: they may be the same SMs."""
    if count == 1 and sms >= bench.sms:
        return [Slice(bench.context, torch.cuda.Stream(), None)]
    return [
        Slice(LaunchContext(0, bench.repository, one.sms), one.stream, one)
        for one in split_sms(0, sms, count)
    ]


def graph_of(own: Slice, steps: Sequence[Step]) -> torch.cuda.CUDAGraph:
    """A graph that runs on the slice's SMs wherever it is launched."""
    with own.use():
        return capture(own.context, own.stream, steps, warm=_WARM)


def together_s(
    slices: Sequence[Slice], graphs: Sequence[torch.cuda.CUDAGraph], *, at_least_s: float = 0.1
) -> list[float]:
    """Seconds of each slice's graph while all slices replay theirs, over and over."""
    once_s = _replayed_s(slices, graphs, [1] * len(slices))
    if max(once_s) > 2 * at_least_s:
        return once_s
    # Slices whose graphs are short replay more of them, so that all are busy all the time.
    repeats = [max(2, round(at_least_s / seconds)) for seconds in once_s]
    return _replayed_s(slices, graphs, repeats)


def _replayed_s(
    slices: Sequence[Slice], graphs: Sequence[torch.cuda.CUDAGraph], repeats: Sequence[int]
) -> list[float]:
    torch.cuda.synchronize()
    # Nobody starts before everything is enqueued: who is alone for a while has the link to itself.
    gate = torch.cuda.Stream()
    with torch.cuda.stream(gate):
        torch.cuda._sleep(_GATE_CYCLES)
    events: list[list[torch.cuda.Event]] = []
    for own in slices:
        own.stream.wait_stream(gate)
        events.append([_mark(own.stream)])
    for turn in range(max(repeats)):
        for own, graph, count, marks in zip(slices, graphs, repeats, events, strict=True):
            if turn < count:
                with torch.cuda.stream(own.stream):
                    graph.replay()
                marks.append(_mark(own.stream))
    torch.cuda.synchronize()
    return seconds_at_once(
        [[begin.elapsed_time(end) / 1e3 for end in ends] for begin, *ends in events]
    )


def _mark(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event
