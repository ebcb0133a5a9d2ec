"""What is moved: contiguous bytes, and the memories that they are in."""

from array import array
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

HOST = -1
"""The number of host memory, where GPUs have theirs."""

Direction = Literal["in", "out", "peer"]
"""in: host to GPU. out: GPU to host. peer: to a GPU from another one, or from itself."""


class Port(NamedTuple):
    """One direction of the link between a GPU and host memory, or between two GPUs."""

    gpu: int
    direction: Direction
    source: int = HOST
    """The GPU that a `peer` port reads."""

    @property
    def name(self) -> str:
        """A short name, for reports: `in0`, `out3`, `peer1to0`."""
        if self.direction == "peer":
            return f"peer{self.source}to{self.gpu}"
        return f"{self.direction}{self.gpu}"

    @property
    def carrier(self) -> int:
        """The GPU whose streams carry what takes the port: peers' bytes are pushed."""
        return self.source if self.direction == "peer" else self.gpu


class Segment(NamedTuple):
    """Contiguous bytes to move. A GPU is a number of CUDA's, or `HOST`.

    Host memory is pinned and mapped: `source` or `target` is its address for GPUs.
    """

    # A tuple, since there may be thousands in a transfer: `pack` flattens them at once.

    target: int
    source: int
    size: int
    target_gpu: int
    source_gpu: int


Column = NDArray[np.int64]


class SegmentColumns(NamedTuple):
    """Many segments between the same two memories, by column."""

    targets: Column
    sources: Column
    sizes: Column
    target_gpu: int
    source_gpu: int

    def packed(self) -> "array[int]":
        """Return what `pack` returns, without an object for each segment."""
        packed = np.empty((len(self.sizes), len(self)), np.int64)
        for place, column in enumerate(self):
            packed[:, place] = column
        return array("q", packed.tobytes())


def pack(segments: Iterable[Segment]) -> "array[int]":
    """Return segments as the engine reads them: five 64-bit numbers each."""
    return array("q", chain.from_iterable(segments))


def ports_of(
    gpus: Sequence[int],
    reaches: Iterable[tuple[int, int]],
    relayed: Sequence[int] | None = None,
    neighbours: Sequence[int] = (),
) -> tuple[list[Port], list[tuple[int, int]]]:
    """Return all ports, and relays: (place of a link, place of a port that it can relay for).

    `reaches` are (GPU, another one whose memory it has access to), `relayed` the GPUs that others
    relay for (None: all). `neighbours` are GPUs of other processes, which may bring bytes from host
    memory to the first of `gpus`.
    """
    others: dict[int, list[int]] = {gpu: [] for gpu in gpus}
    for gpu, other in reaches:
        others[gpu].append(other)
    ports: list[Port] = []
    for gpu in gpus:
        ports += [Port(gpu, "in"), Port(gpu, "out")]
        ports += [Port(other, "peer", gpu) for other in (gpu, *others[gpu])]
    ports += [Port(gpu, "in") for gpu in neighbours]
    relays = [
        (at, ports.index(Port(other, port.direction)))
        for at, port in enumerate(ports)
        if port.direction != "peer"
        for other in others.get(port.gpu, ())
        if relayed is None or other in relayed
    ]
    first = ports.index(Port(gpus[0], "in"))
    relays += [(ports.index(Port(gpu, "in")), first) for gpu in neighbours]
    return ports, relays
