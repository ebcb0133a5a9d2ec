"""Notification of a slice's thread, which waits for messages, that work on the GPU is over.

A thread sleeps in the driver until an event is over, and then notifies. The alternatives are worse:

- Polling the event notices it late or keeps a core busy, for each slice of a shared process.
- A callback from the driver needs the interpreter's lock on the driver's own thread.
"""

import threading
from collections.abc import Callable
from queue import SimpleQueue

import torch


class CompletionNotifier:
    """Calls `notify` once after each event, in order. Its thread ends with the process."""

    def __init__(self, device: torch.device, notify: Callable[[], None]) -> None:
        """`notify`: callable from any thread."""
        self._device = device
        self._notify = notify
        self._events: SimpleQueue[torch.cuda.Event] = SimpleQueue()
        threading.Thread(target=self._watch, name="completion-notifier", daemon=True).start()

    def watch(self, event: torch.cuda.Event) -> None:
        """Notify when `event` is over. It is recorded, and made for blocking waits, not spinning
        ones."""
        self._events.put(event)

    def _watch(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        while True:
            event = self._events.get()
            try:
                event.synchronize()
            except RuntimeError:
                # A CUDA error sticks: the slice's thread meets it too, and handles it.
                self._notify()
                return
            self._notify()
