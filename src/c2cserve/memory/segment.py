"""One model's weights in shared memory: a file that every worker maps.

    <dir>/c2cserve.<instance>.<model>.<generation>        weights, read-only to workers
      [ magic | manifest length | manifest (JSON) ][ tensor ][ tensor ] ...
    <dir>/c2cserve.<instance>.<model>.<generation>.ctl    shared read-write
      [ state ][ bytes loaded ][ ready flag per group ][ wanted flag per group ]

The manifest names every tensor's offset, shape and dtype. A group's ready flag is set after its
last byte is written; a worker that needs a group sets its wanted flag: the loader takes it next.
"""

import ctypes
import json
import mmap
import os
import struct
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from c2cserve.memory.checkpoint import TensorSource
from c2cserve.memory.layout import ITEM_BYTES, Dtype, LayoutPlan

_MAGIC = b"c2cseg1\0"
_PAGE = 4096
_HUGE = 2 << 20
_LINE = 64
_SMALL_MODEL = 64 << 20
"""Below this a layer is aligned to a page, not to 2 MiB: padding would outweigh the weights of a
catalogue of small models, and their layers do not fill a huge page anyway."""
_CONTROL_HEAD = 16
_MADV_POPULATE_READ = 22  # Linux 5.14; not in Python's mmap module


class State(IntEnum):
    LOADING = 0
    READY = 1
    FAILED = 2


@dataclass(frozen=True, slots=True)
class RowSource:
    """Where rows of a tensor can be read while it is not loaded yet."""

    path: Path
    offset: int
    dtype: Dtype


@dataclass(frozen=True, slots=True)
class TensorPlace:
    offset: int
    """Bytes from the start of the segment."""
    shape: tuple[int, ...]
    dtype: Dtype


def place_tensors(plan: LayoutPlan, base: int) -> tuple[dict[str, TensorPlace], int]:
    """Offsets of all tensors from `base` on, and the segment's size in bytes."""
    layer_alignment = _HUGE if plan.bytes >= _SMALL_MODEL else _LINE
    offset, places = base, {}
    for tensor in plan.tensors:
        alignment = layer_alignment if tensor.starts_layer else _LINE
        offset = -(-offset // alignment) * alignment
        places[tensor.name] = TensorPlace(offset, tensor.shape, tensor.dtype)
        offset += tensor.bytes
    return places, -(-offset // _PAGE) * _PAGE


def segment_bytes(plan: LayoutPlan) -> int:
    """What a model takes of the pool: weights, padding, and a manifest of the usual size."""
    return place_tensors(plan, _manifest_room(plan))[1]


def _manifest_room(plan: LayoutPlan) -> int:
    """Bytes kept for the header: generous, so that placement does not depend on the text."""
    entries = len(plan.tensors) + len(plan.groups)
    return -(-(_PAGE + 400 * entries) // _PAGE) * _PAGE


class Segment:
    """A mapped segment. Use `create` (the pool's loader) or `open` (workers)."""

    def __init__(self, path: Path, *, writable: bool) -> None:
        self.path = path
        self._map = _map_file(path, writable)
        self._control = _map_file(control_path(path), True)
        manifest = self._read_manifest()
        self.groups: tuple[str, ...] = tuple(manifest["groups"])
        self.tensors = {
            name: TensorPlace(offset, tuple(shape), dtype)
            for name, (offset, shape, dtype) in manifest["tensors"].items()
        }
        self.row_sources = {
            name: RowSource(Path(file), offset, dtype)
            for name, (file, offset, dtype) in manifest["row_sources"].items()
        }
        self._group_index = {name: i for i, name in enumerate(self.groups)}
        self._data: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        flags: NDArray[np.uint8] = np.frombuffer(self._control, np.uint8)
        self._state = flags[:1]
        self._loaded: NDArray[np.uint64] = np.frombuffer(self._control, np.uint64, 1, 8)
        count = len(self.groups)
        self._ready = flags[_CONTROL_HEAD : _CONTROL_HEAD + count]
        self._wanted = flags[_CONTROL_HEAD + count : _CONTROL_HEAD + 2 * count]

    @classmethod
    def create(cls, path: Path, plan: LayoutPlan, sources: dict[str, TensorSource]) -> "Segment":
        """Reserve the memory and write the manifest. Raises OSError (ENOSPC) when there is no room,
        leaving nothing behind."""
        room = _manifest_room(plan)
        places, size = place_tensors(plan, room)
        manifest = json.dumps(
            {
                "tensors": {n: [p.offset, p.shape, p.dtype] for n, p in places.items()},
                "groups": [group.name for group in plan.groups],
                "row_sources": _row_sources(plan, sources),
            }
        ).encode()
        if len(_MAGIC) + 8 + len(manifest) > room:
            raise ValueError(f"{path}: the manifest of {len(manifest)} bytes is too long")
        try:
            _reserve(path, size)
            _reserve(control_path(path), _CONTROL_HEAD + 2 * len(plan.groups))
            with path.open("r+b") as file:
                file.write(_MAGIC + struct.pack("<Q", len(manifest)) + manifest)
            return cls(path, writable=True)
        except OSError:
            remove_segment(path)
            raise

    @classmethod
    def open(cls, path: Path) -> "Segment":
        """Map an existing segment read-only. Raises OSError or ValueError if it is not one."""
        return cls(path, writable=False)

    def _read_manifest(self) -> dict[str, Any]:
        if self._map[: len(_MAGIC)] != _MAGIC:
            raise ValueError(f"{self.path} is not a c2cserve segment")
        (length,) = struct.unpack_from("<Q", self._map, len(_MAGIC))
        start = len(_MAGIC) + 8
        return json.loads(self._map[start : start + length])

    # ---- tensors --------------------------------------------------------------------------------

    def raw(self, name: str) -> NDArray[np.uint8]:
        """A tensor's bytes: a view, not a copy."""
        place = self.tensors[name]
        size = int(np.prod(place.shape)) * ITEM_BYTES[place.dtype]
        return self._data[place.offset : place.offset + size]

    def window(self, offset: int, count: int) -> NDArray[np.uint8]:
        """`count` bytes from `offset` of the whole segment."""
        return self._data[offset : offset + count]

    @property
    def bytes(self) -> int:
        return len(self._data)

    # ---- readiness ------------------------------------------------------------------------------

    def group(self, name: str) -> int:
        return self._group_index[name]

    def ready(self, group: int) -> bool:
        return bool(self._ready[group])

    def want(self, group: int) -> None:
        """Ask the loader to take this group next."""
        self._wanted[group] = 1

    def wanted(self, group: int) -> bool:
        return bool(self._wanted[group])

    def set_ready(self, group: int) -> None:
        self._ready[group] = 1

    @property
    def state(self) -> State:
        return State(int(self._state[0]))

    @state.setter
    def state(self, value: State) -> None:
        self._state[0] = value

    @property
    def loaded_bytes(self) -> int:
        return int(self._loaded[0])

    def add_loaded(self, count: int) -> None:
        """By the loader alone, under its lock."""
        self._loaded[0] += np.uint64(count)

    def populate(self) -> None:
        """Map all pages now, so that the first use of a weight takes no page fault."""
        self._map.madvise(_MADV_POPULATE_READ)


def control_path(path: Path) -> Path:
    return path.with_name(path.name + ".ctl")


def remove_segment(path: Path) -> None:
    """Take it out of the directory; mappings stay valid until they go."""
    path.unlink(missing_ok=True)
    control_path(path).unlink(missing_ok=True)


def _row_sources(plan: LayoutPlan, sources: dict[str, TensorSource]) -> dict[str, list[object]]:
    """Tensors that are one checkpoint tensor as it is: their rows can be read from the file."""
    parts: dict[str, list[str]] = {}
    for group in plan.groups:
        for part in group.parts:
            parts.setdefault(part.target, []).append(part.source)
    return {
        tensor.name: [str(source.path.resolve()), source.offset, source.dtype]
        for tensor in plan.tensors
        if len(parts[tensor.name]) == 1
        and (source := sources[parts[tensor.name][0]]).shape == tensor.shape
    }


def _reserve(path: Path, size: int) -> None:
    """Allocate every page now: a full filesystem is an error here, not a signal at first touch."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, size)
    finally:
        os.close(fd)


def _map_file(path: Path, writable: bool) -> mmap.mmap:
    fd = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
    try:
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        return mmap.mmap(fd, 0, access=access)
    finally:
        os.close(fd)


def address(view: NDArray[np.uint8]) -> int:
    """Where a view's first byte lies in this process."""
    return int(ctypes.c_void_p(view.ctypes.data).value or 0)
