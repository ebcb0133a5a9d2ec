"""What a GPU's process tells neighbours whose bytes it relays: whether its steps need the link."""

from typing import Any, cast

from c2cserve.core.machine import GpuShare
from c2cserve.serving.worker.shared_gpu import SharedGpu


class Relays:
    """Stands in for `serving.worker.gpu_relays.GpuRelays`."""

    def __init__(self) -> None:
        self.told: list[bool] = []

    def set_streaming(self, streams: bool) -> None:
        self.told.append(streams)


def test_nothing_is_relayed_while_any_slice_reads_over_the_link() -> None:
    shared, relays = SharedGpu(GpuShare("GPU-1", 132)), Relays()
    shared.note_steps("a", over_link=True)  # there is no neighbour to tell
    shared._relays = cast("Any", relays)
    for slice_id, over_link in (
        ("a", True), ("a", True), ("b", True), ("a", False), ("a", False), ("b", False),
    ):  # fmt: skip
        shared.note_steps(slice_id, over_link=over_link)
    assert relays.told == [True, True, True, False]
