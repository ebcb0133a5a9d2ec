"""What requests hold of a slice: blocks from their start to their end, and which make room."""

from collections.abc import Sequence
from functools import partial
from operator import attrgetter
from typing import Generic

from c2cserve.core.actions import (
    Drop,
    Fetch,
    Move,
    PrefixAction,
    Release,
    SliceAction,
    Truncate,
)
from c2cserve.core.events import MoveDone, PrefixMoved
from c2cserve.core.machine import Slice
from c2cserve.core.request import BLOCK_TOKENS, blocks_of
from c2cserve.core.step import SeqStep
from c2cserve.policy.slice.batching import ActiveModel, Seq, to_preempt
from c2cserve.policy.slice.in_flight import InFlight
from c2cserve.policy.slice.kv_rotation import KvRotation
from c2cserve.policy.slice.prefix_tier import PrefixTier
from c2cserve.policy.slice.strategies import ExtraT, SliceStrategies
from c2cserve.policy.slice_shares import SliceShares

_BY_NUMBER = attrgetter("number")


class SliceMemory(Generic[ExtraT]):
    """The part of `policy.slice` that starts, preempts and ends requests."""

    def __init__(self, slice_: Slice, strategies: SliceStrategies[ExtraT]) -> None:
        self._slice = slice_
        self.arena = strategies.arena
        rotation = strategies.rotation
        self._rotation = None if rotation is None else KvRotation(
            self.arena, slice_, rotation, self._release_weights, strategies.memory.computes
        )  # fmt: skip
        self.prefixes: PrefixTier | None = None
        """Cached prefixes in host memory; None: they are in the arena only."""
        if strategies.prefixes and self._rotation is not None:
            rotated = partial(getattr, self._rotation, "host_bytes")
            self.prefixes = PrefixTier(self.arena, slice_, rotated, self._emit)
            self._rotation.prefixes = self.prefixes
        self._weights = strategies.memory
        self._deactivated: list[ActiveModel] = []
        self._seqs: dict[str, Seq] = {}
        self._busy: list[ActiveModel] = []
        """Active models with requests, in the order of their activation. Hundreds may have none."""
        self._shares = SliceShares()
        self._in_flight = InFlight()
        self._first_in_line: Seq | None = None
        """The most urgent request that waits for memory."""
        self._now = 0.0
        self._wakeup: float | None = None
        self._short_of_room = False
        """A running request found no block for its next token."""
        self._actions: list[SliceAction | ExtraT] = []
        self.running = 0
        """Requests that have started (and so hold KV, here or on the host)."""
        self.cached_tokens = 0
        self.arena_hits = 0
        """Requests that found a part of their prompts in the arena."""
        self.preemptions = 0
        self.kv_drops = 0
        """The requests among these that lost their KV: host memory had no room for it."""

    @property
    def contended_s(self) -> float:
        """The seconds for which requests competed for memory, so that steps did not overlap."""
        return 0.0 if self._rotation is None else self._rotation.contended_s

    def _emit(self, action: PrefixAction) -> None:
        self._actions.append(action)

    # ---- from its start to its end --------------------------------------------------------------

    def _admit(self, seq: Seq) -> bool:
        """Start a request: take blocks for all its tokens, reusing what of its prefix is cached.
        Its last token is never reused, because that one samples the next. One block for each
        running request stays free, so that they can go on for a while. No request overtakes a more
        urgent one that waits for memory. Return False also if it has to wait for blocks of its
        prefix that come from the host."""
        model = seq.model
        needed = blocks_of(seq.length)
        if self._rotation is not None:
            if seq.request.id not in self._rotation.may_start:
                return False
            while self.arena.available(model.key) < needed:
                if not self._release_weights(model):
                    return False
        elif not self._may_start(seq, needed):
            return False
        reusable = seq.request.prefix_hashes[: (seq.length - 1) // BLOCK_TOKENS]
        found = self.arena.match(model.key, reusable)
        rest_of_prefix = reusable[len(found) :]
        if self.prefixes is not None and self.prefixes.comes(model, rest_of_prefix):
            self.arena.release(model.key, found)
            return False
        seq.computed = seq.issued = len(found) * BLOCK_TOKENS
        rest = self.arena.allocate(model.key, needed - len(found))
        assert rest is not None, "room was promised"
        seq.blocks = found + rest
        seq.started = True
        model.started += 1
        self.running += 1
        self.arena_hits += bool(found)
        comes = self.prefixes is not None and self.prefixes.bring(seq, rest_of_prefix)
        self.cached_tokens += seq.issued
        return not comes

    def _may_start(self, seq: Seq, needed: int) -> bool:
        model, first, rank = seq.model, self._first_in_line, seq.model.rank
        modest = bool(self._shares.greedy) and not self._shares.is_greedy(seq)
        if model.started == self._slice.max_batch and not (modest and self._displace(model)):
            return False
        if first is not None and rank(first) < rank(seq) and self._could_run(first.model):
            in_front = modest and self._shares.is_greedy(first)
            if not in_front:
                return False
        while self.arena.available(model.key) < needed + self.running and (
            self._release_weights(model) or (modest and self._displace(model))
        ):
            pass
        if self.arena.available(model.key) < needed + self.running:
            if first is None or rank(seq) < rank(first):
                self._first_in_line = seq
            return False
        if first is seq:
            self._first_in_line = None
        return True

    def _displace(self, model: ActiveModel) -> bool:
        """Preempt the request of a greedy tenant with most headroom, of the model itself, for one
        of another tenant. False: there is none that could be."""
        candidates = [
            seq for seq in model.seqs.values()
            if seq.started and not seq.busy and not seq.paused and self._shares.is_greedy(seq)
        ]  # fmt: skip
        if not candidates:
            return False
        return self._put_aside(max(candidates, key=lambda seq: (seq.due_s, seq.request.id)))

    def _could_run(self, model: ActiveModel) -> bool:
        return self._weights.computes(model.name) and not self._in_flight.parked(model)

    def _seal(self, seq: Seq, part: SeqStep) -> None:
        """Make the blocks of its prompt that a step has filled reusable."""
        hashes = seq.request.prefix_hashes
        end = min((part.start + part.tokens) // BLOCK_TOKENS, len(hashes))
        for index in range(part.start // BLOCK_TOKENS, end):
            self.arena.seal(seq.model.key, seq.blocks[index], hashes[index])
        if self.prefixes is not None:
            self.prefixes.computed(seq.model, hashes[:end], part.start // BLOCK_TOKENS)

    def _unseal(self, seq: Seq) -> None:
        """Make the KV that a request read impossible to find: it may be why its values fail."""
        self.arena.unseal(seq.model.key, seq.blocks)
        if self.prefixes is not None:
            self.prefixes.forget(seq.model.name, seq.request.prefix_hashes[: len(seq.blocks)])

    def _end_move(self, event: MoveDone | PrefixMoved) -> Seq | None:
        """Note the end of a move. Return the request whose move it was, if it was one's."""
        if isinstance(event, MoveDone):
            assert self._rotation is not None
            return self._rotation.moved(event.request_id)
        assert self.prefixes is not None
        return self.prefixes.moved(event)

    def _leave(self, seq: Seq) -> None:
        """Plan no more steps of it. Its memory goes at once, or when nothing writes there."""
        if self._first_in_line is seq:
            self._first_in_line = None
        del seq.model.seqs[seq.request.id], self._seqs[seq.request.id]
        if not seq.model.seqs:
            self._idle(seq.model)
        self._shares.left(seq.request.tenant, self._now)
        if not seq.busy:
            self._forget(seq)
            self._retire(seq.model)

    def _busies(self, model: ActiveModel) -> None:
        """Note that an active model has got a request."""
        if len(model.seqs) == 1:
            self._busy.append(model)
            self._busy.sort(key=_BY_NUMBER)

    def _idle(self, model: ActiveModel) -> None:
        """Note that a model has no requests any more, or is not active."""
        if model in self._busy:
            self._busy.remove(model)

    def _forget(self, seq: Seq) -> None:
        if seq.withdrawn and not seq.ended:
            self._actions.append(Drop(seq.request.id))
        self._stop(seq)

    def _stop(self, seq: Seq) -> None:
        """Take its memory away."""
        if self._rotation is not None:
            self._rotation.forget(seq)
        if seq.started:
            seq.model.started -= 1
            self.running -= 1
            self.arena.release(seq.model.key, seq.blocks)
            seq.restart()

    def _retire(self, model: ActiveModel) -> None:
        """Free a deactivated model's memory if its last request and step are gone. Its last step
        may begin or end after it was deactivated, and reads its weights."""
        if model not in self._deactivated or model.seqs or self._in_flight.of(model):
            return
        self._actions += self._weights.ended(model)
        moving = self._rotation is not None and self._rotation.moving(model)
        moving |= self.prefixes is not None and self.prefixes.brings_for(model)
        if not moving:
            self._deactivated.remove(model)
            self.arena.remove_model(model.key)

    # ---- room -----------------------------------------------------------------------------------

    def _lacks_room(self, model: ActiveModel, decodes: list[Seq]) -> bool:
        """Whether decodes of a model with a step in flight need more blocks than there are. They
        wait then until it has landed: no request could be preempted for them before."""
        needed = sum(seq.issued == len(seq.blocks) * BLOCK_TOKENS for seq in decodes)
        short = needed > 0 and self.arena.available(model.key) < needed
        self._short_of_room |= short
        return short

    def _make_room(self, seq: Seq) -> bool:
        """Take one more block, for the next token, preempting others if need be. False: there is
        none."""
        while (block := self.arena.allocate(seq.model.key, 1)) is None:
            if self._release_weights(seq.model):
                continue
            victim = to_preempt(seq, self._seqs.values())
            if victim is None or not self._put_aside(victim):
                self._short_of_room = True
                return False  # the others are more urgent, or in flight: it waits for them
        seq.blocks += block
        return True

    def _in_hbm_or_ready(self) -> list[Seq]:
        """Return the requests that rotate. Of a model whose weights are absent, these are the ones
        with KV in HBM. They may leave, and the others come in after the weights."""
        return [
            seq for seq in self._seqs.values()
            if self._weights.computes(seq.model.name) or (seq.started and not seq.paused)
        ]  # fmt: skip

    def _wake_by(self, when: float | None) -> None:
        if when is not None:
            self._wakeup = when if self._wakeup is None else min(when, self._wakeup)

    def _release_weights(self, model: ActiveModel) -> bool:
        """Release other models' weights for its KV. Return whether there were any that can go."""
        gone = self._weights.make_room(model, self._in_flight.models(), self._now)
        self._actions += gone
        return bool(gone)

    def _make_way_for(self, moves: Sequence[Move]) -> None:
        """Drop prefixes whose room on the host KV of requests needs, and begin the moves."""
        if self.prefixes is not None:
            self.prefixes.make_way()
        self._actions += moves

    def _put_aside(self, victim: Seq) -> bool:
        """Preempt a request. Return whether room is free at once, before its KV has been moved."""
        self.preemptions += 1
        held = len(victim.blocks)
        move = None if self._rotation is None else self._rotation.pause(victim, self._now)
        if move is None:
            self.kv_drops += self._rotation is not None
            self._stop(victim)
            self._actions.append(Drop(victim.request.id, requeued=True))
            return True
        self._make_way_for((move,))
        return len(move.blocks) < held

    def _truncate_if_too_long(self, seq: Seq) -> None:
        """End a request whose tokens, with the one that a step would read next, have more KV than
        the whole arena holds. Its length changes on arrival and at the end of a step, so requests
        that wait, run or are paused always fit."""
        if blocks_of(seq.length) > self._weights.capacity(seq.model):
            self._actions.append(Truncate(seq.request.id))
            seq.ended = True  # it may still wait for the end of a copy to the host
            self._leave(seq)


def with_kv_end(
    actions: Sequence[SliceAction | ExtraT], kv_end_bytes: int
) -> list[SliceAction | ExtraT]:
    """Tell loads how far KV reaches once all that was decided with them is done. Weights that leave
    do so first: some of that KV may have been promised their places."""
    releases: list[SliceAction | ExtraT] = [one for one in actions if isinstance(one, Release)]
    return releases + [
        Fetch(action.model, kv_end_bytes) if isinstance(action, Fetch) else action
        for action in actions if not isinstance(action, Release)
    ]  # fmt: skip
