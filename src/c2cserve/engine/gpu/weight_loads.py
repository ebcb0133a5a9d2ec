"""Loads of whole models into a slice's HBM, beside what computes.

    others   | step 7 (reads old weights) | step 8          | step 9           | step 11
    engine       waits for step 7         | layer 0 | layer 1 | layer 2 | layer 3, head | over
    step 10  launched ..................... parked  | layer 0 | layer 1 | layer 2       | layer 3
    host     fetch: submitted ........... poll: shown, shown, shown, shown, `Fetched`

A load takes places for all of a model's matrices (`memory.hbm_cache`). It submits their copies to
the transfer engine in *parts*: a few layers are one transfer. A part is shown when its transfer and
those before it are over. A step of the model launches its layers as far as they are shown
(`arrived`). It is parked between them, so no other step waits for a load. These rules keep steps
and loads apart:

- A load begins after every step launched before it that may still read what was at its places.
  A step that streams beside it in another lane does not hold it up.
- Copies of a load that was cancelled may still be under way, over several links. No load is
  submitted before they are over, since it may have been given their places.
- KV that grows into such places waits on the GPU for these copies, in all lanes (`make_room`).
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, Protocol, TypeVar

from c2cserve.core.tensors import Home
from c2cserve.kernels.gpu.gemm.weight import WeightHandle
from c2cserve.memory.hbm_cache import HbmCache

log = logging.getLogger(__name__)

_PART_BYTES = 64 << 20
"""A part has at least so many bytes: a link brings them in a millisecond. Each has an end that the
slice's thread is woken for."""

Layers = Sequence[Sequence[WeightHandle]]
"""A model's matrices at their home, by layer, in the order of their use. The head is with the last
layer."""
Locate = Callable[[], Layers | None]
"""Returns a model's matrices. None: some of them are still being loaded into the pool."""

TicketT = TypeVar("TicketT")


class LoadCopy(NamedTuple):
    """The copy of one matrix."""

    target: int
    source: int
    size: int
    home: Home
    """Where the source is."""


class LoadCopies(Protocol[TicketT]):
    """Copies beside a slice's steps (`engine.gpu.load_transfers`). CUDA's errors leave it."""

    def submit(self, copies: Sequence[LoadCopy]) -> TicketT:
        """Copy after all steps launched so far that may read what was dropped. The slice's thread
        is woken at the end."""
        ...

    def is_over(self, ticket: TicketT) -> bool: ...

    def moved_bytes(self, ticket: TicketT) -> int:
        """Return how many bytes have been copied."""
        ...

    def cancel(self, ticket: TicketT) -> None:
        """Begin no more copies. Those that are under way end soon."""
        ...

    def hold_steps(self, ticket: TicketT) -> None:
        """Let what the slice launches from now on, in any lane, wait for a cancelled ticket."""
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
    """Bytes of parts that are over, also of those that were cancelled midway."""
    seconds: float = 0.0
    """Seconds of loads that came to their end, without waits for loads before them."""
    releases: int = 0
    cancelled: int = 0
    """Loads that ended before their end, by whatever cause."""
    refused: int = 0


@dataclass(frozen=True, slots=True)
class _Part(Generic[TicketT]):
    """Some layers that follow one another, and the transfer that brings them."""

    ticket: TicketT
    weights: Sequence[WeightHandle]
    layers: int
    """So many layers of the model are there when it is."""


@dataclass(slots=True, eq=False)
class _Load(Generic[TicketT]):
    model: str
    locate: Locate
    layers: Layers = ()
    places: Sequence[WeightHandle] | None = None
    """None until it has places; in the order of `layers`."""
    parts: deque[_Part[TicketT]] = field(default_factory=deque[_Part[TicketT]])
    """Those that are submitted and not shown."""
    submitted: bool = False
    shown: int = 0
    """Layers that are."""
    begun_s: float = 0.0


@dataclass(slots=True, eq=False)
class _Cancelled(Generic[TicketT]):
    """A cancelled load whose last copies may be under way."""

    tickets: Sequence[TicketT]
    lowest: int
    """The lowest address that they write."""
    holds: bool = False
    """Steps wait for it."""


class WeightLoads(Generic[TicketT]):
    """The loads of one slice. Not thread-safe: they belong to the slice's thread.

    CUDA's errors leave every method; the process must not serve another request then.
    """

    def __init__(
        self, cache: HbmCache, copies: LoadCopies[TicketT], clock: Callable[[], float],
        fatal: Callable[[Exception], bool], part_bytes: int = _PART_BYTES,
    ) -> None:  # fmt: skip
        """An exception for which `fatal` is true is raised; another refuses one load."""
        self._part_bytes = part_bytes
        self._cache = cache
        self._copies = copies
        self._clock = clock
        self._fatal = fatal
        self._loads: list[_Load[TicketT]] = []
        """Loads under way, in the order they were asked for."""
        self._shown: set[str] = set()
        self._cancelled: list[_Cancelled[TicketT]] = []
        self._outcomes: list[LoadOutcome] = []
        self._warned: set[str] = set()
        """Models whose refusal was logged."""
        self.counts = LoadCounts()

    @property
    def waiting(self) -> bool:
        """Whether a load waits for the pool, which notifies of nothing."""
        return any(load.places is None for load in self._loads)

    def over_link(self, model: str) -> bool:
        """Return whether steps of a model read it over a link: it is neither in HBM nor loading."""
        return model not in self._shown and self._load(model) is None

    def arrived(self, model: str) -> int | None:
        """Return how many of a model's layers steps may read in HBM, the first ones. Others are on
        their way there. None: no load of the model is under way."""
        load = self._load(model)
        if load is not None:
            self._show(load)
        return None if load is None or load not in self._loads else load.shown

    def _load(self, model: str) -> _Load[TicketT] | None:
        return next((one for one in self._loads if one.model == model), None)

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
        """Show what has arrived, begin what may begin, and return how loads ended."""
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
        for one in self._cancelled:
            if one.lowest < limit and not one.holds:
                for ticket in self._under_way(one):
                    self._copies.hold_steps(ticket)
                    one.holds = True

    def drop(self) -> None:
        """Cancel all loads: a step has failed, and the slice's parts are built anew. Models that
        are shown stay, because all of them was there."""
        for load in list(self._loads):
            self._refuse(load.model, "a step has failed")

    def synchronize(self) -> None:
        """Wait for all copies that are submitted."""
        self._copies.synchronize()

    # ---- copies ---------------------------------------------------------------------------------

    def _advance(self) -> None:
        for one in [one for one in self._cancelled if not self._under_way(one)]:
            self._cancelled.remove(one)
            self.counts.copied_bytes += sum(map(self._copies.moved_bytes, one.tickets))
        for load in [one for one in self._loads if one.places is None]:
            self._take_places(load)
        if not self._cancelled:
            for load in self._loads:
                self._submit(load)
        for load in list(self._loads):
            self._show(load)

    def _under_way(self, cancelled: _Cancelled[TicketT]) -> list[TicketT]:
        return [one for one in cancelled.tickets if not self._copies.is_over(one)]

    def _take_places(self, load: _Load[TicketT]) -> None:
        """Take places for a load, unless it has to wait for the pool."""
        try:
            layers = load.locate()
        except Exception as fault:
            if self._fatal(fault):
                raise
            self._refuse(load.model, f"{type(fault).__name__}: {fault}")
            return
        if layers is None:
            return
        weights = [w for layer in layers for w in layer]
        places = self._cache.reserve(load.model, weights)
        if places is None:
            size = sum(w.bytes for w in weights)
            self._refuse(load.model, f"its {size} bytes have no places above the KV")
            return
        load.layers, load.places = layers, places

    def _submit(self, load: _Load[TicketT]) -> None:
        """Begin the copies of a load that has places, unless they are begun."""
        if load.places is None or load.submitted:
            return
        load.submitted = True
        load.begun_s = self._clock()
        places = iter(load.places)
        for layers, weights in self._cut(load.layers):
            sources = [self._cache.location(w) for w in weights]
            ticket = self._copies.submit([
                LoadCopy(next(places).pointer, source.pointer, source.bytes, source.home)
                for source in sources
            ])  # fmt: skip
            load.parts.append(_Part(ticket, weights, layers))

    def _cut(self, layers: Layers) -> Iterator[tuple[int, Sequence[WeightHandle]]]:
        """Yield the matrices of each part, and how many layers there are up to its end."""
        part: list[WeightHandle] = []
        for number, weights in enumerate(layers, 1):
            part += weights
            if number == len(layers) or sum(w.bytes for w in part) >= self._part_bytes:
                yield number, part
                part = []

    def _show(self, load: _Load[TicketT]) -> None:
        """Show the parts of a load that are there, as far as all before them are."""
        while load.parts and self._copies.is_over(load.parts[0].ticket):
            part = load.parts.popleft()
            load.shown = part.layers
            self.counts.copied_bytes += self._copies.moved_bytes(part.ticket)
            self._cache.show(part.weights, last=not load.parts)
            if not load.parts:
                self._arrived(load)

    def _arrived(self, load: _Load[TicketT]) -> None:
        self._loads.remove(load)
        self._shown.add(load.model)
        now = self._clock()
        took_s = now - load.begun_s
        self.counts.seconds += took_s
        self._outcomes.append(LoadOutcome(load.model, took_s))
        for other in self._loads:
            other.begun_s = now  # its copies come after these

    # ---- endings --------------------------------------------------------------------------------

    def _leave(self, model: str) -> None:
        """Give a model's places back, and begin no more copies of it."""
        for load in [one for one in self._loads if one.model == model]:
            self._loads.remove(load)
            self.counts.cancelled += load.places is not None
            if load.parts and load.places:
                tickets = [part.ticket for part in load.parts]
                for ticket in tickets:
                    self._copies.cancel(ticket)
                lowest = min(place.pointer for place in load.places)
                self._cancelled.append(_Cancelled(tickets, lowest))
        self._shown.discard(model)
        self._cache.release(model)

    def _refuse(self, model: str, reason: str) -> None:
        self._leave(model)
        self.counts.refused += 1
        self._outcomes.append(LoadOutcome(model, refused=True))
        if model not in self._warned:
            self._warned.add(model)
            log.warning("weights of %s stream, they are not kept in HBM: %s", model, reason)
