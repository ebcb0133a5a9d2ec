"""A mapped segment as torch tensors, with readiness, and embedding rows before their table."""

import ctypes
import os
from collections.abc import Iterable

import torch
from torch import Tensor

from c2cserve.core.tensors import ITEM_BYTES
from c2cserve.memory.segment import Segment, State

_TORCH = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class WeightsLost(RuntimeError):
    """The load that this model was waiting for has failed."""


class Weights:
    """Views, never copies; the tensors must not be written to."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._complete = segment.state is State.READY
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
        """Everything is loaded (known from the last look)."""
        return self._complete

    def has(self, name: str) -> bool:
        return name in self._segment.tensors

    def group(self, name: str) -> int:
        return self._segment.group(name)

    def missing(self, groups: Iterable[int]) -> list[int]:
        """Those of the groups that are not loaded yet. Raises WeightsLost if they never will be."""
        if self._complete:
            return []
        missing = [group for group in groups if not self._segment.ready(group)]
        if missing and self._segment.state is State.FAILED:
            raise WeightsLost(f"loading {self._segment.path.name} failed")
        if not missing:
            self._complete = self._segment.state is State.READY
        return missing

    def want(self, groups: Iterable[int]) -> None:
        for group in groups:
            self._segment.want(group)

    def rows(self, name: str, ids: Tensor) -> Tensor:
        """Rows of a table that is not loaded yet, read from the checkpoint, as the table will have
        them."""
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
