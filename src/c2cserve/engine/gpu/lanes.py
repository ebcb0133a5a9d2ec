"""The lanes of a GPU slice: all that a step uses and that steps of another lane must not.

    resident     stream of high priority    grids leave a few SMs    [ 3 ms | 3 ms | 3 ms | 3 ms ...
    streaming    stream of low priority     as few CTAs read W       [ 300 ms ......................
                                            as saturate the link

Each lane has a stream, work memory, graphs with their memory, staging buffers, counters and plans.
Lanes share the arena, the weight cache and kernels. All belong to the slice's thread.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from c2cserve.core.step import Lane
from c2cserve.core.tensors import Home
from c2cserve.engine.gpu.completion_notifier import CompletionNotifier
from c2cserve.engine.gpu.ops import GpuOps
from c2cserve.engine.gpu.sampling import HostSampler
from c2cserve.engine.gpu.staging import Staging
from c2cserve.engine.gpu.step_timer import EventTimer
from c2cserve.engine.lanes import LaneParts
from c2cserve.kernels.gpu.aot.repository import Repository
from c2cserve.kernels.gpu.attention.flash_library import FlashInfer
from c2cserve.kernels.gpu.gemm.choice.choose import Chooser
from c2cserve.kernels.gpu.gemm.hybrid_linear import HybridGemms, HybridLinear
from c2cserve.kernels.gpu.gemm.linear import Linear
from c2cserve.kernels.gpu.launch_context import LaunchContext
from c2cserve.memory.hbm_cache import HbmCache

_PRIORITIES = {1: (0,), 2: (-1, 0)}
_SPARED_SMS = 4
"""The SMs that the resident lane's grids leave: as many as saturate a host's link over PCIe 5."""
_READERS_SHARE = 4
"""The streaming lane reads a link with at most one in so many of a slice's SMs."""


@dataclass(frozen=True, slots=True)
class GpuLane:
    stream: torch.cuda.Stream
    context: LaunchContext
    linear: Linear
    ops: GpuOps
    to_device: Staging
    flashinfer: FlashInfer
    timer: EventTimer[torch.cuda.Event]

    @classmethod
    def open(
        cls, stream: torch.cuda.Stream, context: LaunchContext, chooser: Chooser,
        cache: HbmCache | None, host_sampler: HostSampler, notify: Callable[[], None] | None,
        kernels: Path | None, hybrid: HybridGemms | None = None,
    ) -> "GpuLane":  # fmt: skip
        """Make a lane whose work goes to `stream`. With `hybrid`, its GEMMs are C2CServe's, and it
        has no decode graphs: the launches in a graph have a fixed alpha and fixed weights.

        `notify` is called when a step of it is over. That is done by a thread of the lane's own:
        notice of a step must not wait for another lane's.
        """
        device = torch.device("cuda", context.device)
        with torch.cuda.stream(stream):
            linear = Linear(context, chooser, cache)
            if hybrid is not None:
                linear = HybridLinear(context, chooser, cache, hybrid)
            on_step_end = None if notify is None else CompletionNotifier(device, notify).watch
            flashinfer = FlashInfer(device, kernels)
            ops = GpuOps(linear, device, host_sampler, on_step_end, flashinfer.flash)
            if hybrid is None:
                ops.capture_decoding(linear.launched, cache, by_places=bool(context.readers))
            timer = EventTimer(_timed_event)
            return cls(stream, context, linear, ops, Staging(device), flashinfer, timer)

    @property
    def parts(self) -> LaneParts:
        """What an executor is given of it."""
        return LaneParts(self.ops, self.to_device, self.current, self._attached, self.timer)

    def current(self) -> AbstractContextManager[object]:
        """Return a context in which the thread's work goes to this lane."""
        return torch.cuda.stream(self.stream)

    def _attached(self) -> None:
        """Wait, in stream order, for what the thread has made of a model on its own stream."""
        self.stream.wait_stream(torch.cuda.current_stream(self.context.device))

    def finish(self) -> None:
        """Wait for the lane's own work on the GPU."""
        self.stream.synchronize()
        self.context.copies.synchronize()

    def renew(self) -> None:
        """Build anew what a failed step may have left half done. Nothing runs meanwhile."""
        with self.current():
            self.context.renew()
            self.ops.renew()
            self.to_device.renew()
            self.flashinfer.flash.renew()


def _timed_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def lane_streams(device: int, lanes: int) -> list[torch.cuda.Stream]:
    """Return the streams of the lanes of a whole GPU, the resident lane's first.

    Where CTAs of both wait for an SM, those of the resident lane go first.
    """
    return [torch.cuda.Stream(device, priority) for priority in _PRIORITIES[lanes]]


def lane_contexts(
    device: int, repository: Repository, chooser: Chooser, lanes: int
) -> list[LaunchContext]:
    """Return the launch contexts of the lanes of a whole GPU, the resident lane's first."""
    if lanes == 1:
        return [LaunchContext(device, repository)]
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    most = max(1, sms // _READERS_SHARE)
    readers: dict[Home, int] = {
        home: min(most, ctas) for home, ctas in chooser.readers().items()
    }  # fmt: skip
    left = max(1, sms - _SPARED_SMS)
    return [
        LaunchContext(device, repository, spared_sms=_SPARED_SMS, picked_for=left),
        LaunchContext(device, repository, readers=readers, picked_for=left),
    ]


class LaneFence:
    """Keeps lanes from writing where another one may still read weights.

    Blocks of KV need no fence: the policy gives them to another request after the last step of the
    one before has ended. Weights are dropped at once, though, while launched steps read them.

    What else writes into the arena, loads and copies of KV, waits for the resident lane alone. So
    it waits for a step of the streaming lane exactly where the resident lane does.
    """

    def __init__(self, streams: Mapping[Lane, torch.cuda.Stream]) -> None:
        self._streams = streams
        self.reading: Callable[[str], Collection[Lane]] = lambda _: ()
        """Returns the lanes in which steps of a model are launched or parked."""
        self.waits = 0
        """How often a lane has waited for another one."""

    def dropped(self, model: str) -> None:
        """Note that weights of `model` are dropped, whose place may be written from now on.

        If steps of a lane read them now, what is launched later in the other lane waits for all
        that was launched in that one.
        """
        for reader in self.reading(model):
            for lane, stream in self._streams.items():
                if lane != reader:
                    stream.wait_event(self._streams[reader].record_event())
                    self.waits += 1


class End(Protocol):
    """An event, or the end of a transfer."""

    def synchronize(self) -> object: ...


@dataclass(frozen=True, slots=True)
class Mark:
    """The end of all that was launched in all lanes, and of loads; `memory.peer_pool.Mark`."""

    events: Sequence[End]

    @classmethod
    def of(
        cls, streams: Sequence[torch.cuda.Stream], loads: Callable[[], Sequence[End]] = tuple
    ) -> "Mark":
        """Record an event after all work of each stream, beside the ends of `loads`. Lanes wait
        for the copy engines of their steps, so the events cover their work too."""
        events = [torch.cuda.Event(blocking=True) for _ in streams]
        for event, stream in zip(events, streams, strict=True):
            event.record(stream)
        return cls([*events, *loads()])

    def synchronize(self) -> None:
        for event in self.events:
            event.synchronize()


def marker(
    streams: Sequence[torch.cuda.Stream], loads: Callable[[], Sequence[End]] = tuple
) -> Callable[[], Mark]:
    return partial(Mark.of, streams, loads)
