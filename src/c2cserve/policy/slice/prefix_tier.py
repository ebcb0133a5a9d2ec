"""The second tier of a slice's prefix cache: host memory, beside KV of paused requests (ours).

    computed --SavePrefix--> here --BringPrefix--> in the arena again      here --DropPrefix--> gone

Blocks of prompts are copied when they are computed, so the arena gives them up without a wait.
Nothing is held for a copy: one whose block the arena gave up meanwhile is dropped at its end. A
request brings blocks in before its first step, if that is quicker than to compute them.

Where requests rotate, what is here of a request's KV is its copy as well (`share`)."""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from c2cserve.core.actions import BringPrefix, DropPrefix, SavePrefix
from c2cserve.core.events import PrefixMoved
from c2cserve.core.machine import Slice
from c2cserve.core.request import BLOCK_TOKENS
from c2cserve.policy.slice.batching import ActiveModel, Seq
from c2cserve.policy.slice.host_prefixes import HostBlock, HostPrefixes
from c2cserve.policy.slice.kv import KvArena, Sealed

_MOVES = 8
"""Where the link is not known, its rate is that of the fastest of so many moves."""


@dataclass(frozen=True, slots=True)
class _PrefixMove:
    model: ActiveModel
    blocks: list[HostBlock]
    places: tuple[int, ...]
    sealed: list[Sealed]
    """What the arena had each block as, if it is a save."""
    seq: Seq | None = None
    """Who waits for blocks that come in."""

    @property
    def size(self) -> int:
        return len(self.blocks) * self.model.block_bytes


class PrefixTier:
    def __init__(
        self, arena: KvArena, slice_: Slice, rotated_bytes: Callable[[], int],
        emit: Callable[[SavePrefix | BringPrefix | DropPrefix], None],
    ) -> None:  # fmt: skip
        """`rotated_bytes`: what KV of requests takes of the host memory. `emit` takes actions, in
        the order in which they free room and take it."""
        self._arena, self._slice = arena, slice_
        self._rotated_bytes = rotated_bytes
        self._emit = emit
        self._host = HostPrefixes()
        self._moves: dict[int, _PrefixMove] = {}
        self._last_move = 0
        self._coming: Counter[tuple[str, int]] = Counter()
        """Blocks that are being brought in, by model and hash."""
        self._incoming_bytes = 0
        self._rates: deque[float] = deque(maxlen=_MOVES)
        self.tokens = 0
        """Tokens that were brought in,"""
        self.hits = 0
        """the requests that they were for,"""
        self.slower_tokens = 0
        """and tokens that were computed although they were here, because that was quicker."""

    @property
    def used_bytes(self) -> int:
        return self._host.used_bytes

    @property
    def pinned_bytes(self) -> int:
        """Bytes that cannot make way now."""
        return self._host.pinned_bytes

    @property
    def shared_bytes(self) -> int:
        """Bytes of blocks that are copies of requests, too."""
        return self._host.shared_bytes

    # ---- out ------------------------------------------------------------------------------------

    def computed(self, model: ActiveModel, hashes: Sequence[int], first: int) -> None:
        """Save what is missing here of a prefix that the arena has. From block `first` on it is
        new."""
        host = self._host
        if first and host.find(model.name, hashes[first - 1]) is None:
            first = 0
        parent = host.find(model.name, hashes[first - 1]) if first else None
        blocks: list[HostBlock] = []
        found: list[Sealed] = []
        for value in hashes[first:]:
            block = host.find(model.name, value)
            if block is None:
                sealed = self._arena.sealed(model.key, value)
                if sealed is None or not self._has_room(model.block_bytes, parent):
                    break
                block = host.add(model.name, value, model.block_bytes, parent)
                host.use(block, _worth(model))
                blocks.append(block)
                found.append(sealed)
            parent = block
        self._pass_on()
        if blocks:
            move = _PrefixMove(model, blocks, tuple(one.offset for one in found), found)
            self._emit(SavePrefix(self._begin(move), model.block_bytes, _ids(blocks), move.places))

    def _has_room(self, size: int, parent: HostBlock | None) -> bool:
        short = self._host.used_bytes + self._rotated_bytes() + size - self._slice.host_kv_bytes
        if short <= 0:
            return True
        if parent is None:
            return self._host.evict(short)
        self._host.pin(parent)
        roomy = self._host.evict(short)
        self._host.unpin(parent)
        return roomy

    def make_way(self) -> None:
        """Drop what KV of requests has taken the room of."""
        short = self._host.used_bytes + self._rotated_bytes() - self._slice.host_kv_bytes
        if short > 0 and not self._host.evict(short):
            self._host.clear()
        self._pass_on()

    def forget(self, model: str, hashes: Sequence[int]) -> None:
        """Make blocks impossible to find, and all that follow them: their KV may be wrong."""
        for value in hashes:
            block = self._host.find(model, value)
            if block is not None:
                self._host.drop(block)
        self._pass_on()

    # ---- copies of requests ---------------------------------------------------------------------

    def share(
        self, model: ActiveModel, hashes: Sequence[int], share: float
    ) -> tuple[list[HostBlock], bool]:
        """Make what is here of these blocks, from the first on, a request's copies, which stay
        until `unshare`. Copies of requests have at most so much of the host memory. Return them,
        and whether the one after them is on its way here."""
        host, own, size = self._host, self._rotated_bytes(), self._slice.host_kv_bytes
        shared: list[HostBlock] = []
        for value in hashes:
            block = host.find(model.name, value)
            if block is None:
                break
            if not block.saved:
                return shared, True
            if not block.sharers and own + host.shared_bytes + block.size > share * size:
                break
            if not block.pins and own + host.pinned_bytes + block.size > size:
                break  # what leaves HBM was promised that room
            host.share(block)
            shared.append(block)
        return shared, False

    def unshare(self, blocks: Sequence[HostBlock]) -> None:
        """Note that a request needs its copies no more."""
        for block in reversed(blocks):
            self._host.unshare(block)
        self._pass_on()

    # ---- in -------------------------------------------------------------------------------------

    def comes(self, model: ActiveModel, hashes: Sequence[int]) -> bool:
        """Return whether the first of these blocks is being brought in for another request."""
        return bool(hashes) and (model.name, hashes[0]) in self._coming

    def bring(self, seq: Seq, hashes: Sequence[int]) -> bool:
        """Bring blocks of a request in that has its places in the arena. `hashes` are those after
        what the arena had. Return False if there are none, or computing them is quicker."""
        model, first = seq.model, seq.computed // BLOCK_TOKENS
        for value in seq.request.prefix_hashes[:first]:
            block = self._host.find(model.name, value)
            if block is not None:
                self._host.use(block, _worth(model))
        blocks = self._host.run(model.name, hashes)
        if not blocks:
            return False
        for block in blocks:
            self._host.use(block, _worth(model))
        tokens = len(blocks) * BLOCK_TOKENS
        if not self._quicker(model, tokens, len(blocks) * model.block_bytes):
            self.slower_tokens += tokens
            return False
        for block in blocks:
            self._host.pin(block)
            self._coming[model.name, block.value] += 1
        places = tuple(seq.blocks[first : first + len(blocks)])
        move = _PrefixMove(model, blocks, places, [], seq)
        self._incoming_bytes += move.size
        self.hits += 1
        self.tokens += tokens
        seq.moves += 1
        seq.paused = True
        seq.computed = seq.issued = seq.computed + tokens
        number = self._begin(move)
        end_bytes = self._arena.end_bytes
        self._emit(BringPrefix(number, model.block_bytes, _ids(blocks), places, end_bytes))
        return True

    def _quicker(self, model: ActiveModel, tokens: int, size: int) -> bool:
        rate = self._slice.link_bytes_per_s or max(self._rates, default=0.0)
        computing_s = tokens * model.time.prefill_token_s
        return rate > 0.0 and (size + self._incoming_bytes) / rate < computing_s

    def moved(self, event: PrefixMoved) -> Seq | None:
        """Note the end of a move. Return the request that waited for it."""
        move = self._moves.pop(event.move)
        if event.took_s > 0.0:
            self._rates.append(move.size / event.took_s)
        if move.seq is None:
            self._saved(move)
        else:
            self._brought(move, move.seq)
        for block in move.blocks:
            self._host.unpin(block)
        self._pass_on()
        return move.seq

    def _saved(self, move: _PrefixMove) -> None:
        for block, sealed in zip(move.blocks, move.sealed, strict=True):
            if self._arena.sealed(move.model.key, block.value) == sealed:
                block.saved = True
            else:  # other bytes may have been copied
                self._host.drop(block)

    def _brought(self, move: _PrefixMove, seq: Seq) -> None:
        for block, offset in zip(move.blocks, move.places, strict=True):
            if not block.gone:
                self._arena.seal(move.model.key, offset, block.value)
            self._coming[move.model.name, block.value] -= 1
            if not self._coming[move.model.name, block.value]:
                del self._coming[move.model.name, block.value]
        self._incoming_bytes -= move.size
        seq.moves -= 1
        seq.paused = False

    @property
    def bringing(self) -> bool:
        """Whether blocks are on their way into the arena."""
        return self._incoming_bytes > 0

    def brings_for(self, model: ActiveModel) -> bool:
        """Whether some of them are the model's."""
        return any(one.model is model and one.seq is not None for one in self._moves.values())

    def _begin(self, move: _PrefixMove) -> int:
        self._last_move += 1
        self._moves[self._last_move] = move
        return self._last_move

    def _pass_on(self) -> None:
        if self._host.dropped:
            dropped, self._host.dropped = self._host.dropped, []
            self._emit(DropPrefix(tuple(dropped)))


def _ids(blocks: Sequence[HostBlock]) -> tuple[int, ...]:
    return tuple(block.id for block in blocks)


def _worth(model: ActiveModel) -> float:
    """Return the seconds that computing a byte of KV takes."""
    return model.time.prefill_token_s * BLOCK_TOKENS / model.block_bytes
