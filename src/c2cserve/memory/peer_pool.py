"""Copies of the pool's weights in memory that neighbouring GPUs lend, kept up to date by a thread.

    thread    publish a view without the piece .......... wait for all marks, copy, publish
    reader      launch | refresh: mark, new view | launch ...   (idle ones twice a second)
    its GPU            | ........ old launches run | mark

Each slice is a reader, and no reader ever waits for the thread. A reader holds a *view*: which
weights can be read, and where. It takes the newest view between two launches. Weights that the view
does not show are read in host memory, which has all of them.

A place is written again only when no reader can still be reading it. A *mark* is an event after
everything that was launched with the old view.
"""

import logging
import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from c2cserve.kernels.gpu.gemm.weight import WeightHandle
from c2cserve.memory.places import Places

log = logging.getLogger(__name__)

_REFRESH_S = 0.5
_CHUNK_BYTES = 64 << 20
"""A copy is cut into chunks: a model that is removed waits for one chunk, not for the copy."""

_USES = 4096
"""Steps noted between two refreshes; of more steps, the last ones are enough."""


class Neighbour(Protocol):
    """Memory on another GPU."""

    @property
    def address(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def gpu(self) -> int:
        """The GPU's number."""
        ...

    def copy(self, target: int, source: int, size: int) -> None:
        """Copy from host memory to this memory. The copy is over when this returns."""
        ...


class NextPiece(Protocol):
    """A piece to copy, and the pieces to drop for it."""

    @property
    def model(self) -> str: ...

    @property
    def key(self) -> Hashable: ...

    @property
    def victims(self) -> Sequence[Hashable]: ...


class Lender(Protocol):
    """Decides what is copied; in the product it is `policy.weights.lending.Lending`."""

    def add(self, model: str, sizes: Mapping[Hashable, int]) -> None: ...

    def used(self, model: str, now: float) -> None: ...

    def next(self, now: float) -> NextPiece | None: ...

    def refuse(self, key: Hashable) -> None: ...

    def remove(self, model: str) -> Sequence[Hashable]: ...


class Mark(Protocol):
    """An event on a GPU."""

    def synchronize(self) -> object: ...


@dataclass(frozen=True, slots=True)
class Lendable:
    """A model's weights as they lie in host memory."""

    address: int
    pieces: tuple[tuple[int, int], ...]
    """(start, stop), counted from `address`. A piece is copied and dropped as a whole."""
    complete: Callable[[], bool]
    """Returns whether all weights are loaded. Called on the pool's thread."""


@dataclass(frozen=True, slots=True)
class View:
    """The host addresses that can be read on other GPUs."""

    version: int = 0
    starts: tuple[int, ...] = ()
    spans: tuple[tuple[int, int], ...] = ()
    """(end in host memory, distance to the copy) of the span that begins there."""

    def copy_of(self, address: int, size: int) -> int | None:
        """Return the address of a copy of [address, address + size), None if there is none."""
        at = bisect_right(self.starts, address) - 1
        if at < 0:
            return None
        stop, distance = self.spans[at]
        return address + distance if address + size <= stop else None


@dataclass(frozen=True, slots=True)
class _Copied:
    start: int
    stop: int
    """Addresses in host memory."""
    neighbour: int
    place: int
    """The offset in the neighbour's memory."""


class PeerPool:
    """The copies of one GPU's weights, shared by all of its slices. Thread-safe."""

    def __init__(self, neighbours: Sequence[Neighbour], lender: Lender) -> None:
        self._neighbours = neighbours
        self._places = [Places(one.size) for one in neighbours]
        self._lender = lender
        self._changed = threading.Condition()
        self._models: dict[str, Lendable] = {}
        self._loading: dict[str, Lendable] = {}
        self._copied: dict[Hashable, _Copied] = {}
        self._readers: dict[Borrower, tuple[int, Mark | None]] = {}
        self._uses: deque[tuple[str, float]] = deque(maxlen=_USES)
        self._copying = ""
        self.view = View()
        self.bytes = 0
        """Bytes that can be read on other GPUs now."""
        self._thread = threading.Thread(target=self._work, name="peers", daemon=True)
        self._thread.start()

    def gpu_of(self, address: int) -> int:
        """Return the GPU that lends the memory at an address."""
        return next(
            one.gpu for one in self._neighbours if one.address <= address < one.address + one.size
        )

    def add(self, model: str, weights: Lendable) -> None:
        with self._changed:
            self._models[model] = self._loading[model] = weights
            self._changed.notify_all()

    def remove(self, model: str) -> None:
        """Forget a model that no reader reads any more.

        Afterwards nothing touches its host memory, and new views do not show it.
        """
        with self._changed:
            self._models.pop(model, None)
            self._loading.pop(model, None)
            for key in self._lender.remove(model):
                copied = self._copied.pop(key, None)
                if copied is not None:  # else its copy is under way, and frees the place at its end
                    self._places[copied.neighbour].free(copied.place)
            self._publish()
            while self._copying == model:
                self._changed.wait()

    def used(self, model: str) -> None:
        """Note that a step of the model is about to run. Never wait."""
        self._uses.append((model, time.monotonic()))

    def join(self, reader: "Borrower") -> None:
        """Add a reader, which has the current view."""
        with self._changed:
            self._readers[reader] = (self.view.version, None)

    def adopted(self, reader: "Borrower", version: int, mark: Mark) -> None:
        """Note that a reader has a new view. `mark` covers what it launched with the old one."""
        with self._changed:
            self._readers[reader] = (version, mark)
            self._changed.notify_all()

    # ---- the pool's thread ----------------------------------------------------------------------

    def _work(self) -> None:
        try:
            while True:
                while self._bring_one():
                    pass
                with self._changed:
                    self._changed.wait(_REFRESH_S)
        except RuntimeError:
            # A CUDA error: slices meet it too if it is theirs. What is copied stays.
            log.exception("no more weights are copied into lent memory")
            with self._changed:
                self._copying = ""
                self._changed.notify_all()

    def _bring_one(self) -> bool:
        """Copy one piece. Return whether there may be another."""
        with self._changed:
            following = self._next()
            if following is None:
                return False
            weights = self._models[following.model]
            freed = [self._copied.pop(key) for key in following.victims]
            self._publish()
        if freed:
            self._wait_for_readers(self.view.version)
        with self._changed:
            for old in freed:
                self._places[old.neighbour].free(old.place)
            if self._models.get(following.model) is not weights:
                return True  # the model was removed meanwhile
            piece = self._find_place(weights, following.key)
            if piece is None:
                self._lender.refuse(following.key)
                return True
            # Only now: `remove` waits for this, and its caller may be a reader waited for above.
            self._copying = following.model
        done = self._copy(following.model, piece)
        with self._changed:
            self._copying = ""
            self._changed.notify_all()
            if done and following.model in self._models:
                self._copied[following.key] = piece
                self._publish()
            else:
                self._places[piece.neighbour].free(piece.place)
        return True

    def _next(self) -> NextPiece | None:
        while self._uses:
            self._lender.used(*self._uses.popleft())
        for model, weights in list(self._loading.items()):
            if weights.complete():
                del self._loading[model]
                sizes: dict[Hashable, int] = {
                    (model, i): b - a for i, (a, b) in enumerate(weights.pieces)
                }
                self._lender.add(model, sizes)
        return self._lender.next(time.monotonic())

    def _wait_for_readers(self, version: int) -> None:
        """Wait until nothing still runs that readers launched before they had this view."""
        with self._changed:
            while any(seen < version for seen, _ in self._readers.values()):
                self._changed.wait()
            marks = [mark for _, mark in self._readers.values() if mark is not None]
        for mark in marks:
            mark.synchronize()

    def _find_place(self, weights: Lendable, key: Hashable) -> _Copied | None:
        """Take a place for a piece, None if there is none. Called with the lock held."""
        assert isinstance(key, tuple)
        start, stop = weights.pieces[key[1]]
        for number, places in enumerate(self._places):
            place = places.take(stop - start)
            if place is not None:
                return _Copied(weights.address + start, weights.address + stop, number, place)
        return None

    def _copy(self, model: str, piece: _Copied) -> bool:
        """Copy a piece in chunks. Return False if the model was removed meanwhile."""
        neighbour = self._neighbours[piece.neighbour]
        for start in range(piece.start, piece.stop, _CHUNK_BYTES):
            if model not in self._models:
                return False
            target = neighbour.address + piece.place + start - piece.start
            neighbour.copy(target, start, min(_CHUNK_BYTES, piece.stop - start))
        return True

    def _publish(self) -> None:
        """Make a view of all pieces. Called with the lock held."""
        pieces = sorted(self._copied.values(), key=lambda one: one.start)
        spans = tuple(
            (one.stop, self._neighbours[one.neighbour].address + one.place - one.start)
            for one in pieces
        )
        self.view = View(self.view.version + 1, tuple(one.start for one in pieces), spans)
        self.bytes = sum(one.stop - one.start for one in pieces)


@dataclass(slots=True, eq=False)
class Borrower:
    """A reader of the pool: one slice's view. It belongs to the slice's thread."""

    pool: PeerPool
    mark: Callable[[], Mark]
    """Returns an event after everything that the slice has launched."""
    _view: View = field(default_factory=View)

    def __post_init__(self) -> None:
        self._view = self.pool.view
        self.pool.join(self)

    @property
    def changes(self) -> int:
        """A number that rises whenever a weight may have moved."""
        return self._view.version

    def refresh(self) -> None:
        """Take the newest view, between two launches. Cheap when the view is the newest."""
        view = self.pool.view
        if view is not self._view:
            mark = self.mark()
            self._view = view
            self.pool.adopted(self, view.version, mark)

    def source(self, w: WeightHandle) -> WeightHandle:
        """Return where to read W, whose home is host memory: there, or in a copy."""
        copy = self._view.copy_of(w.pointer, w.bytes)
        return w if copy is None else replace(w, pointer=copy, home="peer", owner=None)
