"""One model's weights in shared memory: a file that every worker maps.

    <dir>/c2cserve.<instance>.<model>.<generation>        weights, read-only to workers
      [ magic | manifest length | manifest (JSON) ][ tensor ][ tensor ] ...
    <dir>/c2cserve.<instance>.<model>.<generation>.ctl    shared read-write
      [ state ][ bytes loaded ][ reason ][ ready flag per group ][ wanted flag per group ]

The manifest names every tensor's offset, shape and dtype. A group's ready flag is set after its
last byte is written. A worker that needs a group sets its wanted flag: the loader takes it next.
"""

import ctypes
import json
import logging
import mmap
import os
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from c2cserve.core.tensors import ITEM_BYTES, Dtype
from c2cserve.memory.checkpoint import TensorSource
from c2cserve.memory.layout import LayoutPlan
from c2cserve.memory.numa import place_file

log = logging.getLogger(__name__)

_MAGIC = b"c2cseg1\0"
_PAGE = 4096
_HUGE = 2 << 20
_LINE = 64
_PADDING_SHARE_MAX = 1 / 32
_REASON_AT = 16
_CONTROL_HEAD = 1024
_MADV_POPULATE_READ = 22  # Linux 5.14
_libc = ctypes.CDLL(None, use_errno=True)  # Python's own call would hold the interpreter's lock


class State(IntEnum):
    LOADING = 0
    READY = 1
    FAILED = 2


@dataclass(frozen=True, slots=True)
class RowSource:
    """A file with the rows of a tensor that is not loaded yet."""

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
    """Return the offsets of all tensors from `base` on, and the segment's size in bytes.

    A layer begins at a multiple of 2 MiB, so that huge pages can hold it. Where padding would take
    more than 1/32 of the weights (small models), it begins at a multiple of 64 bytes, as all
    tensors do.
    """
    places, end = _place(plan, base, _HUGE)
    if end - base - plan.bytes > plan.bytes * _PADDING_SHARE_MAX:
        places, end = _place(plan, base, _LINE)
    return places, -(-end // _PAGE) * _PAGE


def _place(plan: LayoutPlan, base: int, layer_alignment: int) -> tuple[dict[str, TensorPlace], int]:
    offset, places = base, {}
    for tensor in plan.tensors:
        alignment = layer_alignment if tensor.starts_layer else _LINE
        offset = -(-offset // alignment) * alignment
        places[tensor.name] = TensorPlace(offset, tensor.shape, tensor.dtype)
        offset += tensor.bytes
    return places, offset


def segment_bytes(plan: LayoutPlan) -> int:
    """Return what a model takes of the pool: weights, padding, a manifest of the usual size."""
    return place_tensors(plan, _manifest_room(plan))[1]


def _manifest_room(plan: LayoutPlan) -> int:
    """Return the bytes reserved for the header. They are generous, so that placement does not
    depend on the text."""
    entries = len(plan.tensors) + len(plan.groups)
    return -(-(_PAGE + 400 * entries) // _PAGE) * _PAGE


class Segment:
    """A mapped segment. Use `create` (the pool's loader) or `open` (workers)."""

    def __init__(self, path: Path, write_fd: int | None = None) -> None:
        """Own `write_fd`, a descriptor to write weights through."""
        self.path = path
        self._write_fd = write_fd
        self._map = _map_file(path, False)
        self._control = _map_file(control_path(path), True)
        manifest = self._read_manifest()
        self.groups: tuple[str, ...] = tuple(manifest["groups"])
        self.tensors = {
            name: TensorPlace(offset, tuple(shape), dtype)
            for name, (offset, shape, dtype) in manifest["tensors"].items()
        }
        files = [Path(file) for file in manifest["files"]]
        self.row_sources = {
            name: RowSource(files[file], offset, dtype)
            for name, (file, offset, dtype) in manifest["row_sources"].items()
        }
        self.spans: tuple[tuple[int, int], ...] = tuple((a, b) for a, b in manifest["spans"])
        """(start, stop) of the tensors that each group fills, of experts the whole stacks."""
        self._group_index = {name: i for i, name in enumerate(self.groups)}
        self._data: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        flags: NDArray[np.uint8] = np.frombuffer(self._control, np.uint8)
        self._state = flags[:1]
        self._loaded: NDArray[np.uint64] = np.frombuffer(self._control, np.uint64, 1, 8)
        self._reason = flags[_REASON_AT:_CONTROL_HEAD]
        self._fence = _Fence()
        count = len(self.groups)
        self._ready = flags[_CONTROL_HEAD : _CONTROL_HEAD + count]
        self._wanted = flags[_CONTROL_HEAD + count : _CONTROL_HEAD + 2 * count]

    @classmethod
    def create(
        cls, path: Path, plan: LayoutPlan, sources: dict[str, TensorSource],
        nodes: Sequence[int] = (),
    ) -> "Segment":  # fmt: skip
        """Reserve the memory and write the manifest. Pages lie on these NUMA nodes in turn; without
        any, where the kernel takes them. Raises OSError (ENOSPC) when there is no room, and leaves
        nothing behind then."""
        room = _manifest_room(plan)
        places, size = place_tensors(plan, room)
        files: dict[str, int] = {}
        manifest = json.dumps(
            {
                "tensors": {n: [p.offset, p.shape, p.dtype] for n, p in places.items()},
                "groups": [group.name for group in plan.groups],
                "spans": _spans(plan, places),
                "row_sources": _row_sources(plan, sources, files),
                "files": list(files),
            }
        ).encode()
        if len(_MAGIC) + 8 + len(manifest) > room:
            raise ValueError(f"{path}: the manifest of {len(manifest)} bytes is too long")
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            if nodes:
                _on_nodes(fd, size, nodes)
            # Reserve every page now: a full filesystem is an error here, not a signal later.
            os.posix_fallocate(fd, 0, size)
            header = _MAGIC + struct.pack("<Q", len(manifest)) + manifest
            os.pwrite(fd, header, 0)
            _write_zeros(control_path(path), _CONTROL_HEAD + 2 * len(plan.groups))
            return cls(path, fd)
        except OSError:
            os.close(fd)
            remove_segment(path)
            raise

    @classmethod
    def open(cls, path: Path) -> "Segment":
        """Map an existing segment read-only. Raises OSError or ValueError if it is not one."""
        return cls(path)

    def _read_manifest(self) -> dict[str, Any]:
        if self._map[: len(_MAGIC)] != _MAGIC:
            raise ValueError(f"{self.path} is not a c2cserve segment")
        (length,) = struct.unpack_from("<Q", self._map, len(_MAGIC))
        start = len(_MAGIC) + 8
        return json.loads(self._map[start : start + length])

    # ---- tensors --------------------------------------------------------------------------------

    def raw(self, name: str) -> NDArray[np.uint8]:
        """Return a view of a tensor's bytes, not a copy."""
        place = self.tensors[name]
        size = int(np.prod(place.shape)) * ITEM_BYTES[place.dtype]
        return self._data[place.offset : place.offset + size]

    @property
    def data(self) -> NDArray[np.uint8]:
        """The bytes of the whole mapping."""
        return self._data

    def write(self, offset: int, data: memoryview) -> None:
        """Write weights; the loader calls this, on any thread.

        Writing goes through the file and not the mapping. The kernel then neither clears a page
        before it is overwritten nor takes a fault for each, which halves a load's time.
        """
        assert self._write_fd is not None, "opened read-only"
        done = 0
        while done < len(data):
            done += os.pwrite(self._write_fd, data[done:], offset + done)

    @property
    def bytes(self) -> int:
        return len(self._data)

    # ---- readiness ------------------------------------------------------------------------------

    def group(self, name: str) -> int:
        return self._group_index[name]

    def ready(self, group: int) -> bool:
        """Return whether the group's bytes are there. If so, reads after this see them."""
        if not self._ready[group]:
            return False
        self._fence()
        return True

    def want(self, group: int) -> None:
        """Ask the loader to take this group next."""
        self._wanted[group] = 1

    def wanted(self, group: int) -> bool:
        return bool(self._wanted[group])

    def first_wanted(self, among: NDArray[np.bool_]) -> int | None:
        """Return the first group in load order that is wanted and for which `among` holds."""
        hits = np.flatnonzero((self._wanted != 0) & among)
        return int(hits[0]) if len(hits) else None

    def set_ready(self, group: int) -> None:
        """Mark a group as ready. The loader calls this after the group's last byte."""
        self._fence()
        self._ready[group] = 1

    @property
    def state(self) -> State:
        state = State(int(self._state[0]))
        self._fence()
        return state

    @state.setter
    def state(self, value: State) -> None:
        if value is not State.LOADING and self._write_fd is not None:
            os.close(self._write_fd)
            self._write_fd = None
        self._fence()
        self._state[0] = value

    @property
    def reason(self) -> str:
        """The reason for the state FAILED, else an empty text."""
        if self.state is not State.FAILED:
            return ""
        return self._reason.tobytes().rstrip(b"\0").decode(errors="replace")

    def fail(self, reason: str) -> None:
        text = reason.encode(errors="replace")[: len(self._reason)]
        self._reason[: len(text)] = np.frombuffer(text, np.uint8)
        self.state = State.FAILED

    @property
    def loaded_bytes(self) -> int:
        return int(self._loaded[0])

    def add_loaded(self, count: int) -> None:
        """Count loaded bytes. Only the loader calls this, under its lock."""
        self._loaded[0] += np.uint64(count)

    def populate(self, start: int, stop: int) -> None:
        """Map these pages now, so that their first use takes no page fault. The interpreter's lock
        is free meanwhile. Raises OSError."""
        size = ctypes.c_size_t(stop - start)
        address = ctypes.c_void_p(self._data.ctypes.data + start)
        if _libc.madvise(address, size, _MADV_POPULATE_READ) != 0:
            code = ctypes.get_errno()
            raise OSError(code, f"madvise: {os.strerror(code)}", str(self.path))


class _Fence:
    """A full memory barrier: no memory access moves across a call, in either direction.

    x86 keeps stores in order by itself, and loads too; ARM (Grace) does not. Releasing a lock is a
    store-release, and taking one is a load-acquire. A release is never reordered with an acquire
    that follows it (ARM's memory model, "barrier-ordered-before").
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __call__(self) -> None:
        with self._lock:
            pass
        with self._lock:
            pass


def _on_nodes(fd: int, size: int, nodes: Sequence[int]) -> None:
    try:
        place_file(fd, size, nodes)
    except OSError as error:  # weights are the same wherever they lie
        _say_once(f"segments lie on any NUMA node: mbind: {error.strerror}")


@cache
def _say_once(text: str) -> None:
    log.warning("%s", text)


def control_path(path: Path) -> Path:
    return path.with_name(path.name + ".ctl")


def remove_segment(path: Path) -> None:
    """Remove a segment from the directory. Mappings stay valid until they are closed."""
    path.unlink(missing_ok=True)
    control_path(path).unlink(missing_ok=True)


def _spans(plan: LayoutPlan, places: dict[str, TensorPlace]) -> list[tuple[int, int]]:
    spans: list[tuple[int, int]] = []
    for group in plan.groups:
        filled = [places[part.target] for part in group.parts]
        stops = [one.offset + prod(one.shape) * ITEM_BYTES[one.dtype] for one in filled]
        spans.append((min(one.offset for one in filled), max(stops)))
    return spans


def _row_sources(
    plan: LayoutPlan, sources: dict[str, TensorSource], files: dict[str, int]
) -> dict[str, list[object]]:
    """Return where rows can be read in the checkpoint: of tensors that equal one checkpoint tensor.

    Files are given by their numbers in `files`, which grows.
    """
    parts: dict[str, list[str]] = {}
    for group in plan.groups:
        for part in group.parts:
            parts.setdefault(part.target, []).append(part.source)
    rows: dict[str, list[object]] = {}
    for tensor in plan.tensors:
        names = parts[tensor.name]
        if len(names) == 1 and (source := sources[names[0]]).shape == tensor.shape:
            file = files.setdefault(str(source.path.resolve()), len(files))
            rows[tensor.name] = [file, source.offset, source.dtype]
    return rows


def _write_zeros(path: Path, size: int) -> None:
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
