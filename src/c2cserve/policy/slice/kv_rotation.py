"""Rotation on a slice: `policy.slice.rotation`'s decisions, carried out over the arena and the
link.

    running --pause--> leaving --moved--> paused --resume--> coming --moved--> running
               Move "out"   its HBM is free           Move "in"

Full blocks of running requests are copied out in the background (Move "copy"), so a pause moves
little and frees the rest at once. What comes in takes any free block, and never waits for one that
is still being read. Only requests are paused that no step and no move has in hand, and that have
run since they came."""

from collections.abc import Iterable

from c2cserve.core.actions import Direction, Move
from c2cserve.core.machine import Slice
from c2cserve.core.request import BLOCK_TOKENS
from c2cserve.policy.slice.batching import ActiveModel, Seq
from c2cserve.policy.slice.kv import KvArena
from c2cserve.policy.slice.rotation import EagerCopies, KvClaim, KvState, RotationSettings, rotate


class KvRotation:
    def __init__(self, arena: KvArena, slice_: Slice, settings: RotationSettings) -> None:
        self._arena = arena
        self._slice = slice_
        self._settings = settings
        self._copies = EagerCopies(slice_.host_kv_bytes)
        self._moving: dict[str, tuple[Seq, Direction]] = {}
        self._outgoing_bytes = 0
        self.welcome: dict[str, None] = {}
        """Waiting requests that may start in this iteration, in order."""
        self.contended = False
        """A request that wants to run found no room. Requests in a running step cannot be paused,
        so what comes next is better decided between steps."""

    def plan(self, seqs: Iterable[Seq], now: float) -> list[Move]:
        """One iteration of SuperInfer's Algorithm 1: who goes, who comes, who may start; and what
        of the others is copied meanwhile. Room that is about to be free counts as free. The request
        that it was made for has the largest lag in the next iteration too."""
        everybody = {seq.request.id: seq for seq in seqs}
        claims = self._claims(everybody.values(), now)
        held = self._arena.held_bytes - self._outgoing_bytes
        growth = sum(t.state is KvState.RUNNING for t in claims)
        block = max((seq.model.block_bytes for seq in everybody.values()), default=0)
        size = self._arena.slabs * self._arena.slab_bytes
        rotation = rotate(claims, max(0, size - held - growth * block), self._settings, now)
        self.contended = len(claims) > growth + len(rotation.prioritized)
        moves: list[Move] = []
        budget = self._settings.transfer_bytes
        for name in rotation.preempted:
            move = self.pause(everybody[name], now)
            if move is not None:
                moves.append(move)
                budget -= len(move.blocks) * everybody[name].model.block_bytes
        places = self._slice.max_batch - growth + len(moves)
        self.welcome.clear()
        for name in rotation.prioritized[: max(0, places)]:
            seq = everybody[name]
            if not seq.paused:
                self.welcome[name] = None
                seq.since_s = now
            elif (move := self._resume(seq, now)) is not None:
                moves.append(move)
        return moves + self._copy(everybody.values(), budget)

    def _claims(self, seqs: Iterable[Seq], now: float) -> list[KvClaim]:
        """Return the requests that hold HBM or want it. Of the waiting there are no more than the
        next step could take in: room for others would lie idle."""
        claims: list[KvClaim] = []
        waiting: list[Seq] = []
        left = self._slice.max_step_tokens
        # The token after a prompt that fills the arena may be the last one, which has no KV.
        room = self._arena.slabs * self._arena.slab_bytes
        for seq in seqs:
            request, block = seq.request, seq.model.block_bytes
            if seq.paused:
                if not seq.moves:
                    state = KvState.PAUSED if seq.length > request.prompt_len else KvState.WAITING
                    since_s = seq.since_s if state is KvState.PAUSED else request.arrival_s
                    size = min(room, _blocks(seq.length + 1) * block)
                    claims.append(KvClaim(request.id, state, size, since_s, request.slo))
            elif seq.started:
                since_s = seq.since_s if _at_rest(seq) else now
                size = len(seq.blocks) * block
                claims.append(KvClaim(request.id, KvState.RUNNING, size, since_s, request.slo))
                left -= max(0, seq.expected - 1 - seq.issued)
            else:
                waiting.append(seq)
        waiting.sort(key=lambda seq: (seq.request.arrival_s, seq.request.id))
        for seq in waiting:
            if left <= 0:
                break
            left -= seq.length
            request = seq.request
            size = min(room, _blocks(seq.length + 1) * seq.model.block_bytes)
            claims.append(
                KvClaim(request.id, KvState.WAITING, size, request.arrival_s, request.slo)
            )
        return claims

    def pause(self, seq: Seq, now: float) -> Move | None:
        """Move it out of HBM: its synced blocks at once, the others when they have been copied.
        None: it cannot be paused now."""
        if not _at_rest(seq):
            return None
        name, block = seq.request.id, seq.model.block_bytes
        self._copies.filled(name, seq.computed // BLOCK_TOKENS)
        going = self._copies.rotate_out(name, _blocks(seq.computed), block)
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
        """Into HBM with it, if there is room by now."""
        blocks = self._arena.allocate(seq.model.key, _blocks(seq.length))
        if blocks is None:
            return None
        seq.blocks, seq.notified, seq.since_s = blocks, 0, now
        lasting, end_bytes = self._copies.lasting(seq.request.id), self._arena.end_bytes
        return self._move(seq, "in", 0, blocks[: _blocks(seq.computed)], lasting, end_bytes)

    def _copy(self, seqs: Iterable[Seq], budget: int) -> list[Move]:
        """Eagerly, what is full by now, as far as this iteration's budget goes."""
        moves: list[Move] = []
        for seq in seqs:
            block = seq.model.block_bytes
            if budget < block:
                break
            if not seq.started or seq.paused or seq.moves or not seq.notified:
                continue
            name = seq.request.id
            self._copies.filled(name, seq.computed // BLOCK_TOKENS)
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
        return Move(seq.request.id, direction, first, tuple(blocks), kept, kv_end_bytes)

    def moved(self, request_id: str) -> Seq:
        """A move is done. A request that went out has no blocks any more; one that came in can
        run."""
        seq, direction = self._moving.pop(request_id)
        seq.moves -= 1
        if direction == "in":
            self._copies.resumed(request_id, seq.model.block_bytes)
            seq.paused = False
        else:
            self._copies.moved(request_id)
        if direction == "out":
            self._outgoing_bytes -= len(seq.blocks) * seq.model.block_bytes
            self._arena.release(seq.model.key, seq.blocks)
            seq.blocks = []
        return seq

    def moving(self, model: ActiveModel) -> bool:
        """Some of the model's blocks are being read or written."""
        return any(seq.model is model for seq, _ in self._moving.values())

    def forget(self, seq: Seq) -> None:
        """It ended, or its KV is dropped; no move has it in hand."""
        self._copies.forget(seq.request.id, seq.model.block_bytes)


def _at_rest(seq: Seq) -> bool:
    return not seq.busy and seq.notified > 0


def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)
