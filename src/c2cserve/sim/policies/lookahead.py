"""Several decode steps decided at once, where single decisions would come to the same.

While every request on a slice only decodes and none comes or goes, `next_turn` alone decides. It
can be asked for several steps, with the times they are expected to take. The slice can then be told
all of them: fewer decisions for the same steps. The executor stops at the end of a step when
anything else happens."""

from typing import Any

from c2cserve.core.actions import RunStep
from c2cserve.core.request import blocks_of
from c2cserve.core.step import Step
from c2cserve.policy.headroom import next_turn
from c2cserve.policy.slice import in_flight
from c2cserve.policy.slice.batching import ActiveModel, DecidedSteps, Seq, StepInFlight
from c2cserve.policy.slice.in_flight import StepNumbers
from c2cserve.policy.slice.kv import KvArena
from c2cserve.policy.slice.strategies import SliceStrategies
from c2cserve.policy.weights.weight_swapping import EASE_S, WeightSwapping

_STEPS_SCARCE = 8
"""Steps decided at once while a model waits for memory."""


class Lookahead(in_flight.Lookahead):
    """The lookahead of a slice with one lane, whose KV does not rotate."""

    def __init__(
        self, steps: int, max_batch: int, strategies: SliceStrategies[Any], *, by_headroom: bool
    ) -> None:
        """`steps`: that may be decided at once. `by_headroom`: a request's rank is when its next
        token is late, and grows with its tokens; else it stays as it is."""
        self._steps = steps
        self._max_batch = max_batch
        self._arena, memory = strategies.arena, strategies.memory
        self._swapping = memory if isinstance(memory, WeightSwapping) else None
        self._by_headroom = by_headroom

    def decide(
        self, models: list[ActiveModel], step_ids: StepNumbers, now: float, late_ran: bool
    ) -> DecidedSteps | None:
        """Decide the next steps and take memory for them. None: there are less than two, or there
        is not enough memory for all of them."""
        order, times = self.plan(models, now, late_ran)
        if len(order) < 2:
            return None
        if not _make_room(models, times, self._arena):
            return None
        return _launch(models, order, times, step_ids, now)

    def plan(
        self, models: list[ActiveModel], now: float, late_ran: bool
    ) -> tuple[tuple[int, ...], list[int]]:
        """Return which model runs next, then next, and so on: indices into `models`, which are all
        that have requests here. Return also how often each of them runs."""
        steps, favourite = self._steps, None
        if self._swapping is not None and self._swapping.scarce:
            steps = min(steps, _STEPS_SCARCE)
        left = steps
        for model in models:
            left = min(left, _decodes_left(model))
            too_many = len(model.seqs) > self._max_batch
            if left < 2 or model.time.decode_step_s(len(model.seqs)) <= 0.0 or too_many:
                return (), []
        if len(models) < 2:
            return ((0,) * left, [left]) if models else ((), [])
        names = [model.name for model in models]
        if self._swapping is not None:
            favourite = self._swapping.favourite(names, now)
        top = -1 if favourite is None else names.index(favourite)
        paces = [model.tpot_s if self._by_headroom else 0.0 for model in models]
        order, times = _order(models, paces, top, steps, left, now, late_ran)
        return tuple(order), times


def _order(
    models: list[ActiveModel], paces: list[float], top: int, steps: int, most: int,
    now: float, late_ran: bool,
) -> tuple[list[int], list[int]]:  # fmt: skip
    """Play single decisions through, and count how often each model runs. `paces`: seconds by which
    a token moves a model's rank. `top`: the model that runs while all have `EASE_S` of headroom;
    -1: none. A model runs `most` times."""
    ranks = [model.first() for model in models]
    steps_s = [model.time.decode_step_s(len(model.seqs)) for model in models]
    last = [model.last_step for model in models]
    number, noted = max(last), 0
    order: list[int] = []
    counts = [0] * len(models)
    punctual = top >= 0
    if not punctual:
        now, over = _by_rank(ranks, paces, steps_s, counts, order, steps, most, now)
        if over:
            return order, counts
        late_ran = late_ran and not order
    known = list(ranks)  # those of the favourite are updated when it matters
    while len(order) < steps:
        index = _least(known) if punctual else 0
        punctual = punctual and known[index] >= now
        if punctual:  # all of them: least headroom first
            while known[index] != ranks[index]:  # this one ran as the favourite
                known[index] = ranks[index]
                index = _least(known)
            rank, late_ran = known[index], False
            if top >= 0 and rank >= now + EASE_S:
                if index != top:  # it has the least headroom until the favourite has used that up
                    runs, each_s = counts[top], steps_s[top]
                    while rank >= now + EASE_S and runs < most and len(order) < steps:
                        order.append(top)
                        runs += 1
                        ranks[top] = ranks[top] + paces[top]
                        now += each_s
                    counts[top] = runs
                    if rank >= now + EASE_S:
                        break
                    continue
                index = top
            else:
                known[index] = rank + paces[index]
        else:
            for position in range(noted, len(order)):
                last[order[position]] = number + position + 1
            noted = len(order)
            turn = next_turn(zip(ranks, last, range(len(ranks)), strict=True), now, late_ran)
            assert turn is not None, "there are models"
            late_ran, index = turn
        runs = counts[index]
        if runs == most:
            break
        order.append(index)
        counts[index] = runs + 1
        ranks[index] = ranks[index] + paces[index]
        now += steps_s[index]
    return order, counts


def _by_rank(
    ranks: list[float], paces: list[float], steps_s: list[float], counts: list[int],
    order: list[int], steps: int, most: int, now: float,
) -> tuple[float, bool]:  # fmt: skip
    """Play decisions through while no model is late: least headroom first. Return when that ends,
    and whether nothing is to be decided any more. `order`, `counts` and `ranks` go on."""
    for _ in range(steps - len(order)):
        index, rank = 0, ranks[0]
        for other in range(1, len(ranks)):
            if ranks[other] < rank:
                index, rank = other, ranks[other]
        if rank < now:
            return now, False
        runs = counts[index]
        if runs == most:
            return now, True
        order.append(index)
        counts[index] = runs + 1
        ranks[index] = rank + paces[index]
        now += steps_s[index]
    return now, True


def _least(ranks: list[float]) -> int:
    """Return the index of the least rank, the first of several."""
    index, least = 0, ranks[0]
    for other in range(1, len(ranks)):
        rank = ranks[other]
        if rank < least:
            index, least = other, rank
    return index


def _launch(
    models: list[ActiveModel], order: tuple[int, ...], times: list[int], step_ids: StepNumbers,
    now: float,
) -> DecidedSteps:  # fmt: skip
    """`times`: how often each model runs."""
    launched: list[StepInFlight] = []
    numbers = [-1] * len(times)
    for index, runs in enumerate(times):
        if not runs:
            continue
        model = models[index]
        numbers[index] = len(launched)
        decodes = list(model.seqs.values())
        if len(decodes) > 1:
            decodes.sort(key=model.rank)
        step = Step(step_ids.take(), model.name, tuple([seq.issue(1) for seq in decodes]))
        expected_s = model.time.decode_step_s(len(decodes))
        launched.append(StepInFlight(step, model, decodes, len(decodes), 0, expected_s))
    first = launched[0].step
    if len(launched) == 1:
        launched[0].model.last_step = first.id
        run = RunStep(first, (), order if len(models) == 1 else (0,) * len(order))
    else:
        first_id = step_ids.take(len(order))
        last = [0] * len(times)
        for position, index in enumerate(order):
            last[index] = position
        for index, runs in enumerate(times):
            if runs:
                models[index].last_step = first_id + last[index]
        then = tuple([one.step for one in launched[1:]])
        all_run = len(launched) == len(models)
        numbered = order if all_run else tuple([numbers[index] for index in order])
        run = RunStep(first, then, numbered)
    return DecidedSteps(launched, run, models[order[-1]].first() < now)


def _make_room(models: list[ActiveModel], times: list[int], arena: KvArena) -> bool:
    """Blocks for all tokens that will be drawn. False: there is not enough memory."""
    for index, model in enumerate(models):
        runs = times[index]
        needs: list[tuple[Seq, int]] = []
        needed = 0
        for seq in model.seqs.values():
            more = _lacking(seq.issued, len(seq.blocks), runs)
            if more > 0:
                needs.append((seq, more))
                needed += more
        if needed and arena.available(model.key) < needed:
            return False
        for seq, more in needs:
            seq.blocks += arena.allocate(model.key, more) or ()
    return True


def _decodes_left(model: ActiveModel) -> int:
    """Tokens every request of the model may still draw; 0 if one of them does not just decode."""
    left = 1 << 30
    for seq in model.seqs.values():
        length = seq.length
        if not seq.started or seq.paused or seq.busy or seq.issued != length - 1:
            return 0
        more = seq.request.prompt_len + seq.request.max_new_tokens - length
        if more < left:
            left = more
    return left


def _lacking(issued: int, blocks: int, tokens: int) -> int:
    """Blocks that a request which has so many needs besides for so many more tokens; negative: it
    has some to spare."""
    return blocks_of(issued + tokens) - blocks
