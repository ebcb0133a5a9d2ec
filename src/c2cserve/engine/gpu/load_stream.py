"""The stream on which a slice's copy engines load whole models (`engine.gpu.weight_loads`)."""

from collections.abc import Callable

import torch

from c2cserve.engine.gpu.completion_notifier import CompletionNotifier
from c2cserve.kernels.gpu.driver import copy_async, new_stream


class CopyEngineStream:
    """An `engine.gpu.weight_loads.LoadStream`."""

    def __init__(
        self, device: torch.device, computing: torch.cuda.Stream, notify: Callable[[], None]
    ) -> None:
        """`computing` is the slice's stream, which waits for all else that the slice launches.

        `notify` is called from another thread at the end of copies. Steps have a notifier of their
        own: notice of a step must not wait for a copy.
        """
        assert device.index is not None
        self._computing = computing
        self._stream = new_stream(device.index)
        self._notifier = CompletionNotifier(device, notify)

    def mark_steps(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(self._computing)
        return event

    def wait_for_steps(self, event: torch.cuda.Event) -> None:
        self._stream.wait_event(event)

    def copy(self, target: int, source: int, size: int) -> None:
        copy_async(target, source, size, self._stream.cuda_stream)

    def record(self) -> torch.cuda.Event:
        event = torch.cuda.Event(blocking=True)
        event.record(self._stream)
        self._notifier.watch(event)
        return event

    def hold_steps(self, event: torch.cuda.Event) -> None:
        self._computing.wait_event(event)

    def mark(self) -> torch.cuda.Event:
        """Return an event after all copies so far, of which nothing is notified."""
        event = torch.cuda.Event(blocking=True)
        event.record(self._stream)
        return event

    def synchronize(self) -> None:
        self._stream.synchronize()
