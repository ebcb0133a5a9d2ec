"""Which blocks of prefixes are in a slice's host memory, and what they are worth.

Blocks of a model form a tree: a block's parent is the one before it in the prefix. A block can be
found only while its parent can, so what is found is complete. Prefixes go from their ends: the
cheapest block that is no parent first. Its price is the *floor* for those that are used from then
on (GreedyDual-Size-Frequency). So what is not used any more gets cheaper beside the others."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count

_STALE_MOST = 64
"""Entries of the heap beyond two for each block, before it is built anew."""


@dataclass(slots=True, eq=False)
class HostBlock:
    """A pinned block is being copied or is a request's copy, so its place must stay. `gone`: it
    cannot be found any more, and gives its place up with the last pin."""

    id: int
    model: str
    value: int
    """The hash of the prefix that ends with it."""
    size: int
    """Bytes."""
    parent: "HostBlock | None"
    uses: int = 0
    price: float = 0.0
    saved: bool = False
    """Its bytes are here."""
    pins: int = 0
    sharers: int = 0
    """Requests whose copy it is. Each has a pin of it."""
    gone: bool = False
    children: dict[int, "HostBlock"] = field(default_factory=dict[int, "HostBlock"])
    """The blocks that follow it in prefixes, by id."""

    @property
    def may_go(self) -> bool:
        return not (self.children or self.pins or self.gone)


class HostPrefixes:
    def __init__(self) -> None:
        self.used_bytes = 0
        self.pinned_bytes = 0
        self.shared_bytes = 0
        """Bytes of blocks that are copies of requests, too."""
        self.dropped: list[int] = []
        """Ids of blocks that gave their places up, for the caller to pass on and clear."""
        self._by_hash: dict[str, dict[int, HostBlock]] = {}
        self._cheapest: list[tuple[float, int, HostBlock]] = []
        """A heap. An entry counts if its block may go and has this price."""
        self._floor = 0.0
        self._ids = count(1)
        self._count = 0

    def find(self, model: str, value: int) -> HostBlock | None:
        return self._by_hash.get(model, {}).get(value)

    def run(self, model: str, hashes: Sequence[int]) -> list[HostBlock]:
        """Return the longest run of blocks from the first hash on whose bytes are here."""
        blocks = self._by_hash.get(model, {})
        found: list[HostBlock] = []
        for value in hashes:
            block = blocks.get(value)
            if block is None or not block.saved:
                break
            found.append(block)
        return found

    def add(self, model: str, value: int, size: int, parent: HostBlock | None) -> HostBlock:
        """Return a new block, pinned: its bytes are yet to come."""
        block = HostBlock(next(self._ids), model, value, size, parent)
        assert self.find(model, value) is None, "a block is here already"
        assert parent is None or not parent.gone
        self._by_hash.setdefault(model, {})[value] = block
        if parent is not None:
            parent.children[block.id] = block
        self.used_bytes += size
        self._count += 1
        self.pin(block)
        return block

    def use(self, block: HostBlock, worth: float) -> None:
        """Note a use. `worth`: the seconds that computing a byte of it takes."""
        block.uses += 1
        block.price = self._floor + block.uses * worth
        self._offer(block)

    def pin(self, block: HostBlock) -> None:
        if not block.pins:
            self.pinned_bytes += block.size
        block.pins += 1

    def unpin(self, block: HostBlock) -> None:
        block.pins -= 1
        if block.pins:
            return
        self.pinned_bytes -= block.size
        if block.gone:
            self._free(block)
        else:
            self._offer(block)

    def share(self, block: HostBlock) -> None:
        """Make it the copy of one more request, so that it stays."""
        if not block.sharers:
            self.shared_bytes += block.size
        block.sharers += 1
        self.pin(block)

    def unshare(self, block: HostBlock) -> None:
        block.sharers -= 1
        if not block.sharers:
            self.shared_bytes -= block.size
        self.unpin(block)

    def evict(self, size: int) -> bool:
        """Drop the cheapest blocks until so many bytes are free. Return whether they are."""
        while size > 0 and self._cheapest:
            price, _, block = heappop(self._cheapest)
            if block.may_go and block.price == price:
                self._floor = max(self._floor, price)
                size -= block.size
                self.drop(block)
        return size <= 0

    def clear(self) -> None:
        """Drop all blocks. The pinned ones keep their places until they are not."""
        for blocks in list(self._by_hash.values()):
            for block in list(blocks.values()):
                if block.parent is None:
                    self.drop(block)

    def drop(self, block: HostBlock) -> None:
        """Drop a block and all that follow it in prefixes."""
        if block.gone:
            return
        if block.parent is not None:
            del block.parent.children[block.id]
            self._offer(block.parent)
        left = [block]
        while left:
            one = left.pop()
            left += one.children.values()
            one.children, one.parent, one.gone = {}, None, True
            blocks = self._by_hash[one.model]
            del blocks[one.value]
            if not blocks:
                del self._by_hash[one.model]
            if not one.pins:
                self._free(one)

    def _free(self, block: HostBlock) -> None:
        self.used_bytes -= block.size
        self._count -= 1
        self.dropped.append(block.id)

    def _offer(self, block: HostBlock) -> None:
        if not block.may_go:
            return
        heappush(self._cheapest, (block.price, block.id, block))
        if len(self._cheapest) > 2 * self._count + _STALE_MOST:
            self._cheapest = [
                entry for entry in dict.fromkeys(self._cheapest)
                if entry[2].may_go and entry[2].price == entry[0]
            ]  # fmt: skip
            heapify(self._cheapest)
