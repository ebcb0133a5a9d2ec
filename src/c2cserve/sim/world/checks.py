"""Invariants that hold for any policy, asserted at every step that a slice gets."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from c2cserve.core.actions import BringPrefix, DropPrefix, Move, SavePrefix
from c2cserve.core.machine import Slice
from c2cserve.core.model import ModelSpec
from c2cserve.core.request import BLOCK_TOKENS
from c2cserve.core.step import SeqStep
from c2cserve.sim.world.requests import TrackedRequest


@dataclass(slots=True, eq=False)
class SeqState:
    """A request as its slice's executor sees it."""

    tracked: TrackedRequest
    spec: ModelSpec
    length: int
    """Tokens so far: prompt and sampled."""
    sampled: int = 0
    """Tokens sampled on this slice."""
    computed: int = 0
    blocks: list[int] = field(default_factory=list[int])
    swapping_out: list[int] = field(default_factory=list[int])
    """Blocks whose KV is moving to the host."""
    swapping_in: list[int] = field(default_factory=list[int])
    """Blocks whose KV moves or has moved from the host. A fresh step takes them over."""
    on_host: int = 0
    """Tokens whose KV is in host memory while the request is rotated out."""
    moving: bool = False


@dataclass(slots=True, eq=False)
class BlockBook:
    """The holders of each block of a slice's arena.

    Blocks are conserved. Each lies in the arena, in slabs with blocks of one model only. It has one
    holder unless it is a shared prefix."""

    slice: Slice
    sharers: dict[int, int] = field(default_factory=dict[int, int])
    """Block with several holders -> number of holders beside the first."""
    owners: list[str] = field(init=False)
    """The last model with a block that begins in each slab,"""
    held: list[int] = field(init=False)
    """and which of those are held: bit n stands for the nth that may begin there."""
    held_bytes: int = 0
    weight_bytes: int = 0
    """Bytes of models that are in the slice's memory as a whole."""

    def __post_init__(self) -> None:
        slabs = -(-self.slice.kv_bytes // self.slice.slab_bytes)
        self.owners, self.held = [""] * slabs, [0] * slabs

    def weigh(self, weight_bytes: int) -> None:
        """Update the bytes of weights."""
        self.weight_bytes = weight_bytes
        self._check_memory()

    def _check_memory(self) -> None:
        assert self.held_bytes <= self.slice.kv_bytes, "more KV than memory"
        room = self.slice.hbm_bytes
        assert not room or self.held_bytes + self.weight_bytes <= room, "more than the memory holds"

    def begin(self, seq: SeqState, part: SeqStep, times: int) -> None:
        """A step is about to compute `part` of the sequence, so many times."""
        shared = 0
        if part.fresh and seq.swapping_in:
            assert not seq.moving, f"{part.request_id}: runs while its KV is on its way"
            assert part.start == seq.on_host, f"{part.request_id}: it did not stop here"
            self._give(seq, seq.swapping_in)
            seq.computed, seq.swapping_in, seq.on_host = part.start, [], 0
        elif part.fresh:
            self.release(seq)
            seq.computed = part.start
            assert part.start % BLOCK_TOKENS == 0, "a prefix ends inside a block"
            shared = part.start // BLOCK_TOKENS
        if part.new_blocks:
            self._claim(seq, part.new_blocks, shared)
            seq.blocks += part.new_blocks
        end = part.start + part.tokens * times
        name = part.request_id
        assert part.tokens >= 1, f"{name}: nothing to compute"
        assert end <= len(seq.blocks) * BLOCK_TOKENS, f"{name}: no block for its KV"

    def _claim(self, seq: SeqState, offsets: Sequence[int], shared: int) -> None:
        """Give the blocks a holder. The first `shared` of them may have others already."""
        if shared:
            offsets = [
                offset for number, offset in enumerate(offsets)
                if number >= shared or not self._shares(seq, offset)
            ]  # fmt: skip
        if not offsets:
            return
        size, model = seq.spec.kv_block_bytes, seq.spec.id
        end, slab_bytes = self.slice.kv_bytes - size, self.slice.slab_bytes
        self.held_bytes += size * len(offsets)
        owners, held = self.owners, self.held
        slab = base = bits = -1
        for offset in list(offsets):
            assert 0 <= offset <= end, "a block lies outside of the arena"
            if slab < 0 or not base <= offset < base + slab_bytes:  # many lie in one slab
                if slab >= 0:
                    held[slab] = bits
                slab = offset // slab_bytes
                base, bits = slab * slab_bytes, held[slab]
                assert not bits or owners[slab] == model, "a slab holds blocks of two models"
                owners[slab] = model
            bit = 1 << (offset - base) // size
            assert not bits & bit, "a block has two owners"
            bits |= bit
        held[slab] = bits
        self._check_memory()

    def _shares(self, seq: SeqState, offset: int) -> bool:
        """Return whether another sequence holds the block, and count one holder more."""
        slab_bytes = self.slice.slab_bytes
        slab = offset // slab_bytes
        bit = 1 << (offset - slab * slab_bytes) // seq.spec.kv_block_bytes
        if self.owners[slab] != seq.spec.id or not self.held[slab] & bit:
            return False
        self.sharers[offset] = self.sharers.get(offset, 0) + 1
        return True

    def _give(self, seq: SeqState, offsets: Sequence[int]) -> None:
        if self.sharers:
            offsets = [offset for offset in offsets if not self._has_sharer(offset)]
        if not offsets:
            return
        size, held, slab_bytes = seq.spec.kv_block_bytes, self.held, self.slice.slab_bytes
        self.held_bytes -= size * len(offsets)
        slab = base = bits = -1
        for offset in list(offsets):
            if slab < 0 or not base <= offset < base + slab_bytes:
                if slab >= 0:
                    held[slab] = bits
                slab = offset // slab_bytes
                base, bits = slab * slab_bytes, held[slab]
            bit = 1 << (offset - base) // size
            assert bits & bit, "a block is given back that has no holder"
            bits ^= bit
        held[slab] = bits

    def _has_sharer(self, offset: int) -> bool:
        """Return whether another sequence holds the block too, and count one holder less."""
        more = self.sharers.get(offset)
        if more is None:
            return False
        if more == 1:
            del self.sharers[offset]
        else:
            self.sharers[offset] = more - 1
        return True

    def release(self, seq: SeqState) -> None:
        """Free the KV of a sequence, on the host too."""
        self._give(seq, seq.blocks)
        self._give(seq, seq.swapping_in)
        seq.blocks, seq.swapping_in = [], []
        seq.computed = seq.on_host = 0

    def move(self, seq: SeqState, move: Move) -> None:
        """Begin a move. The moved blocks stay held until it is done, blocks after them are free."""
        name = move.request_id
        assert not seq.moving, f"{name}: two moves at a time"
        seq.moving = True
        blocks = list(move.blocks)
        if move.direction == "in":
            assert seq.on_host, f"{name}: nothing of it is on the host"
            assert not seq.blocks, f"{name}: it is still here"
            self._claim(seq, blocks, 0)
            seq.swapping_in = blocks
            return
        assert blocks == seq.blocks[move.first : move.first + len(blocks)], f"{name}: not its KV"
        if move.direction == "out":
            seq.swapping_out = blocks
            seq.on_host = seq.computed
            self._give(seq, [offset for offset in seq.blocks if offset not in set(blocks)])
            seq.blocks = []

    def moved(self, seq: SeqState) -> None:
        """End the move of a sequence."""
        self._give(seq, seq.swapping_out)
        seq.swapping_out, seq.moving = [], False


@dataclass(slots=True, eq=False)
class PrefixBook:
    """The blocks of cached prefixes in a slice's host memory.

    None is read before it has arrived, none goes while it moves, and all have room."""

    slice: Slice
    used_bytes: int = 0
    _sizes: dict[int, int] = field(default_factory=dict[int, int])
    _saving: set[int] = field(default_factory=set[int])
    _reading: Counter[int] = field(default_factory=Counter[int])

    def begin(self, action: SavePrefix | BringPrefix) -> None:
        """Begin a move."""
        ids, size = action.ids, action.block_bytes
        assert len(set(action.blocks)) == len(ids), "two blocks have one place"
        if isinstance(action, BringPrefix):
            assert all(self._sizes.get(one) == size for one in ids), "a block is not on the host"
            assert self._saving.isdisjoint(ids), "a block is read that has not arrived"
            self._reading.update(ids)
            return
        assert self._sizes.keys().isdisjoint(ids), "a block is on the host already"
        self._sizes.update(dict.fromkeys(ids, size))
        self._saving.update(ids)
        self.used_bytes += size * len(ids)
        assert self.used_bytes <= self.slice.host_kv_bytes, "more prefixes than room"

    def move(self, move: Move) -> None:
        """Begin a move of a request whose copies are partly a prefix's."""
        assert not self._saving.intersection(move.ids), "a block is read that has not arrived"
        assert self._sizes.keys() >= set(move.ids), "a block is not on the host"
        self._reading.update(move.ids)

    def moved(self, move: Move) -> None:
        """End it."""
        self._reading.subtract(move.ids)

    def end(self, action: SavePrefix | BringPrefix) -> None:
        """End a move."""
        if isinstance(action, BringPrefix):
            self._reading.subtract(action.ids)
        else:
            self._saving.difference_update(action.ids)

    def drop(self, action: DropPrefix) -> None:
        """Free blocks."""
        for one in action.ids:
            assert one not in self._saving, "a block goes that has not arrived"
            assert not self._reading[one], "a block goes that is read"
            self.used_bytes -= self._sizes.pop(one)
