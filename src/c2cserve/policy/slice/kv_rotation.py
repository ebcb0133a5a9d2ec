"""Rotation on a slice: `policy.slice.rotation`'s decisions, carried out over the arena and the
link.

    running --pause--> leaving --moved--> paused --resume--> coming --moved--> running
               Move "out"   its HBM is free           Move "in"

Full blocks of running requests are copied out in the background (Move "copy"), so a pause moves
little and frees the rest at once. What the prefix cache has on the host is not copied again: it is
the request's copy too, and stays as long as it does. A request that comes in takes any free block,
and never waits for one that is still being read. A request can be paused when it is in no step and
no move, and has run since it came in."""

from collections.abc import Callable, Iterable
from dataclasses import replace

from c2cserve.core.actions import Direction, Move
from c2cserve.core.machine import Slice
from c2cserve.core.request import BLOCK_TOKENS, blocks_of
from c2cserve.policy.slice.batching import ActiveModel, Seq
from c2cserve.policy.slice.host_prefixes import HostBlock
from c2cserve.policy.slice.kv import KvArena
from c2cserve.policy.slice.prefix_tier import PrefixTier
from c2cserve.policy.slice.rotation import (
    AHEAD_SHARE,
    EagerCopies,
    KvClaim,
    KvState,
    Rotation,
    RotationSettings,
    lag_s,
    rotate,
    step_transfer,
)


class KvRotation:
    def __init__(
        self, arena: KvArena, slice_: Slice, settings: RotationSettings,
        release_weights: Callable[[ActiveModel], bool], computes: Callable[[str], bool],
    ) -> None:  # fmt: skip
        """`release_weights` releases weights for KV of a model. It returns whether any could go.
        `computes`: whether a model's weights are there."""
        self.prefixes: PrefixTier | None = None
        """Cached prefixes in the same host memory. They make way for what is moved out."""
        self._arena = arena
        self._slice = slice_
        self._settings = settings
        self._release_weights = release_weights
        self._computes = computes
        self._copies = EagerCopies(slice_.host_kv_bytes)
        self._shared: dict[str, list[HostBlock]] = {}
        """Blocks of cached prefixes that are copies of a request's first blocks."""
        self._moving: dict[str, tuple[Seq, Direction]] = {}
        self._outgoing_bytes = 0
        self._room_bytes = arena.size
        """The arena without weights that are needed."""
        self.may_start: set[str] = set()
        """Waiting requests that may start in this iteration."""
        self.contended = False
        """A request that wants to run found no room. Requests in a running step cannot be paused,
        so the next step is better decided when this one has ended."""
        self.contended_s = 0.0
        """The seconds for which that was so."""
        self._planned_s = 0.0

    @property
    def host_bytes(self) -> int:
        """Host memory that KV of requests takes beside cached prefixes."""
        return self._copies.used_bytes

    def _limit_copies(self, share: float = 1.0) -> None:
        """Leave prefixes on the host what they cannot give up now, and the rest of the share."""
        if self.prefixes is not None:
            size = self._slice.host_kv_bytes
            rest = size - self.prefixes.pinned_bytes
            most = int(share * size) - self.prefixes.shared_bytes
            self._copies.capacity_bytes = max(0, min(rest, most))

    def _share(self, seq: Seq, share: float = 1.0) -> bool:
        """Count what the prefix cache has of its full blocks as its copies. These come first: once
        it has some of its own, there are no more. Return whether the next one is on its way."""
        name, hashes = seq.request.id, seq.request.prefix_hashes
        end = min(seq.computed // BLOCK_TOKENS, len(hashes))
        first = self._copies.shared(name)
        if self.prefixes is None or first >= end or self._copies.has_own(name):
            return False
        blocks, coming = self.prefixes.share(seq.model, hashes[first:end], share)
        if blocks:
            self._shared.setdefault(name, []).extend(blocks)
            self._copies.share(name, first + len(blocks))
        return coming

    def plan(self, seqs: Iterable[Seq], now: float, weight_bytes: int) -> list[Move]:
        """Run one iteration of SuperInfer's Algorithm 1. Decide which requests leave HBM, come in
        and start, and which blocks of the others are copied meanwhile. Room that is about to be
        free counts as free. The request that it was made for has the largest lag in the next
        iteration too. `weight_bytes` of the arena are taken by weights that are needed. Other
        weights make way."""
        if self.contended:
            self.contended_s += now - self._planned_s
        self._planned_s = now
        by_id = {seq.request.id: seq for seq in seqs}
        self._room_bytes = self._arena.size - weight_bytes
        claims = self._claims(by_id.values(), now)
        held = self._arena.held_bytes - self._outgoing_bytes
        running = sum(one.state is KvState.RUNNING for one in claims)
        growth_bytes = running * max((seq.model.block_bytes for seq in by_id.values()), default=0)
        free = max(0, self._room_bytes - held - growth_bytes)
        settings = self._limited(claims, by_id.values(), now)
        rotation = rotate(claims, free, settings, now)
        self.contended = self._contends(claims, rotation, now)
        moves: list[Move] = []
        budget = self._settings.transfer_bytes
        for name in rotation.preempted:
            move = self.pause(by_id[name], now)
            if move is not None:
                moves.append(move)
                budget -= len(move.blocks) * by_id[name].model.block_bytes
        places = self._slice.max_batch - running + len(moves)
        self.may_start.clear()
        for name in rotation.prioritized[: max(0, places)]:
            seq = by_id[name]
            if not seq.paused:
                self.may_start.add(name)
                seq.since_s = now
            elif (move := self._resume(seq, now)) is not None:
                moves.append(move)
        return moves + self._copy(by_id.values(), budget)

    def _limited(self, claims: list[KvClaim], seqs: Iterable[Seq], now: float) -> RotationSettings:
        """Return the settings with the B_xfer of this iteration."""
        settings, link = self._settings, self._slice.link_bytes_per_s
        if not settings.paced or not link:
            return settings
        steps = [seq.model.time.decode_step_s(seq.model.started) for seq in seqs if seq.started]
        coming = sum(
            len(seq.blocks) * seq.model.block_bytes
            for seq, way in self._moving.values() if way == "in"
        )  # fmt: skip
        link_bytes = int(link * max(steps, default=0.0))
        moved = step_transfer(claims, settings, link_bytes, coming, now)
        return replace(settings, transfer_bytes=moved)

    def _contends(self, claims: list[KvClaim], rotation: Rotation, now: float) -> bool:
        """Return whether a request that should run now found no room. One that is not due yet
        waits for its time, not for a place."""
        settings, come = self._settings, set(rotation.prioritized)
        return any(
            one.state is not KvState.RUNNING and one.id not in come
            and not (settings.paced and lag_s(one, settings, now) <= 0.0)
            for one in claims
        )  # fmt: skip

    def _claims(self, seqs: Iterable[Seq], now: float) -> list[KvClaim]:
        """Return the requests that hold HBM or want it. The waiting ones among them are no more
        than the next step could take in: room for others would lie idle."""
        claims: list[KvClaim] = []
        waiting: list[Seq] = []
        left = self._slice.max_step_tokens
        for seq in seqs:
            if seq.first_s is None and seq.length > seq.request.prompt_len:
                seq.first_s = now
            if not seq.started:
                waiting.append(seq)
            elif not seq.paused:
                since_s = seq.since_s if _at_rest(seq) else now
                claim = self._claim(seq, KvState.RUNNING, len(seq.blocks), since_s)
                if not self._computes(seq.model.name):  # it falls behind, whatever has its place
                    claim = replace(claim, due_s=2 * now - since_s)
                claims.append(claim)
                left -= max(0, seq.expected - 1 - seq.issued)
            elif not seq.moves:
                claims.append(self._claim_of_absent(seq))
        waiting.sort(key=lambda seq: (seq.request.arrival_s, seq.request.id))
        for seq in waiting:
            if left <= 0:
                break
            left -= seq.length
            claims.append(self._claim_of_absent(seq))
        return claims

    def _claim_of_absent(self, seq: Seq) -> KvClaim:
        """Return the claim of a request without KV in HBM. Before its first token it is as late as
        any that waits for its first token, also if it is paused."""
        if seq.length > seq.request.prompt_len and seq.paused:
            state, since_s = KvState.PAUSED, seq.since_s
        else:
            state, since_s = KvState.WAITING, seq.request.arrival_s
        return self._claim(seq, state, blocks_of(seq.length + 1), since_s)

    def _claim(self, seq: Seq, state: KvState, blocks: int, since_s: float) -> KvClaim:
        # The token after a prompt that fills the room beside the weights may be the last one, which
        # has no KV. If it is not, the model streams from then on.
        least = min(blocks, blocks_of(seq.length)) * seq.model.block_bytes
        size = max(least, min(self._room_bytes, blocks * seq.model.block_bytes))
        drawn, slo = seq.length - seq.request.prompt_len, seq.request.slo
        due_s = 0.0 if seq.first_s is None else seq.first_s + drawn * slo.tpot_s
        return KvClaim(seq.request.id, state, size, since_s, slo, due_s)

    def pause(self, seq: Seq, now: float) -> Move | None:
        """Take a request out of HBM: its synced blocks at once, the others when they have been
        copied. Return the move that copies them, None if it cannot be paused now."""
        if not _at_rest(seq):
            return None
        name, block = seq.request.id, seq.model.block_bytes
        self._share(seq)
        self._copies.filled(name, seq.computed // BLOCK_TOKENS)
        self._limit_copies()
        going = self._copies.rotate_out(name, blocks_of(seq.computed), block)
        if going is None:
            return None
        first, count = going
        dirty = seq.blocks[first : first + count]
        self._arena.release(seq.model.key, seq.blocks[first + count :])
        self._arena.release(seq.model.key, seq.blocks[:first])
        seq.blocks = dirty
        seq.paused, seq.since_s = True, now
        self._outgoing_bytes += count * block
        return self._move(seq, "out", first, dirty)

    def _resume(self, seq: Seq, now: float) -> Move | None:
        """Bring a request into HBM, if there is room by now."""
        needed = blocks_of(seq.length)
        while (blocks := self._arena.allocate(seq.model.key, needed)) is None:
            if not self._release_weights(seq.model):
                return None
        seq.blocks, seq.notified, seq.since_s = blocks, 0, now
        lasting, end_bytes = self._copies.lasting(seq.request.id), self._arena.end_bytes
        return self._move(seq, "in", 0, blocks[: blocks_of(seq.computed)], lasting, end_bytes)

    def _copy(self, seqs: Iterable[Seq], budget: int) -> list[Move]:
        """Begin to copy blocks that are full by now, as far as this iteration's budget goes."""
        moves: list[Move] = []
        for seq in seqs:
            block = seq.model.block_bytes
            if budget < block:
                break
            if not seq.started or seq.paused or seq.moves or not seq.notified:
                continue
            name = seq.request.id
            if seq.computed // BLOCK_TOKENS <= self._copies.synced(name):
                continue
            if self._share(seq, AHEAD_SHARE):
                continue
            self._copies.filled(name, seq.computed // BLOCK_TOKENS)
            self._limit_copies(AHEAD_SHARE)
            first, count = self._copies.start(name, block, budget // block)
            if count:
                moves.append(self._move(seq, "copy", first, seq.blocks[first : first + count]))
                budget -= count * block
        return moves

    def _move(
        self, seq: Seq, direction: Direction, first: int, blocks: list[int], kept: int = 0,
        kv_end_bytes: int | None = None,
    ) -> Move:  # fmt: skip
        seq.moves += 1
        self._moving[seq.request.id] = (seq, direction)
        shared = self._shared.get(seq.request.id, ())
        ids = tuple(block.id for block in shared) if direction == "in" else ()
        end, moved = kv_end_bytes, tuple(blocks)
        return Move(seq.request.id, direction, first, moved, kept, end, len(shared), ids)

    def moved(self, request_id: str) -> Seq:
        """Note the end of a move, and return its request. A request that went out has no blocks any
        more; one that came in can run."""
        seq, direction = self._moving.pop(request_id)
        seq.moves -= 1
        if direction == "in":
            self._copies.resumed(request_id, seq.model.block_bytes)
            seq.paused = False
            return seq
        self._copies.moved(request_id)
        if direction == "out":
            self._outgoing_bytes -= len(seq.blocks) * seq.model.block_bytes
            self._arena.release(seq.model.key, seq.blocks)
            seq.blocks = []
        return seq

    @property
    def under_way(self) -> bool:
        """Whether KV is being moved."""
        return bool(self._moving)

    def moving(self, model: ActiveModel) -> bool:
        """Whether some of the model's blocks are being read or written by moves."""
        return any(seq.model is model for seq, _ in self._moving.values())

    def forget(self, seq: Seq) -> None:
        """Note that the request ended, or that its KV is dropped; it is in no move."""
        self._copies.forget(seq.request.id, seq.model.block_bytes)
        shared = self._shared.pop(seq.request.id, None)
        if shared is not None and self.prefixes is not None:
            self.prefixes.unshare(shared)


def _at_rest(seq: Seq) -> bool:
    return not seq.busy and seq.notified > 0
