"""Loads of whole models into a slice's HBM, beside what computes.

    steps    | step 7 (reads old weights) | step 8       | step 9      | step 10, may read the model
    loads        wait for step 7          | copy | copy  | copy | copy |
    host     fetch ....... poll ........... poll ........ poll ....... poll: shown, `Fetched`

A load takes places for all of a model's matrices (`memory.hbm_cache`), and copies them on a stream
of its own. The model is shown when all copies are over, so no step waits for a load. These rules
keep steps and loads apart:

- A load begins after every step launched before it that may still read what was at its places.
  A step that streams beside it in another lane does not hold it up.
- Copies run in the order of one stream. So a load may overwrite places of a load that was
  cancelled, whose last copies are still under way.
- KV that grows into such places waits on the GPU for these copies, in all lanes (`make_room`).

Copies are enqueued a few batches ahead and not all at once, so that a cancelled load leaves the
link soon.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from c2cserve.core.tensors import Home
from c2cserve.kernels.gpu.gemm.weight import WeightHandle
from c2cserve.memory.hbm_cache import HbmCache

log = logging.getLogger(__name__)

_COPY_BYTES = 16 << 20
"""The longest copy. A step's own small copies to the GPU may have to wait for one of them: 0.3 ms
over PCIe 5."""
_BATCH_BYTES: dict[Home, int] = {"host": 128 << 20, "peer": 768 << 20, "hbm": 128 << 20}
"""Copies between two events, by where they come from: about 2.4 ms of either link. At each event
the slice's thread wakes, and decides what to do next. More often would take time from steps."""
_BATCHES_MOST = 5
"""Batches under way at a time, about 12 ms. The launch of a long step keeps the slice's thread for
8 ms, and nothing is enqueued meanwhile."""

Locate = Callable[[], Sequence[WeightHandle] | None]
"""Returns a model's matrices at their home, in the order of their use. None: some of them are still
being loaded into the pool."""


class Event(Protocol):
    """A point in a stream."""

    def query(self) -> bool:
        """Return whether everything before it is over. Raises CUDA's errors."""
        ...


EventT = TypeVar("EventT", bound=Event)


class LoadStream(Protocol[EventT]):
    """A stream for copies, beside the slice's own (`engine.gpu.load_stream`)."""

    def mark_steps(self) -> EventT:
        """Return an event after all steps launched so far that may read what was dropped."""
        ...

    def wait_for_steps(self, event: EventT) -> None:
        """Let copies from now on wait for an event of `mark_steps`."""
        ...

    def copy(self, target: int, source: int, size: int) -> None: ...

    def record(self) -> EventT:
        """Return an event after all copies so far. The slice's thread is woken at its end."""
        ...

    def hold_steps(self, event: EventT) -> None:
        """Let what the slice launches from now on, in any lane, wait for an event of `record`."""
        ...

    def synchronize(self) -> None:
        """Wait for all copies."""
        ...


@dataclass(frozen=True, slots=True)
class LoadOutcome:
    """The fields of `core.events.Fetched`."""

    model: str
    took_s: float = 0.0
    refused: bool = False


@dataclass(slots=True)
class LoadCounts:
    """Since the start, for `/metrics`."""

    fetches: int = 0
    copied_bytes: int = 0
    """Bytes of copies enqueued."""
    seconds: float = 0.0
    """Seconds of loads that came to their end, without waits for loads before them."""
    releases: int = 0
    cancelled: int = 0
    """Loads that ended before their end, by whatever cause."""
    refused: int = 0


@dataclass(frozen=True, slots=True)
class _Piece:
    """One copy: a part of a weight."""

    weight: WeightHandle
    offset: int
    size: int
    target: int


@dataclass(frozen=True, slots=True)
class _Batch(Generic[EventT]):
    event: EventT
    """It is over after its copies."""
    lowest: int
    """The lowest address that they write."""


@dataclass(slots=True, eq=False)
class _Load(Generic[EventT]):
    model: str
    locate: Locate
    pieces: Iterator[_Piece] | None = None
    """Copies to enqueue; None until it has places."""
    begun_s: float = 0.0
    gate: EventT | None = None
    """What its first copy waits for."""
    home: Home = "host"
    """Where its last copy came from."""
    newest: EventT | None = None
    """It is over after the copies that are enqueued."""
    enqueued: bool = False
    """All copies are."""


class WeightLoads(Generic[EventT]):
    """The loads of one slice. Not thread-safe: they belong to the slice's thread.

    CUDA's errors leave every method; the process must not serve another request then.
    """

    def __init__(
        self, cache: HbmCache, stream: LoadStream[EventT], clock: Callable[[], float],
        fatal: Callable[[Exception], bool],
    ) -> None:  # fmt: skip
        """An exception for which `fatal` is true is raised; another refuses one load."""
        self._cache = cache
        self._stream = stream
        self._clock = clock
        self._fatal = fatal
        self._loads: list[_Load[EventT]] = []
        """Loads under way, in the order they were asked for."""
        self._shown: set[str] = set()
        self._batches: deque[_Batch[EventT]] = deque()
        """Copies that are not known to be over, those of cancelled loads too."""
        self._outcomes: list[LoadOutcome] = []
        self._warned: set[str] = set()
        """Models whose refusal was logged."""
        self.counts = LoadCounts()

    @property
    def waiting(self) -> bool:
        """Whether a load waits for the pool, which notifies of nothing."""
        return any(load.pieces is None for load in self._loads)

    def fetch(self, model: str, locate: Locate, kv_end: int | None) -> None:
        """Begin to load a model. All KV that is written from now on lies below `kv_end` (None:
        where it did before), until the next step or `make_room` says otherwise."""
        self.counts.fetches += 1
        if kv_end is not None:
            self.make_room(kv_end)
            self._cache.make_room(kv_end)
        self._loads.append(_Load(model, locate))
        self._advance()

    def release(self, model: str) -> None:
        """Drop a model's weights, or cancel its load: no outcome of it follows. Do nothing for any
        other model."""
        self.counts.releases += model in self._shown
        self._leave(model)
        self._outcomes = [one for one in self._outcomes if one.model != model]

    def poll(self) -> list[LoadOutcome]:
        """Show what has arrived, enqueue more copies, and return how loads ended."""
        self._advance()
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def make_room(self, kv_end: int | None) -> None:
        """Prepare for KV below `kv_end` (None: anywhere), written by what is launched from now on.

        Models with places there lose all of them. Steps wait for copies that may still write there.
        """
        for model in self._cache.whole_models_below(kv_end):
            self._refuse(model, "KV takes one of its places")
        limit = self._cache.address_of(kv_end)
        low = [one for one in self._batches if one.lowest < limit and not one.event.query()]
        if low:
            self._stream.hold_steps(low[-1].event)  # it comes after those before it

    def drop(self) -> None:
        """Cancel all loads: a step has failed, and the slice's parts are built anew. Models that
        are shown stay, because all of them was there."""
        for load in list(self._loads):
            self._refuse(load.model, "a step has failed")

    def synchronize(self) -> None:
        """Wait for all copies that are enqueued."""
        self._stream.synchronize()

    # ---- copies ---------------------------------------------------------------------------------

    def _advance(self) -> None:
        while self._batches and self._batches[0].event.query():
            self._batches.popleft()
        for load in [one for one in self._loads if one.pieces is None]:
            self._begin(load)
        for load in [one for one in self._loads if one.pieces is not None]:
            if not load.enqueued and not self._enqueue(load):
                break
        for load in [one for one in self._loads if one.enqueued]:
            if load.newest is None or load.newest.query():
                self._arrived(load)

    def _begin(self, load: _Load[EventT]) -> None:
        """Take places for a load, unless it has to wait for the pool."""
        try:
            weights = load.locate()
        except Exception as fault:
            if self._fatal(fault):
                raise
            self._refuse(load.model, f"{type(fault).__name__}: {fault}")
            return
        if weights is None:
            return
        places = self._cache.reserve(load.model, weights)
        if places is None:
            size = sum(w.bytes for w in weights)
            self._refuse(load.model, f"its {size} bytes have no places above the KV")
            return
        load.gate = self._stream.mark_steps()
        load.pieces = _pieces(weights, places)

    def _enqueue(self, load: _Load[EventT]) -> bool:
        """Enqueue as many copies of a load as may be under way. Return whether that was all."""
        assert load.pieces is not None
        if load.gate is not None:
            self._stream.wait_for_steps(load.gate)
            load.gate = None
            load.begun_s = self._clock()
        while len(self._batches) < _BATCHES_MOST:
            batch = list(_batch(load.pieces, _BATCH_BYTES[load.home]))
            if not batch:
                load.enqueued = True
                return True
            for piece in batch:
                source = self._cache.location(piece.weight)
                load.home = source.home
                self._stream.copy(piece.target, source.pointer + piece.offset, piece.size)
            load.newest = self._stream.record()
            self._batches.append(_Batch(load.newest, min(piece.target for piece in batch)))
            self.counts.copied_bytes += sum(piece.size for piece in batch)
        return False

    def _arrived(self, load: _Load[EventT]) -> None:
        self._loads.remove(load)
        self._cache.show(load.model)
        self._shown.add(load.model)
        now = self._clock()
        took_s = now - load.begun_s
        self.counts.seconds += took_s
        self._outcomes.append(LoadOutcome(load.model, took_s))
        for other in self._loads:
            other.begun_s = now  # its copies come after these

    # ---- endings --------------------------------------------------------------------------------

    def _leave(self, model: str) -> None:
        """Give a model's places back, and enqueue no more copies of it."""
        for load in [one for one in self._loads if one.model == model]:
            self._loads.remove(load)
            self.counts.cancelled += load.pieces is not None
        self._shown.discard(model)
        self._cache.release(model)

    def _refuse(self, model: str, reason: str) -> None:
        self._leave(model)
        self.counts.refused += 1
        self._outcomes.append(LoadOutcome(model, refused=True))
        if model not in self._warned:
            self._warned.add(model)
            log.warning("weights of %s stream, they are not kept in HBM: %s", model, reason)


def _pieces(weights: Sequence[WeightHandle], places: Sequence[WeightHandle]) -> Iterator[_Piece]:
    for weight, place in zip(weights, places, strict=True):
        for offset in range(0, weight.bytes, _COPY_BYTES):
            size = min(_COPY_BYTES, weight.bytes - offset)
            yield _Piece(weight, offset, size, place.pointer + offset)


def _batch(pieces: Iterator[_Piece], least: int) -> Iterator[_Piece]:
    """Yield the next pieces, of at least so many bytes together if there are as many."""
    size = 0
    while size < least and (piece := next(pieces, None)) is not None:
        size += piece.size
        yield piece
