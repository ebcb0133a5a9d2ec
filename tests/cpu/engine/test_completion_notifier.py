"""The thread that waits for a GPU's events on behalf of one that waits for messages."""

import threading
from typing import Any, cast

import pytest
import torch

from c2cserve.engine.gpu.completion_notifier import CompletionNotifier


class Event:
    def __init__(self, *, lost: bool = False) -> None:
        self.over = threading.Event()
        self._lost = lost

    def synchronize(self) -> None:
        assert self.over.wait(10)
        if self._lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.mark.parametrize("lost", [False, True])
def test_it_notifies_after_each_event_in_order_and_when_the_gpu_fails(lost: bool) -> None:
    notified = threading.Semaphore(0)
    notifier = CompletionNotifier(torch.device("cpu"), notified.release)
    first, second = Event(), Event(lost=lost)
    for event in (first, second):
        notifier.watch(cast("Any", event))
    second.over.set()
    assert not notified.acquire(timeout=0.05), "the first is not over"
    first.over.set()
    assert notified.acquire(timeout=10)
    assert notified.acquire(timeout=10)
    assert not notified.acquire(timeout=0.05)
