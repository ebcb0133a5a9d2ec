"""Accounting of a slice's KV arena: slabs, blocks, and the prefix cache.

    arena  [ slab | slab | slab | slab | ... ]     a span of slabs belongs to one model at a time
    span   [ block | block | block |  rest  ]      and holds as many of its blocks as fit

A block is named by its byte offset in the arena. It is *free*, *held* (by one sequence or more), or
*cached*: held by none, but full, computed and addressable by the hash of the tokens up to its end.
Handing a slab from model to model copies nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Span:
    first_slab: int
    slabs: int
    blocks: int
    held: int = 0
    used: int = 0
    """Last tick at which one of its blocks was touched."""


@dataclass(slots=True)
class _Block:
    span: _Span
    holders: int = 0
    hash: int | None = None


@dataclass(slots=True)
class _ModelKv:
    block_bytes: int
    span_slabs: int
    per_span: int
    free: list[int] = field(default_factory=list[int])
    blocks: dict[int, _Block] = field(default_factory=dict[int, _Block])
    by_hash: dict[int, int] = field(default_factory=dict[int, int])
    cached: dict[int, None] = field(default_factory=dict[int, None])
    """Offsets, least recently released first."""
    spans: list[_Span] = field(default_factory=list[_Span])


class KvArena:
    def __init__(self, kv_bytes: int, slab_bytes: int) -> None:
        self.slab_bytes = slab_bytes
        self.slabs = kv_bytes // slab_bytes
        self._taken = bytearray(self.slabs)
        self._models: dict[str, _ModelKv] = {}
        self._tick = 0

    @property
    def held_bytes(self) -> int:
        return sum(
            kv.block_bytes * sum(span.held for span in kv.spans) for kv in self._models.values()
        )

    def add_model(self, model: str, block_bytes: int) -> None:
        slabs = -(-block_bytes // self.slab_bytes)
        per_span = slabs * self.slab_bytes // block_bytes
        self._models[model] = _ModelKv(block_bytes, slabs, per_span)

    def remove_model(self, model: str) -> None:
        """Give all of its slabs back. None of its blocks may be held."""
        kv = self._models.pop(model)
        for span in kv.spans:
            assert span.held == 0, f"{model} still holds KV"
            self._give_back(span)

    def capacity(self, model: str) -> int:
        """Blocks the whole arena could hold for the model."""
        kv = self._models[model]
        return self.slabs // kv.span_slabs * kv.per_span

    def available(self, model: str) -> int:
        """Blocks the model could have now, at the expense of everything cached."""
        kv = self._models[model]
        own = len(kv.free) + len(kv.cached)
        idle = self._taken.count(0) + sum(
            span.slabs for name, other in self._models.items() if name != model
            for span in other.spans if span.held == 0
        )  # fmt: skip
        return own + idle // kv.span_slabs * kv.per_span

    # ---- prefix cache ---------------------------------------------------------------------------

    def match(self, model: str, hashes: Sequence[int]) -> list[int]:
        """The longest run of cached blocks from the start, now held by the caller."""
        kv = self._models[model]
        found: list[int] = []
        for value in hashes:
            offset = kv.by_hash.get(value)
            if offset is None:
                break
            found.append(offset)
        for offset in found:
            self._hold(kv, offset)
        return found

    def seal(self, model: str, offset: int, value: int) -> None:
        """A held block is full and computed: it can be found by its hash from now on (unless
        another one already can)."""
        kv = self._models[model]
        if value not in kv.by_hash:
            kv.by_hash[value] = offset
            kv.blocks[offset].hash = value

    # ---- blocks ---------------------------------------------------------------------------------

    def allocate(self, model: str, count: int) -> list[int] | None:
        """`count` blocks, held by the caller, or None and nothing changed but cached blocks gone.
        Free blocks first, then free slabs, then cached blocks and idle slabs of any model, least
        recently used first."""
        kv = self._models[model]
        while len(kv.free) < count:
            if not (self._grow(kv) or self._take_idle_span(kv) or self._forget_one(kv)):
                return None
        taken = [kv.free.pop() for _ in range(count)]
        for offset in taken:
            self._hold(kv, offset)
        return taken

    def release(self, model: str, offsets: Sequence[int]) -> None:
        kv = self._models[model]
        self._tick += 1
        for offset in reversed(offsets):  # a prefix is forgotten from its end
            block = kv.blocks[offset]
            block.holders -= 1
            if block.holders:
                continue
            block.span.held -= 1
            block.span.used = self._tick
            if block.hash is None:
                kv.free.append(offset)
            else:
                kv.cached[offset] = None

    def _hold(self, kv: _ModelKv, offset: int) -> None:
        block = kv.blocks[offset]
        if block.holders == 0:
            kv.cached.pop(offset, None)
            block.span.held += 1
        block.holders += 1

    def _grow(self, kv: _ModelKv) -> bool:
        first = self._taken.find(bytes(kv.span_slabs))
        if first < 0:
            return False
        self._taken[first : first + kv.span_slabs] = b"\1" * kv.span_slabs
        span = _Span(first, kv.span_slabs, kv.per_span)
        kv.spans.append(span)
        base = first * self.slab_bytes
        offsets = [base + i * kv.block_bytes for i in range(kv.per_span)]
        kv.blocks.update((offset, _Block(span)) for offset in offsets)
        kv.free += reversed(offsets)
        return True

    def _take_idle_span(self, kv: _ModelKv) -> bool:
        """Free the least recently used span of another model that holds nothing."""
        idle = [
            (span.used, span.first_slab, span, other)
            for other in self._models.values() if other is not kv
            for span in other.spans if span.held == 0
        ]  # fmt: skip
        if not idle:
            return False
        _, _, span, owner = min(idle, key=lambda item: item[:2])
        self._drop_span(owner, span)
        return True

    def _forget_one(self, kv: _ModelKv) -> bool:
        if not kv.cached:
            return False
        offset = next(iter(kv.cached))
        self._forget(kv, offset)
        kv.free.append(offset)
        return True

    def _forget(self, kv: _ModelKv, offset: int) -> None:
        kv.cached.pop(offset)
        block = kv.blocks[offset]
        assert block.hash is not None
        del kv.by_hash[block.hash]
        block.hash = None

    def _drop_span(self, kv: _ModelKv, span: _Span) -> None:
        base = span.first_slab * self.slab_bytes
        offsets = [base + i * kv.block_bytes for i in range(span.blocks)]
        gone = set(offsets)
        for offset in offsets:
            if offset in kv.cached:
                self._forget(kv, offset)
            del kv.blocks[offset]
        kv.free = [offset for offset in kv.free if offset not in gone]
        kv.spans.remove(span)
        self._give_back(span)

    def _give_back(self, span: _Span) -> None:
        self._taken[span.first_slab : span.first_slab + span.slabs] = bytes(span.slabs)
