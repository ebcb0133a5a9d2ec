"""Telling a slice's thread, which waits for messages, that a step on the GPU is over.

A thread sleeps in the driver until the step's event, then rings. Asking for the event from time to
time instead would find it late or keep a core busy, seven times over where slices share a process;
a callback from the driver would need the interpreter's lock on the driver's own thread.
"""

import threading
from collections.abc import Callable
from queue import SimpleQueue

import torch


class Bell:
    """Rings once after each event, in order. Its thread ends with the process."""

    def __init__(self, device: torch.device, ring: Callable[[], None]) -> None:
        """`ring`: callable from any thread."""
        self._device = device
        self._ring = ring
        self._events: SimpleQueue[torch.cuda.Event] = SimpleQueue()
        threading.Thread(target=self._watch, name="bell", daemon=True).start()

    def after(self, event: torch.cuda.Event) -> None:
        """`event` was recorded and is waited for by blocking, not by spinning."""
        self._events.put(event)

    def _watch(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        while True:
            event = self._events.get()
            try:
                event.synchronize()
            except RuntimeError:
                # A CUDA error sticks: the slice's thread meets it too, and knows what to do.
                self._ring()
                return
            self._ring()
