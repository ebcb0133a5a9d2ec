"""What lies in a slice's KV arena and in its host memory: an oracle of `slice_world`.

A block's content is a key for each of its tokens: the hash of the prefix that ends with the block,
or the name of the request whose own tokens they are. Actions write at their launch, and nothing
else may touch these bytes before they are over. What lies beyond the KV's end is overwritten, as by
weights. A step that reads anything but its own prefix would draw wrong text.
"""

from dataclasses import dataclass, field

from c2cserve.core.actions import BringPrefix, DropPrefix, Move, SavePrefix
from c2cserve.core.machine import Slice
from c2cserve.core.request import BLOCK_TOKENS, Request

Content = tuple[object, ...]
"""Of a block's first tokens."""


@dataclass
class _Use:
    """Offsets that a step in flight, or a move, reads and writes for a request."""

    request_id: str
    reads: set[int]
    writes: set[int]


@dataclass
class KvContents:
    slice: Slice
    _arena: dict[int, tuple[int, Content]] = field(default_factory=dict)
    """Offset -> size and content."""
    _host: dict[str, list[tuple[int, Content]]] = field(default_factory=dict)
    """Of each request, its first blocks."""
    _uses: dict[object, _Use] = field(default_factory=dict)
    _moves: dict[str, Move] = field(default_factory=dict)
    _saved: dict[int, tuple[int, Content]] = field(default_factory=dict)
    """Blocks of cached prefixes on the host, by number; those that are being saved too."""
    _prefix_moves: dict[int, SavePrefix | BringPrefix] = field(default_factory=dict)
    moved_in: int = 0
    """Blocks."""
    saved: int = 0
    brought: int = 0
    """Blocks of prefixes."""
    copied_again: int = 0
    """Blocks of requests that went out although a prefix's copy was there."""
    shared: int = 0
    """Blocks that came in from a prefix's copy."""
    checks: bool = True
    """False: it only knows of moves, which large worlds without rotation never make."""

    # ---- steps ----------------------------------------------------------------------------------

    def begin_step(self, kv_end_bytes: int | None) -> None:
        """Weights may lie beyond the KV's end from now on."""
        if self.checks and kv_end_bytes is not None:
            for offset, (size, _) in list(self._arena.items()):
                if offset + size > kv_end_bytes:
                    assert not any(offset in use.reads | use.writes for use in self._uses.values())
                    del self._arena[offset]

    def compute(
        self, step_id: int, request: Request, blocks: list[int], size: int, start: int, end: int
    ) -> None:
        """A step reads tokens [0, start) of the request and writes [start, end)."""
        if not self.checks:
            return
        first, last = start // BLOCK_TOKENS, (end - 1) // BLOCK_TOKENS
        for index, offset in enumerate(blocks[: -(-start // BLOCK_TOKENS)]):
            tokens = min(BLOCK_TOKENS, start - index * BLOCK_TOKENS)
            found = self._arena.get(offset, (0, ()))
            assert found[0] == size, "a block of another model, or of none, is read"
            assert found[1][:tokens] == (_key(request, index),) * tokens, "wrong KV is read"
        use = _Use(request.id, set(blocks[: last + 1]), set(blocks[first : last + 1]))
        self._launch((step_id, request.id), use)
        for index in range(first, last + 1):
            tokens = min(BLOCK_TOKENS, end - index * BLOCK_TOKENS)
            self._write(blocks[index], size, (_key(request, index),) * tokens)

    def end_step(self, step_id: int, request_id: str) -> None:
        self._uses.pop((step_id, request_id), None)

    def _launch(self, name: object, use: _Use) -> None:
        for other in self._uses.values():
            if other.request_id != use.request_id or isinstance(name, str):
                assert not use.writes & other.reads, "a block is written that is being read"
                assert not use.reads & other.writes, "a block is read that is being written"
        self._uses[name] = use

    def _write(self, offset: int, size: int, content: Content) -> None:
        if self._arena.get(offset, (0, ()))[0] != size:
            for other, (length, _) in list(self._arena.items()):
                if other < offset + size and offset < other + length:
                    assert not any(other in use.reads | use.writes for use in self._uses.values()
                                   if offset not in use.writes)  # fmt: skip
                    del self._arena[other]
        self._arena[offset] = (size, content)

    # ---- moves ----------------------------------------------------------------------------------

    def begin_move(self, move: Move, size: int) -> None:
        name = move.request_id
        assert name not in self._moves, "two moves of a request"
        self._moves[name] = move
        own, blocks = self._host.setdefault(name, []), set(move.blocks)
        assert len(blocks) == len(move.blocks)
        if move.direction == "in":
            self.begin_step(move.kv_end_bytes)
            assert len(move.ids) == move.shared
            assert all(self._saved[one][1] for one in move.ids), "a block did not arrive"
            host = [self._saved[one] for one in move.ids] + own
            assert len(host) >= move.first + len(blocks), "it is not on the host"
            self._launch(name, _Use(name, blocks, blocks))
            for offset, (length, content) in zip(move.blocks, host[move.first :], strict=False):
                assert length == size
                self._write(offset, size, content)
            self.moved_in += len(blocks)
            self.shared += move.shared
            return
        first = move.first - move.shared
        assert 0 <= first <= len(own), "blocks before it are not on the host"
        self._launch(name, _Use(name, blocks, set()))
        del own[first:]
        own += [self._arena[offset] for offset in move.blocks]
        prefixes = {key for _, content in self._saved.values() for key in content[:1]}
        self.copied_again += sum(self._arena[offset][1][0] in prefixes for offset in blocks)
        assert self.host_bytes <= self.slice.host_kv_bytes, "more than the host has room for"

    def end_move(self, request_id: str, *, ended: bool) -> None:
        move = self._moves.pop(request_id)
        del self._uses[request_id]
        if move.direction == "in":
            del self._host[request_id][max(0, move.kept - move.shared) :]
        if ended:
            self.forget(request_id)

    def forget(self, request_id: str) -> None:
        """The request ended or begins anew. Its copies go when its move is over."""
        if request_id not in self._moves:
            self._host.pop(request_id, None)

    def moving(self, request_id: str) -> bool:
        return request_id in self._moves

    # ---- prefixes -------------------------------------------------------------------------------

    def begin_prefix(self, action: SavePrefix | BringPrefix) -> None:
        """What is saved is read at the end, when the arena may have given the block up: then it
        must never be found. What comes in is written at the end, where nothing else may write."""
        ids, blocks, name = action.ids, set(action.blocks), f"prefix {action.move}"
        assert len(blocks) == len(ids) == len(set(ids))
        self._prefix_moves[action.move] = action
        if isinstance(action, SavePrefix):
            assert not self._saved.keys() & set(ids), "a block is saved twice"
            self._saved.update((one, (action.block_bytes, ())) for one in ids)
            self.saved += len(ids)
            assert self.host_bytes <= self.slice.host_kv_bytes, "more than the host has room for"
            return
        self.begin_step(action.kv_end_bytes)
        assert all(self._saved[one][1] for one in ids), "a block is brought that did not arrive"
        self._launch(name, _Use(name, blocks, blocks))
        self.brought += len(ids)

    def end_prefix(self, number: int) -> list[tuple[int, int]]:
        """Return the blocks that came in, and their offsets."""
        action = self._prefix_moves.pop(number)
        size = action.block_bytes
        for one, offset in zip(action.ids, action.blocks, strict=True):
            if isinstance(action, BringPrefix):
                assert self._saved[one][0] == size
                self._write(offset, *self._saved[one])
            else:
                found = self._arena.get(offset, (size, ("garbage",)))
                self._saved[one] = (size, found[1] if found[0] == size else ("garbage",))
        self._uses.pop(f"prefix {number}", None)
        moved = list(zip(action.ids, action.blocks, strict=True))
        return moved if isinstance(action, BringPrefix) else []

    def drop_prefix(self, action: DropPrefix) -> None:
        moving = {one for move in self._prefix_moves.values() for one in move.ids}
        moving |= {one for move in self._moves.values() for one in move.ids}
        for one in action.ids:
            assert one not in moving, "a block goes while it moves"
            del self._saved[one]

    @property
    def prefix_bytes(self) -> int:
        return sum(size for size, _ in self._saved.values())

    @property
    def host_bytes(self) -> int:
        rotated = sum(size for blocks in self._host.values() for size, _ in blocks)
        return rotated + self.prefix_bytes


def _key(request: Request, index: int) -> object:
    hashes = request.prefix_hashes
    return hashes[index] if index < len(hashes) else (request.id, index)
