"""The stream on which a slice's copy engines load whole models (`engine.gpu.weight_loads`)."""

from collections.abc import Callable, Sequence

import torch

from c2cserve.engine.gpu.completion_notifier import CompletionNotifier
from c2cserve.kernels.gpu.driver import copy_async, new_stream


class CopyEngineStream:
    """An `engine.gpu.weight_loads.LoadStream`."""

    def __init__(
        self, device: torch.device, lanes: Sequence[torch.cuda.Stream], notify: Callable[[], None]
    ) -> None:
        """`lanes` are the streams of the slice's lanes, the resident lane's first.

        `notify` is called from another thread at the end of copies. Steps have a notifier of their
        own: notice of a step must not wait for a copy.
        """
        assert device.index is not None
        self._lanes = lanes
        self.stream = new_stream(device.index)
        self._notifier = CompletionNotifier(device, notify)

    def mark_steps(self) -> torch.cuda.Event:
        # Of another lane's steps, only those count that read weights which were dropped. The
        # resident lane waits for these (`engine.gpu.lanes.LaneFence`).
        event = torch.cuda.Event()
        event.record(self._lanes[0])
        return event

    def wait_for_steps(self, event: torch.cuda.Event) -> None:
        self.stream.wait_event(event)

    def copy(self, target: int, source: int, size: int) -> None:
        copy_async(target, source, size, self.stream.cuda_stream)

    def record(self) -> torch.cuda.Event:
        event = torch.cuda.Event(blocking=True)
        event.record(self.stream)
        self._notifier.watch(event)
        return event

    def hold_steps(self, event: torch.cuda.Event) -> None:
        for lane in self._lanes:
            lane.wait_event(event)

    def synchronize(self) -> None:
        self.stream.synchronize()
