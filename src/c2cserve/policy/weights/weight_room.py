"""How much of a slice's memory weights may have beside KV (ours).

KV grows from the arena's start, weights lie at its end. What is cached of ended requests makes way
for both. KV of a new request comes to lie above what is cached, and weights must lie above that."""

from c2cserve.core.machine import Slice
from c2cserve.core.request import BLOCK_TOKENS
from c2cserve.policy.slice.kv import KvArena
from c2cserve.policy.weights.model_weights import ModelWeights

CACHE_SHARE = 0.5
"""The share of a GPU's arena up to which prefixes of ended requests make KV grow,"""
_SCARCE_CACHE_SHARE = 1 / 32
"""and the share while not all weights fit beside that. A load of an 8B takes as long as the prefill
of some 10,000 tokens."""
_MORE_ROOM = 1 / 16
"""The share of a model's weights that each further try asks for beyond them."""


class WeightRoom:
    def __init__(self, arena: KvArena, slice_: Slice) -> None:
        self._arena = arena
        outside_bytes = slice_.hbm_bytes - slice_.kv_bytes if slice_.hbm_bytes else 1 << 60
        self._outside_bytes = max(0, outside_bytes)

    def slabs(self, size: int) -> int:
        """Return the slabs of the arena for so many bytes of weights: what the memory outside of it
        does not hold."""
        return -(-max(0, size - self._outside_bytes) // self._arena.slab_bytes)

    def wanted(self, size: int) -> None:
        """Bound what is cached. `size`: bytes of the weights of all models that may run."""
        fits = self.slabs(size) <= self._arena.slabs * (1 - CACHE_SHARE)
        self._arena.limit_cache(CACHE_SHARE if fits else _SCARCE_CACHE_SHARE)

    def fits(self, one: ModelWeights, there_bytes: int) -> bool:
        """Return whether there is room for a model's weights beside `there_bytes` of others, and
        for a prompt if it has nothing else. (A prompt that is longer than the memory ends as such.)

        KV may have gaps where no weights fit. So where weights have places, they must fit above
        what is held."""
        slabs = self.slabs(there_bytes + one.size + int(one.tries * _MORE_ROOM * one.size))
        if self._arena.weights_above:
            held = -(-self._arena.held_end_bytes // self._arena.slab_bytes)
            if slabs > self._arena.slabs - held:
                return False
        blocks = 0
        if not one.model.started:
            blocks = min(seq.length for seq in one.model.seqs.values()) // BLOCK_TOKENS + 1
        kv_slabs = -(-blocks * one.model.block_bytes // self._arena.slab_bytes)
        kv_slabs = min(kv_slabs, self._arena.slabs - self.slabs(one.size))
        return slabs + kv_slabs <= self._arena.free_slabs
