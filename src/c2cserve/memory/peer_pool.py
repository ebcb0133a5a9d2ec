"""Copies of the pool's weights in memory that neighbouring GPUs lend, kept up to date by a thread.

Readers (a slice each) never wait for it: each holds a *view*, where which weights can be read, and
takes the next one between two launches. What a view does not show is read in host memory, which has
everything. A place is written again only when no reader can still be reading it:

    thread    publish a view without the piece .......... wait for all marks, copy, publish
    reader      launch | look: mark, new view | launch ...      (idle ones look twice a second)
    its GPU            | ........ old launches run | mark

`mark` is an event after all that was launched by the old view.
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

_LOOK_S = 0.5
_CHUNK_BYTES = 64 << 20
"""Of a copy: how long a model that leaves has to wait for one that is under way."""

_USES = 4096
"""Steps between two looks; if there are more, the last ones say enough."""


class Neighbour(Protocol):
    """Memory on another GPU."""

    @property
    def address(self) -> int: ...

    @property
    def size(self) -> int: ...

    def copy(self, target: int, source: int, size: int) -> None:
        """From host memory into it; over when it returns."""
        ...


class Turn(Protocol):
    @property
    def model(self) -> str: ...

    @property
    def key(self) -> Hashable: ...

    @property
    def victims(self) -> Sequence[Hashable]: ...


class Lender(Protocol):
    """Decides what is copied: in the product `policy.weights.lending.Lending`."""

    def add(self, model: str, sizes: Mapping[Hashable, int]) -> None: ...

    def used(self, model: str, now: float) -> None: ...

    def next(self, now: float) -> Turn | None: ...

    def refuse(self, key: Hashable) -> None: ...

    def remove(self, model: str) -> Sequence[Hashable]: ...


class Mark(Protocol):
    def synchronize(self) -> object: ...


@dataclass(frozen=True, slots=True)
class Lendable:
    """A model's weights as they lie in host memory."""

    address: int
    pieces: tuple[tuple[int, int], ...]
    """(start, stop) from `address`: what is copied at once."""
    complete: Callable[[], bool]
    """Whether all of it is loaded. Asked by the pool's thread."""


@dataclass(frozen=True, slots=True)
class View:
    """Which host addresses can be read elsewhere."""

    version: int = 0
    starts: tuple[int, ...] = ()
    spans: tuple[tuple[int, int], ...] = ()
    """(end in host memory, distance to the copy) of the span that begins there."""

    def there(self, address: int, size: int) -> int | None:
        """Where a copy of [address, address + size) is."""
        at = bisect_right(self.starts, address) - 1
        if at < 0:
            return None
        stop, distance = self.spans[at]
        return address + distance if address + size <= stop else None


@dataclass(frozen=True, slots=True)
class _Copied:
    start: int
    stop: int
    """In host memory."""
    neighbour: int
    place: int
    """In the neighbour's, from its beginning."""


class PeerPool:
    """One per process and GPU, for all of its slices. Thread-safe."""

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
        """Copied and to be read now."""
        self._thread = threading.Thread(target=self._work, name="peers", daemon=True)
        self._thread.start()

    def add(self, model: str, weights: Lendable) -> None:
        with self._changed:
            self._models[model] = self._loading[model] = weights
            self._changed.notify_all()

    def remove(self, model: str) -> None:
        """Nobody reads the model any more. Afterwards nothing touches its host memory, and views
        taken from now on do not know it."""
        with self._changed:
            self._models.pop(model, None)
            self._loading.pop(model, None)
            for key in self._lender.remove(model):
                copied = self._copied.pop(key, None)
                if copied is not None:  # else it is on its way, and freed when that is over
                    self._places[copied.neighbour].free(copied.place)
            self._publish()
            while self._copying == model:
                self._changed.wait()

    def used(self, model: str) -> None:
        """A step of it is about to run. Never waits."""
        self._uses.append((model, time.monotonic()))

    def join(self, reader: "Borrower") -> None:
        with self._changed:
            self._readers[reader] = (self.view.version, None)

    def adopted(self, reader: "Borrower", version: int, mark: Mark) -> None:
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
                    self._changed.wait(_LOOK_S)
        except RuntimeError:
            # An error of CUDA's: slices meet it too if it is theirs. What is copied stays.
            log.exception("no more weights are copied into lent memory")
            with self._changed:
                self._copying = ""
                self._changed.notify_all()

    def _bring_one(self) -> bool:
        """Copy one piece; whether there may be another."""
        with self._changed:
            turn = self._next()
            if turn is None:
                return False
            weights = self._models[turn.model]
            freed = [self._copied.pop(key) for key in turn.victims]
            self._publish()
        if freed:
            self._wait_for_readers(self.view.version)
        with self._changed:
            for old in freed:
                self._places[old.neighbour].free(old.place)
            if self._models.get(turn.model) is not weights:
                return True  # it left meanwhile
            piece = self._find_place(weights, turn.key)
            if piece is None:
                self._lender.refuse(turn.key)
                return True
            # Not before: who removes a model waits for this, and may be a reader waited for above.
            self._copying = turn.model
        done = self._copy(turn.model, piece)
        with self._changed:
            self._copying = ""
            self._changed.notify_all()
            if done and turn.model in self._models:
                self._copied[turn.key] = piece
                self._publish()
            else:
                self._places[piece.neighbour].free(piece.place)
        return True

    def _next(self) -> Turn | None:
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
        """Until nothing that was launched before they had this view still runs."""
        with self._changed:
            while any(seen < version for seen, _ in self._readers.values()):
                self._changed.wait()
            marks = [mark for _, mark in self._readers.values() if mark is not None]
        for mark in marks:
            mark.synchronize()

    def _find_place(self, weights: Lendable, key: Hashable) -> _Copied | None:
        """Called with the lock."""
        assert isinstance(key, tuple)
        start, stop = weights.pieces[key[1]]
        for number, places in enumerate(self._places):
            place = places.take(stop - start)
            if place is not None:
                return _Copied(weights.address + start, weights.address + stop, number, place)
        return None

    def _copy(self, model: str, piece: _Copied) -> bool:
        """False: the model left."""
        neighbour = self._neighbours[piece.neighbour]
        for start in range(piece.start, piece.stop, _CHUNK_BYTES):
            if model not in self._models:
                return False
            target = neighbour.address + piece.place + start - piece.start
            neighbour.copy(target, start, min(_CHUNK_BYTES, piece.stop - start))
        return True

    def _publish(self) -> None:
        """Called with the lock."""
        pieces = sorted(self._copied.values(), key=lambda one: one.start)
        spans = tuple(
            (one.stop, self._neighbours[one.neighbour].address + one.place - one.start)
            for one in pieces
        )
        self.view = View(self.view.version + 1, tuple(one.start for one in pieces), spans)
        self.bytes = sum(one.stop - one.start for one in pieces)


@dataclass(slots=True, eq=False)
class Borrower:
    """A slice's reading of the pool; `memory.hbm_cache.Homes`. Belongs to the slice's thread."""

    pool: PeerPool
    mark: Callable[[], Mark]
    """An event after all that the slice has launched."""
    _view: View = field(default_factory=View)

    def __post_init__(self) -> None:
        self._view = self.pool.view
        self.pool.join(self)

    @property
    def changes(self) -> int:
        """Raised whenever weights may be elsewhere."""
        return self._view.version

    def look(self) -> None:
        """Take the newest view, between two launches. Cheap where there is none."""
        view = self.pool.view
        if view is not self._view:
            mark = self.mark()
            self._view = view
            self.pool.adopted(self, view.version, mark)

    def source(self, w: WeightHandle) -> WeightHandle:
        """Where W, whose home is host memory, is best read."""
        there = self._view.there(w.pointer, w.bytes)
        return w if there is None else replace(w, pointer=there, home="peer", owner=None)
