"""What must hold whatever a policy decides; asserted at every step that is given to a slice."""

from dataclasses import dataclass, field

from c2cserve.core.machine import Slice
from c2cserve.core.model import ModelSpec
from c2cserve.core.request import BLOCK_TOKENS
from c2cserve.core.step import SeqStep
from c2cserve.sim.jobs import Job


@dataclass(slots=True, eq=False)
class SeqState:
    """A request as its slice's executor knows it."""

    job: Job
    spec: ModelSpec
    length: int
    """Known tokens: prompt and drawn."""
    computed: int = 0
    blocks: list[int] = field(default_factory=list[int])


@dataclass(slots=True, eq=False)
class BlockBook:
    """Who holds which block of a slice's arena. Blocks are conserved: each lies in the arena, in
    slabs that hold one model's blocks only, and has one holder unless it is a shared prefix."""

    slice: Slice
    holders: dict[int, int] = field(default_factory=dict[int, int])
    """Offset -> sequences that hold it."""
    slabs: dict[int, tuple[str, int]] = field(default_factory=dict[int, tuple[str, int]])
    """First slab of a block -> model, held blocks that begin in it."""
    held_bytes: int = 0

    def begin(self, seq: SeqState, part: SeqStep) -> None:
        """A step is about to compute `part` of the sequence."""
        if part.fresh:
            self.release(seq)
            seq.computed = part.start
            assert part.start % BLOCK_TOKENS == 0, "a prefix ends inside a block"
            shared = part.start // BLOCK_TOKENS
        else:
            shared = 0
        for index, offset in enumerate(part.new_blocks):
            self._take(seq, offset, shared=index < shared)
        end = part.start + part.tokens
        name = part.request_id
        assert part.tokens >= 1, f"{name}: nothing to compute"
        assert end <= len(seq.blocks) * BLOCK_TOKENS, f"{name}: no block for its KV"

    def _take(self, seq: SeqState, offset: int, *, shared: bool) -> None:
        size = seq.spec.kv_block_bytes
        assert 0 <= offset <= self.slice.kv_bytes - size, "a block lies outside of the arena"
        count = self.holders.get(offset, 0)
        assert not count or shared, "a block has two owners"
        self.holders[offset] = count + 1
        seq.blocks.append(offset)
        if not count:
            self.held_bytes += size
            slab = offset // self.slice.slab_bytes
            model, blocks = self.slabs.get(slab, (seq.spec.id, 0))
            assert model == seq.spec.id, "a slab holds blocks of two models"
            self.slabs[slab] = (model, blocks + 1)
            assert self.held_bytes <= self.slice.kv_bytes, "more KV than memory"

    def release(self, seq: SeqState) -> None:
        """Its KV is gone."""
        for offset in seq.blocks:
            count = self.holders[offset] - 1
            if count:
                self.holders[offset] = count
                continue
            del self.holders[offset]
            self.held_bytes -= seq.spec.kv_block_bytes
            slab = offset // self.slice.slab_bytes
            model, blocks = self.slabs[slab]
            if blocks == 1:
                del self.slabs[slab]
            else:
                self.slabs[slab] = (model, blocks - 1)
        seq.blocks = []
        seq.computed = 0
