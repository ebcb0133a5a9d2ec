"""The host weight pool: the models' segments, within a budget, and removed without fail.

Which model is evicted when memory is short is the policy's decision. The pool only refuses to go
over its budget.
"""

import errno
import logging
import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from c2cserve.files.patience import open_patiently
from c2cserve.memory.arrivals import Arrivals
from c2cserve.memory.checkpoint import CheckpointError, TensorSource
from c2cserve.memory.layout import LayoutPlan
from c2cserve.memory.loader import LoadCancelled, Loader, Read, pread
from c2cserve.memory.segment import Segment, State, remove_segment, segment_bytes
from c2cserve.processes.instances import PREFIX, InstanceTaken, remove_instance, take_instance

log = logging.getLogger(__name__)

_LOADS_AT_ONCE = 2
_REMOVALS_AT_ONCE = 8
_UNMAP_S = 30.0
"""How long after an eviction its memory may still be mapped. Workers unmap it between two steps, or
take its registration with a GPU back before, in pieces with pauses."""
_RETRY_S = 0.02


class PoolError(RuntimeError):
    """The pool cannot take the model. One line has the numbers and says what to do."""


@dataclass(frozen=True, slots=True)
class Listener:
    """Called on loader threads, in this order for one load, and never after its `evict`."""

    usable: Callable[[str], None]
    """The first group is there: a step may start."""
    loaded: Callable[[str, int, float], None]
    """Model, bytes, seconds."""
    failed: Callable[[str, str], None]


Fetch = Callable[[Arrivals], bool]
"""Gets weights from elsewhere than the checkpoint. Returns whether all of them came; the others
are then read."""


def _no_check() -> None:
    pass


@dataclass(slots=True)
class _Entry:
    path: Path
    bytes: int
    segment: Segment | None = None
    loader: Loader | Arrivals | None = None
    gone: bool = False


class Pool:
    def __init__(
        self,
        instance: str,
        directory: Path,
        budget_bytes: int,
        listener: Listener,
        *,
        threads: int = 4,
        read: Read = pread,
        nodes: Sequence[int] = (),
    ) -> None:
        """Take the instance's lock in `directory`. Raises PoolError if another run has it.

        `nodes` are the NUMA nodes over which segments are spread; none: the kernel decides."""
        self.instance = instance
        self.directory = directory
        self.budget_bytes = budget_bytes
        self._listener = listener
        self._threads = threads
        self._read = read
        self._nodes = tuple(nodes)
        self._entries: dict[str, _Entry] = {}
        self._generation = 0
        self._evicted_at = -math.inf
        self._lock = threading.Lock()
        self._executor = ThreadPoolExecutor(_LOADS_AT_ONCE, thread_name_prefix="pool")
        try:
            self._lock_fd = take_instance(directory, instance)
        except InstanceTaken as error:
            raise PoolError(str(error)) from error

    @property
    def prefix(self) -> Path:
        """The beginning of the names of all of this instance's files."""
        return self.directory / f"{PREFIX}.{self.instance}"

    @property
    def used_bytes(self) -> int:
        with self._lock:
            return sum(entry.bytes for entry in self._entries.values())

    def loaded_bytes(self, model: str) -> int:
        entry = self._entries.get(model)
        segment = None if entry is None else entry.segment
        return 0 if segment is None else segment.loaded_bytes

    def whole(self, model: str) -> Segment | None:
        """Return the model's segment if all of its weights are there."""
        entry = self._entries.get(model)
        segment = None if entry is None else entry.segment
        return segment if segment is not None and segment.state is State.READY else None

    def path(self, model: str) -> Path:
        """Return the path of the model's segment. Raises KeyError if it has none."""
        return self._entries[model].path

    def load(
        self, model: str, plan: LayoutPlan, sources: dict[str, TensorSource],
        check: Callable[[], None] = _no_check, fetch: Fetch | None = None,
    ) -> None:  # fmt: skip
        """Begin to load; the listener is notified of the rest.

        `check` is called before the first read and after the last. What it raises (CheckpointError)
        fails the load. `fetch` is tried before the checkpoint is read, on a loader's thread. Raises
        PoolError when the model does not fit.
        """
        size = segment_bytes(plan)
        with self._lock:
            if model in self._entries:
                raise PoolError(f"{model} is in the pool already")
            used = sum(entry.bytes for entry in self._entries.values())
            if used + size > self.budget_bytes:
                raise PoolError(
                    f"{model} takes {size} bytes of host memory, the pool has "
                    f"{self.budget_bytes - used} of {self.budget_bytes} left: raise --pool-bytes "
                    "or remove models"
                )
            self._generation += 1
            slug = "".join(c if c.isalnum() or c in "-_" else "-" for c in model)[-80:]
            entry = _Entry(Path(f"{self.prefix}.{slug}.{self._generation}"), size)
            self._entries[model] = entry
        self._executor.submit(self._run, model, entry, plan, sources, check, fetch)

    def _run(
        self, model: str, entry: _Entry, plan: LayoutPlan, sources: dict[str, TensorSource],
        check: Callable[[], None], fetch: Fetch | None,
    ) -> None:  # fmt: skip
        started = time.monotonic()
        try:
            check()
            self._fill(model, entry, plan, sources, fetch)
            check()
        except LoadCancelled:
            log.info("load of %s was cancelled", model)
        except (CheckpointError, OSError) as error:
            self._fail(model, entry, self._explain(model, entry, error))
        except Exception as error:  # else the model would be loading for ever
            log.exception("load of %s", model)
            self._fail(model, entry, f"{type(error).__name__}: {error}")
        else:
            if not entry.gone:
                self._listener.loaded(model, entry.bytes, time.monotonic() - started)

    def _fill(
        self, model: str, entry: _Entry, plan: LayoutPlan, sources: dict[str, TensorSource],
        fetch: Fetch | None,
    ) -> None:  # fmt: skip
        if entry.gone:
            raise LoadCancelled
        segment = self._create(entry, plan, sources)  # may take seconds: without the lock
        with self._lock:
            entry.segment = segment
            if entry.gone:  # evicted meanwhile, perhaps before there was a file to remove
                remove_segment(entry.path)
                raise LoadCancelled

        def on_group(group: int) -> None:
            if group == 0 and not entry.gone:
                self._listener.usable(model)

        try:
            if fetch is not None:
                arrivals = entry.loader = Arrivals(segment, plan, on_group)
                if not entry.gone and fetch(arrivals):
                    arrivals.finish()
                    return
            loader = entry.loader = Loader(
                segment, plan, sources, threads=self._threads, read=self._read, on_group=on_group
            )
            if entry.gone:
                loader.cancel()
            loader.run()
        finally:
            # Entry and loader refer to each other. Left so, an evicted segment would stay mapped
            # here, and its memory taken, until the garbage collector ran.
            entry.loader = None

    def _create(self, entry: _Entry, plan: LayoutPlan, sources: dict[str, TensorSource]) -> Segment:
        """Create the segment. A full filesystem is an error, unless a model was evicted just now:
        its memory comes back when the last worker has unmapped it."""
        create = partial(Segment.create, entry.path, plan, sources, self._nodes)
        while True:
            try:
                return open_patiently(create, lambda: entry.gone)
            except OSError as error:
                waited_s = time.monotonic() - self._evicted_at
                if error.errno not in (errno.ENOSPC, errno.ENOMEM) or waited_s > _UNMAP_S:
                    raise
            if entry.gone:
                raise LoadCancelled
            time.sleep(_RETRY_S)

    def _explain(self, model: str, entry: _Entry, error: Exception) -> str:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.ENOMEM):
            free = shutil.disk_usage(self.directory).free
            return (
                f"{model} needs {entry.bytes} bytes in {self.directory}, which has {free} left: "
                "give it a larger shared-memory filesystem (--shm-size in a container) or remove "
                "models"
            )
        return str(error)

    def _fail(self, model: str, entry: _Entry, reason: str) -> None:
        with self._lock:
            if entry.gone:
                return
            entry.gone = True
            self._entries.pop(model, None)
            remove_segment(entry.path)
        self._listener.failed(model, reason)

    def evict(self, model: str) -> None:
        """Drop the model, or cancel its load. Mappings that exist stay valid. A model that is not
        in the pool is no error."""
        with self._lock:
            entry = self._entries.pop(model, None)
            if entry is None:
                return
            entry.gone = True
            self._evicted_at = time.monotonic()
            if entry.loader is not None:
                entry.loader.cancel()
            entry.segment = None
            remove_segment(entry.path)

    def close(self) -> None:
        """Cancel all loads and remove everything of this instance."""
        with self._lock:
            entries = list(self._entries.values())
            self._entries.clear()
            for entry in entries:
                entry.gone, entry.segment = True, None
                if entry.loader is not None:
                    entry.loader.cancel()
        # As a rule no mapping is left, and removing a segment frees its pages, one by one.
        with ThreadPoolExecutor(_REMOVALS_AT_ONCE, thread_name_prefix="pool-remove") as removals:
            list(removals.map(remove_segment, [entry.path for entry in entries]))
        self._executor.shutdown(wait=True, cancel_futures=True)
        remove_instance(self.directory, self.instance)
        os.close(self._lock_fd)
