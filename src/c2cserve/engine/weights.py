"""A mapped segment as torch tensors, with readiness, and embedding rows before their table."""

import ctypes
import os
from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from c2cserve.core.tensors import ITEM_BYTES
from c2cserve.memory.segment import Segment, State

_TORCH = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class WeightsLost(RuntimeError):
    """The load that this model was waiting for has failed."""


class Readable(Protocol):
    """The part of a segment that a device can read, of what is loaded (`engine.gpu.segments`)."""

    @property
    def complete(self) -> bool:
        """Whether that is all of it."""
        ...

    def readable(self, group: int) -> bool:
        """Raises `WeightsLost` if the device cannot read all of the segment."""
        ...

    def want(self) -> None:
        """Note that a step or a load waits for a group."""
        ...


class Weights:
    """Views of a segment, never copies. The tensors must not be written to.

    A group that is *missing* is not loaded yet, or the device cannot read it yet.
    """

    def __init__(self, segment: Segment, readable: Readable | None = None) -> None:
        """`readable`: None where the device reads whatever is mapped."""
        self._segment = segment
        self._readable = readable
        self._complete = self._is_complete()
        self._keep: list[object] = []

    def tensor(self, name: str) -> Tensor:
        place = self._segment.tensors[name]
        raw = self._segment.raw(name)
        # torch has no read-only tensors and warns about this view; a write would fault at once.
        memory = (ctypes.c_uint8 * len(raw)).from_address(raw.ctypes.data)
        view = torch.frombuffer(memory, dtype=_TORCH[place.dtype]).view(place.shape)
        self._keep.append(raw)
        return view

    @property
    def complete(self) -> bool:
        """Whether nothing is missing, as far as the last call of `missing` showed."""
        return self._complete

    def _is_complete(self) -> bool:
        loaded = self._segment.state is State.READY
        return loaded and (self._readable is None or self._readable.complete)

    def has(self, name: str) -> bool:
        return name in self._segment.tensors

    def group(self, name: str) -> int:
        return self._segment.group(name)

    def missing(self, groups: Iterable[int]) -> list[int]:
        """Return the groups that are missing. Raises WeightsLost if they always will be."""
        if self._complete:
            return []
        missing = [group for group in groups if not self._there(group)]
        if missing and self._segment.state is State.FAILED:
            raise WeightsLost(f"loading {self._segment.path.name} failed")
        if not missing:
            self._complete = self._is_complete()
        return missing

    def _there(self, group: int) -> bool:
        readable = self._readable
        return self._segment.ready(group) and (readable is None or readable.readable(group))

    def want(self, groups: Iterable[int]) -> None:
        for group in groups:
            self._segment.want(group)
            if self._readable is not None:
                self._readable.want()

    def rows(self, name: str, group: int, ids: Tensor) -> Tensor:
        """Return rows of a table whose group is missing, in the table's dtype. They are the
        segment's if the group is loaded, else they are read from the checkpoint."""
        if self._segment.ready(group):
            return self.tensor(name)[ids.long()]
        source = self._segment.row_sources[name]
        columns = self._segment.tensors[name].shape[1]
        row_bytes = columns * ITEM_BYTES[source.dtype]
        fd = os.open(source.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            data = b"".join(
                os.pread(fd, row_bytes, source.offset + row * row_bytes) for row in ids.tolist()
            )
        finally:
            os.close(fd)
        table = torch.frombuffer(bytearray(data), dtype=_TORCH[source.dtype])
        target = _TORCH[self._segment.tensors[name].dtype]
        return table.view(len(ids), columns).to(target)
