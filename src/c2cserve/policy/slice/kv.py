"""Accounting of a slice's KV arena: slabs, blocks, and the prefix cache.

    arena  [ slab | slab | slab | slab | ... ]     a span of slabs belongs to one model at a time
    span   [ block | block | block |  rest  ]      and holds as many of its blocks as fit

A block is named by its byte offset in the arena. It is *free*, *held* by one sequence or more, or
*cached*. A cached block is held by none, but is addressable by the hash of the tokens up to its
end. A span in which nothing is held or cached goes back to the arena at once. Handing slabs from
model to model copies nothing."""

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Sealed(NamedTuple):
    """A block that can be found by its hash. The number is another one each time that it is sealed:
    an equal `Sealed` is the same bytes, unchanged."""

    offset: int
    number: int


@dataclass(slots=True, eq=False)
class _Span:
    first_slab: int
    free: list[int]
    """Offsets; the last one is taken next."""
    held: int = 0
    cached: int = 0


@dataclass(slots=True, eq=False)
class _ModelKv:
    """Spans begin at multiples of `span_slabs`, so that a model which has the arena to itself
    always gets all of it, whatever was there before. (What is consumed from its front is an
    OrderedDict: finding a dict's first key takes as long as there were deleted ones before it.)"""

    block_bytes: int
    span_slabs: int
    per_span: int
    spans: dict[int, _Span] = field(default_factory=dict[int, _Span])
    """First slab -> span."""
    roomy: OrderedDict[int, _Span] = field(default_factory=OrderedDict[int, _Span])
    """Those with free blocks. Free blocks are used up before another span is taken."""
    filling: _Span | None = None
    """The first of these, once it was looked up."""
    idle: OrderedDict[_Span, int] = field(default_factory=OrderedDict[_Span, int])
    """Spans with cached blocks only, and the tick of their last release; oldest first."""
    hashes: dict[int, int] = field(default_factory=dict[int, int])
    """Offset -> hash of blocks that can be found again, held or cached."""
    by_hash: dict[int, Sealed] = field(default_factory=dict[int, Sealed])
    sharers: dict[int, int] = field(default_factory=dict[int, int])
    """Offset -> holders beside the first."""
    cached: OrderedDict[int, int] = field(default_factory=OrderedDict[int, int])
    """Offset -> tick of its release; oldest first."""
    free: int = 0
    held: int = 0


class KvArena:
    def __init__(self, kv_bytes: int, slab_bytes: int) -> None:
        self.slab_bytes = slab_bytes
        self.slabs = self._roomy_slabs = kv_bytes // slab_bytes
        self.size = self.slabs * slab_bytes
        """Bytes."""
        self._taken = bytearray(self.slabs)
        self._busy = bytearray(self.slabs)
        """Slabs in which something is held: what eviction cannot free."""
        self._untaken = self._idle = self.slabs
        """Number of slabs that are not taken, and of those that are not busy."""
        self._withheld = 0
        """Slabs that hold something else, wherever they lie."""
        self.weights_above = False
        """What is withheld lies at the arena's end, where a real slice has its weights. KV grows
        below it, and what is cached there makes way for it first."""
        self._models: dict[str, _ModelKv] = {}
        self._tick = 0
        self._seals = 0

    @property
    def end_bytes(self) -> int:
        """Below it lies all that is held or cached: slabs are taken from the front."""
        return (self._taken.rfind(1) + 1) * self.slab_bytes

    @property
    def held_end_bytes(self) -> int:
        """Below it lies all that is held. What is cached above it can make way at once."""
        return (self._busy.rfind(1) + 1) * self.slab_bytes

    @property
    def held_bytes(self) -> int:
        return sum(kv.block_bytes * kv.held for kv in self._models.values())

    def add_model(self, model: str, block_bytes: int) -> None:
        slabs = -(-block_bytes // self.slab_bytes)
        self._models[model] = _ModelKv(block_bytes, slabs, slabs * self.slab_bytes // block_bytes)

    def remove_model(self, model: str) -> None:
        """Give all of its slabs back. None of its blocks may be held."""
        kv = self._models.pop(model)
        assert kv.held == 0, f"{model} still holds KV"
        for span in kv.spans.values():
            self._take(kv, span, 0)

    def capacity(self, model: str, withheld: int = 0) -> int:
        """Return the blocks that the arena without so many slabs could hold for the model."""
        kv = self._models[model]
        return max(0, self.slabs - withheld) // kv.span_slabs * kv.per_span

    def available(self, model: str) -> int:
        """Return the blocks that the model could have now if nothing was cached. It is exact."""
        kv = self._models[model]
        room = self._idle - self._withheld - len(kv.idle) * kv.span_slabs
        if kv.span_slabs == 1:
            spans = room
        else:
            places = sum(
                first not in kv.spans and not any(self._busy[first : first + kv.span_slabs])
                for first in self._places(kv)
            )
            spans = min(places, room // kv.span_slabs)
        return kv.free + len(kv.cached) + spans * kv.per_span

    @property
    def free_slabs(self) -> int:
        """Those in which no KV is held, withheld ones too."""
        return self._idle

    def limit_cache(self, share: float) -> None:
        """Let what is cached make way before the arena's used part grows beyond a share of it."""
        self._roomy_slabs = int(self.slabs * share)
        self._forget_above(self._roomy_slabs)

    def withhold(self, slabs: int) -> None:
        """So many slabs hold something else than KV from now on, wherever they lie: at most
        `free_slabs`. What is cached makes way."""
        assert slabs <= self.free_slabs, "KV is held there"
        self._withheld = slabs
        if self.weights_above:
            self._forget_above(self.slabs - slabs)
        while self._untaken < slabs:
            idle = (
                (tick, span.first_slab, kv, span)
                for kv in self._models.values()
                for span, tick in itertools.islice(kv.idle.items(), 1)
            )
            _, _, kv, span = min(idle, key=lambda one: one[:2])
            self._forget_span(kv, span)

    def _forget_above(self, slab: int) -> None:
        """Forget spans with cached blocks only that reach beyond a slab."""
        for kv in self._models.values():
            for span in list(kv.idle) if kv.idle else ():
                if span.first_slab + kv.span_slabs > slab:
                    self._forget_span(kv, span)

    # ---- prefix cache ---------------------------------------------------------------------------

    def match(self, model: str, hashes: Sequence[int]) -> list[int]:
        """Return the longest run of cached blocks from the start, which the caller holds now."""
        kv = self._models[model]
        found: list[int] = []
        for value in hashes:
            sealed = kv.by_hash.get(value)
            if sealed is None:
                break
            found.append(sealed.offset)
        for offset in found:
            self._hold(kv, offset)
        return found

    def seal(self, model: str, offset: int, value: int) -> None:
        """A held block is full and computed: it can be found by its hash from now on (unless
        another one already can)."""
        kv = self._models[model]
        if offset not in kv.hashes and value not in kv.by_hash:
            self._seals += 1
            kv.by_hash[value] = Sealed(offset, self._seals)
            kv.hashes[offset] = value

    def sealed(self, model: str, value: int) -> Sealed | None:
        """Return the block with this hash. None: there is none, or the model is gone."""
        kv = self._models.get(model)
        return None if kv is None else kv.by_hash.get(value)

    def unseal(self, model: str, offsets: Sequence[int]) -> None:
        """Make these blocks, held by the caller, impossible to find. Their holders keep them."""
        kv = self._models[model]
        for offset in offsets:
            value = kv.hashes.pop(offset, None)
            if value is not None:
                del kv.by_hash[value]

    # ---- blocks ---------------------------------------------------------------------------------

    def allocate(self, model: str, count: int) -> list[int] | None:
        """`count` blocks, held by the caller, or None and nothing changed. Free blocks first, then
        free slabs, then what has been cached longest: own blocks, or whole spans of others."""
        kv = self._models[model]
        if kv.free < count and self.available(model) < count:
            return None
        taken: list[int] = []
        while len(taken) < count:
            span = kv.filling
            if span is None:
                span = next(iter(kv.roomy.values())) if kv.roomy else self._grow(kv)
                if span is None:
                    self._evict_oldest(kv)
                    continue
                kv.filling = span
            more = min(len(span.free), count - len(taken))
            taken = taken + span.free[-more:] if taken else span.free[-more:]
            del span.free[-more:]
            if not span.free:
                self._not_roomy(kv, span)
            self._held(kv, span, more)
            kv.free -= more
        return taken

    def _not_roomy(self, kv: _ModelKv, span: _Span) -> None:
        del kv.roomy[span.first_slab]
        if kv.filling is span:
            kv.filling = None

    def release(self, model: str, offsets: Sequence[int]) -> None:
        """Give up blocks that the caller holds. A block with a hash stays cached while there is
        room."""
        kv = self._models[model]
        self._tick += 1
        hashes, sharers, end = kv.hashes, kv.sharers, len(offsets)
        plain = not hashes and not sharers
        while end:  # a prefix is forgotten from its end
            offset = offsets[end - 1]
            if not plain and (offset in hashes or offset in sharers):
                end -= 1
                self._unhold(kv, offset)
                continue
            span, first = self._span_of(kv, offset), end - 1
            low = span.first_slab * self.slab_bytes
            high = low + kv.span_slabs * self.slab_bytes
            while first and low <= (before := offsets[first - 1]) < high:
                if not plain and (before in hashes or before in sharers):
                    break
                first -= 1
            if span.held == end - first and not span.cached:
                self._empty(kv, span)
            else:
                freed = list(offsets[first:end])
                freed.reverse()
                self._free(kv, span, freed)
                self._unheld(kv, span, len(freed))
            end = first

    def _unhold(self, kv: _ModelKv, offset: int) -> None:
        """One holder less of a block that is shared or can be found again."""
        if offset in kv.sharers:
            kv.sharers[offset] -= 1
            if not kv.sharers[offset]:
                del kv.sharers[offset]
            return
        span = self._span_of(kv, offset)
        kv.cached[offset] = self._tick
        span.cached += 1
        self._unheld(kv, span, 1)

    def _span_of(self, kv: _ModelKv, offset: int) -> _Span:
        return kv.spans[offset // self.slab_bytes // kv.span_slabs * kv.span_slabs]

    def _hold(self, kv: _ModelKv, offset: int) -> None:
        if offset in kv.cached:
            del kv.cached[offset]
            span = self._span_of(kv, offset)
            span.cached -= 1
            self._held(kv, span, 1)
        else:
            kv.sharers[offset] = kv.sharers.get(offset, 0) + 1

    def _held(self, kv: _ModelKv, span: _Span, count: int) -> None:
        if span.held == 0:
            kv.idle.pop(span, None)
            self._occupy(kv, span, 1)
        span.held += count
        kv.held += count

    def _unheld(self, kv: _ModelKv, span: _Span, count: int) -> None:
        span.held -= count
        kv.held -= count
        assert span.held >= 0, "a block is released that nobody held"
        if span.held == 0:
            self._occupy(kv, span, 0)
            if span.cached:
                kv.idle[span] = self._tick
            else:
                self._drop_span(kv, span)

    def _empty(self, kv: _ModelKv, span: _Span) -> None:
        """Give the arena a span with all of its held blocks, and nothing that is cached."""
        if span.free:
            self._not_roomy(kv, span)
        kv.free -= len(span.free)
        kv.held -= span.held
        span.held = 0
        self._occupy(kv, span, 0)
        del kv.spans[span.first_slab]
        self._take(kv, span, 0)

    def _free(self, kv: _ModelKv, span: _Span, offsets: Sequence[int]) -> None:
        if not span.free:
            kv.roomy[span.first_slab] = span
        span.free += offsets
        kv.free += len(offsets)

    # ---- slabs ----------------------------------------------------------------------------------

    def _places(self, kv: _ModelKv) -> range:
        return range(0, self.slabs - kv.span_slabs + 1, kv.span_slabs)

    def _take(self, kv: _ModelKv, span: _Span, value: int) -> None:
        """Mark the slabs of a span that was not taken (1) or was (0)."""
        _mark(self._taken, kv, span, value)
        self._untaken += kv.span_slabs if value == 0 else -kv.span_slabs

    def _occupy(self, kv: _ModelKv, span: _Span, value: int) -> None:
        """Mark the slabs of a span that was not busy (1) or was (0)."""
        _mark(self._busy, kv, span, value)
        self._idle += kv.span_slabs if value == 0 else -kv.span_slabs

    def _grow(self, kv: _ModelKv) -> _Span | None:
        """Take one more span, whose blocks are all free."""
        if kv.span_slabs == 1:
            first = self._taken.find(0)
        else:
            free = (p for p in self._places(kv) if not any(self._taken[p : p + kv.span_slabs]))
            first = next(free, -1)
        full = self._untaken - self._withheld < kv.span_slabs
        if full or first < 0 or (first >= self._roomy_slabs and self._can_evict(kv)):
            return None
        base, size = first * self.slab_bytes, kv.block_bytes
        span = _Span(first, list(range(base + (kv.per_span - 1) * size, base - 1, -size)))
        self._take(kv, span, 1)
        kv.spans[first] = kv.roomy[first] = span
        kv.free += kv.per_span
        return span

    def _can_evict(self, kv: _ModelKv) -> bool:
        return bool(kv.cached) or any(one.idle for one in self._models.values() if one is not kv)

    def _evict_oldest(self, kv: _ModelKv) -> None:
        """Forget the model's own oldest cached block, or another's oldest idle span: whichever was
        used less recently."""
        own, own_tick = next(iter(kv.cached.items()), (-1, self._tick + 1))
        oldest = (own_tick, -1)
        victim: tuple[_ModelKv, _Span] | None = None
        for other in self._models.values():
            span, tick = next(iter(other.idle.items()), (None, 0))
            if other is not kv and span is not None and (tick, span.first_slab) < oldest:
                oldest, victim = (tick, span.first_slab), (other, span)
        if victim is None:
            self._forget(kv, own)
            return
        self._forget_span(*victim)

    def _forget_span(self, owner: _ModelKv, span: _Span) -> None:
        """Forget all that is cached in a span in which nothing is held."""
        base = span.first_slab * self.slab_bytes
        for offset in range(base, base + owner.per_span * owner.block_bytes, owner.block_bytes):
            if offset in owner.cached:
                self._forget(owner, offset)

    def _forget(self, kv: _ModelKv, offset: int) -> None:
        """Free a cached block, and its span too if it was the last."""
        del kv.cached[offset]
        del kv.by_hash[kv.hashes.pop(offset)]
        span = self._span_of(kv, offset)
        span.cached -= 1
        self._free(kv, span, (offset,))
        if not span.held and not span.cached:
            del kv.idle[span]
            self._drop_span(kv, span)

    def _drop_span(self, kv: _ModelKv, span: _Span) -> None:
        """Give the arena the slabs of a span in which nothing is held or cached."""
        kv.free -= kv.per_span
        del kv.spans[span.first_slab]
        self._not_roomy(kv, span)
        self._take(kv, span, 0)


def _mark(slabs: bytearray, kv: _ModelKv, span: _Span, value: int) -> None:
    for slab in range(span.first_slab, span.first_slab + kv.span_slabs):
        slabs[slab] = value
