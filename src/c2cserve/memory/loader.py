"""Filling a segment from a checkpoint: parallel reads straight into shared memory, on demand first.

A group that a worker wants is taken before the next one in load order, chunk by chunk. So a step
waits for the weights it needs, not for those that come first in the file.
"""

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from c2cserve.core.tensors import ITEM_BYTES, Dtype
from c2cserve.files.patience import open_patiently
from c2cserve.kernels.native import convert
from c2cserve.memory.checkpoint import CheckpointError, TensorSource, open_for_reading
from c2cserve.memory.layout import LayoutPlan, Part
from c2cserve.memory.segment import Segment, State

_CHUNK_BYTES = 8 << 20

Read = Callable[[int, memoryview, int], int]
"""(descriptor, buffer, file offset) -> bytes read; `os.preadv` but in tests."""


def pread(fd: int, buffer: memoryview, offset: int) -> int:
    return os.preadv(fd, [buffer], offset)


class LoadCancelled(Exception):
    """The load was given up; the segment is not usable."""


@dataclass(frozen=True, slots=True)
class _Chunk:
    group: int
    path: Path
    file_offset: int
    source_dtype: Dtype
    target_offset: int
    """Bytes from the segment's start."""
    target_dtype: Dtype
    elements: int


class Loader:
    """One model's load. `run` blocks until every byte is there. Groups that are ready already are
    left as they are."""

    def __init__(
        self,
        segment: Segment,
        plan: LayoutPlan,
        sources: dict[str, TensorSource],
        *,
        threads: int = 4,
        read: Read = pread,
        on_group: Callable[[int], None] = lambda _: None,
    ) -> None:
        """`on_group` is called on a loader thread when a group became ready."""
        self._segment = segment
        self._threads = threads
        self._read = read
        self._on_group = on_group
        self._lock = threading.Lock()
        self._cancelled = threading.Event()
        self._left: list[list[_Chunk]] = [[] for _ in plan.groups]
        self._due = [not segment.ready(index) for index in range(len(plan.groups))]
        for index, group in enumerate(plan.groups):
            for part in group.parts if self._due[index] else ():
                source = sources[part.source]
                self._left[index] += _chunks(index, segment, part, source)
            self._left[index].reverse()  # taken from the end
        self._unread = np.array([bool(chunks) for chunks in self._left])
        self._first = 0
        """No group before this one has chunks left."""
        self._pending = [len(chunks) for chunks in self._left]
        self._files: dict[Path, int] = {}

    def cancel(self) -> None:
        self._cancelled.set()

    def run(self) -> None:
        """Load everything. Raises CheckpointError (a read failed or a file changed) or
        LoadCancelled; the segment's state is FAILED then."""
        paths = {chunk.path for chunks in self._left for chunk in chunks}
        try:
            for path in paths:
                opening = partial(open_for_reading, path)
                self._files[path] = open_patiently(opening, self._cancelled.is_set)
            for group, pending in enumerate(self._pending):
                if pending == 0 and self._due[group]:
                    self._finish(group)
            self._run_threads()
            self._segment.state = State.READY
        except OSError as error:
            failure = CheckpointError(f"reading the checkpoint failed: {error}")
            self._segment.fail(str(failure))
            raise failure from error
        except BaseException as error:
            self._segment.fail(str(error) or "cancelled")
            raise
        finally:
            for fd in self._files.values():
                os.close(fd)

    def _run_threads(self) -> None:
        """Load on all threads. Raises the error that came first: it stops the other threads, and
        what they raise then is of no interest."""
        with ThreadPoolExecutor(self._threads, thread_name_prefix="load") as pool:
            futures = [pool.submit(self._work) for _ in range(self._threads)]
        errors = [error for future in futures if (error := future.exception()) is not None]
        for error in errors:
            if not isinstance(error, LoadCancelled):
                raise error
        if errors or self._cancelled.is_set():
            raise LoadCancelled

    def _work(self) -> None:
        # A chunk as it is read, and behind it as it is converted, to at most twice its size.
        buffer = np.empty(3 * _CHUNK_BYTES, np.uint8)
        try:
            while not self._cancelled.is_set() and (chunk := self._next()) is not None:
                self._load(chunk, buffer)
                self._done(chunk)
        except BaseException:
            self.cancel()
            raise

    def _next(self) -> _Chunk | None:
        with self._lock:
            group = self._segment.first_wanted(self._unread)
            if group is None:
                while self._first < len(self._left) and not self._left[self._first]:
                    self._first += 1
                group = self._first
            if group == len(self._left):
                return None
            chunk = self._left[group].pop()
            self._unread[group] = bool(self._left[group])
            return chunk

    def _load(self, chunk: _Chunk, buffer: NDArray[np.uint8]) -> None:
        data = buffer[: chunk.elements * ITEM_BYTES[chunk.source_dtype]]
        self._fill(chunk, data.data)
        if chunk.source_dtype != chunk.target_dtype:
            size = chunk.elements * ITEM_BYTES[chunk.target_dtype]
            converted = buffer[_CHUNK_BYTES : _CHUNK_BYTES + size]
            convert(
                converted.ctypes.data, chunk.target_dtype, data.ctypes.data, chunk.source_dtype,
                chunk.elements,
            )  # fmt: skip
            data = converted
        self._segment.write(chunk.target_offset, data.data)

    def _fill(self, chunk: _Chunk, buffer: memoryview) -> None:
        fd, done = self._files[chunk.path], 0
        while done < len(buffer):
            if self._cancelled.is_set():
                raise LoadCancelled
            count = self._read(fd, buffer[done:], chunk.file_offset + done)
            if count == 0:
                raise CheckpointError(
                    f"{chunk.path}: ended at byte {chunk.file_offset + done} while loading; "
                    "was it truncated?"
                )
            done += count

    def _done(self, chunk: _Chunk) -> None:
        with self._lock:
            size = chunk.elements * ITEM_BYTES[chunk.target_dtype]
            self._segment.add_loaded(size)
            self._pending[chunk.group] -= 1
            complete = self._pending[chunk.group] == 0
        if complete:
            self._finish(chunk.group)

    def _finish(self, group: int) -> None:
        self._segment.set_ready(group)
        self._on_group(group)


def _chunks(group: int, segment: Segment, part: Part, source: TensorSource) -> list[_Chunk]:
    assert source.dtype is not None
    place = segment.tensors[part.target]
    source_item, target_item = ITEM_BYTES[source.dtype], ITEM_BYTES[place.dtype]
    step = _CHUNK_BYTES // source_item
    return [
        _Chunk(
            group=group,
            path=source.path,
            file_offset=source.offset + (part.source_offset + begin) * source_item,
            source_dtype=source.dtype,
            target_offset=place.offset + (part.offset + begin) * target_item,
            target_dtype=place.dtype,
            elements=min(step, part.elements - begin),
        )
        for begin in range(0, part.elements, step)
    ]
