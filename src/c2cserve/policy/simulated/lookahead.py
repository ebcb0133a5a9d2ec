"""Several decode steps decided at once, where single decisions would come to the same.

While every request on a slice only decodes and nobody comes or goes, `next_turn` alone decides, and
it can be asked for the next steps ahead, with the times they are expected to take. The slice can
then be told all of them: fewer decisions for the same steps. Whoever runs them stops at the end of
a step when anything else happens.
"""

from collections.abc import Iterator, Sequence
from heapq import heapreplace

from c2cserve.core.actions import RunStep
from c2cserve.core.request import BLOCK_TOKENS
from c2cserve.core.step import Step
from c2cserve.core.value import value
from c2cserve.policy.slice.batching import ActiveModel, Flight, Seq
from c2cserve.policy.slice.kv import KvArena


@value
class Limits:
    steps: int
    """That may be decided at once."""
    max_batch: int
    by_headroom: bool
    """A request's rank is when it is late, and grows with its tokens; else it stays as it is."""


@value
class Ahead:
    flights: list[Flight]
    """One for each model that runs."""
    run: RunStep


def decide_ahead(
    models: Sequence[ActiveModel],
    order: Sequence[int],
    arena: KvArena,
    step_ids: Iterator[int],
) -> Ahead | None:
    """Launch what was planned; None if there is not enough memory for all of it."""
    if not _make_room(models, order, arena):
        return None
    flights: list[Flight] = []
    numbers: dict[int, int] = {}
    for index in sorted(set(order)):
        model = models[index]
        numbers[index] = len(flights)
        decodes = sorted(model.seqs.values(), key=model.rank)
        step = Step(next(step_ids), model.name, tuple([seq.issue(1) for seq in decodes]))
        expected_s = model.time.decode_step_s(len(decodes))
        flights.append(Flight(step, model, decodes, len(decodes), 0, expected_s))
    first = flights[0].step
    if len(flights) == 1:
        flights[0].model.last_step = first.id
        return Ahead(flights, RunStep(first, (), (0,) * len(order)))
    for index, number in zip(order, step_ids, strict=False):
        models[index].last_step = number
    then = tuple([flight.step for flight in flights[1:]])
    run = RunStep(first, then, tuple([numbers[index] for index in order]))
    return Ahead(flights, run)


def _make_room(models: Sequence[ActiveModel], order: Sequence[int], arena: KvArena) -> bool:
    """Blocks for all tokens that will be drawn. False: there is not enough memory."""
    for index, model in enumerate(models):
        times = order.count(index)
        needs: list[tuple[Seq, int]] = []
        needed = 0
        for seq in model.seqs.values():
            more = lacking(seq.issued, len(seq.blocks), times)
            if more > 0:
                needs.append((seq, more))
                needed += more
        if needed and arena.available(model.key) < needed:
            return False
        for seq, more in needs:
            seq.blocks += arena.allocate(model.key, more) or ()
    return True


def plan(
    models: Sequence[ActiveModel],
    now: float,
    limits: Limits,
    late_ran: bool,
    favourite: tuple[str, float] | None = None,
) -> list[int]:
    """Which model runs next, then next, and so on: indices into `models`, which are all that have
    requests here. Less than two: there is nothing to be decided ahead. `favourite`: who runs while
    everybody has so many seconds of headroom (`policy.simulated.weight_swapping`)."""
    left = limits.steps
    for model in models:
        left = min(left, _decodes_left(model))
        if left < 2 or model.time.decode_s <= 0.0 or len(model.seqs) > limits.max_batch:
            return []
    if len(models) < 2:
        return [0] * left if models else []
    ranks = [model.first() for model in models]
    top, ease_s = -1, 0.0
    if favourite is not None:
        top, ease_s = [model.name for model in models].index(favourite[0]), favourite[1]
    paces = [model.tpot_s if limits.by_headroom else 0.0 for model in models]
    steps_s = [model.time.decode_step_s(len(model.seqs)) for model in models]
    last = [model.last_step for model in models]
    number = max(last)
    order: list[int] = []
    counts = [0] * len(models)
    punctual = sorted((rank, index) for index, rank in enumerate(ranks))
    for _ in range(limits.steps):
        if punctual and punctual[0][0] < now:
            punctual.clear()
        while punctual and punctual[0][0] != ranks[punctual[0][1]]:
            heapreplace(punctual, (ranks[punctual[0][1]], punctual[0][1]))
        if punctual and top >= 0 and punctual[0][0] >= now + ease_s:
            index, late_ran = top, False
        elif punctual:  # all of them, as a heap: least headroom first
            index, late_ran = punctual[0][1], False
            heapreplace(punctual, (ranks[index] + paces[index], index))
        else:
            index, late_ran = _next(ranks, last, now, late_ran)
        if counts[index] == left:
            break
        order.append(index)
        number += 1
        counts[index] += 1
        last[index] = number
        ranks[index] += paces[index]
        now += steps_s[index]
    return order


def _next(
    ranks: Sequence[float], last: Sequence[int], now: float, late_ran: bool
) -> tuple[int, bool]:
    """`headroom.next_turn` by index (models with equal ranks in the order they became active): who
    it is, and whether it is late."""
    punctual = late = -1
    for index, rank in enumerate(ranks):
        if rank >= now:
            if punctual < 0 or rank < ranks[punctual]:
                punctual = index
        elif late < 0 or last[index] < last[late]:
            late = index
    if late >= 0 and (punctual < 0 or not late_ran):
        return late, True
    return punctual, False


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


def lacking(issued: int, blocks: int, tokens: int) -> int:
    """Blocks that a request which has so many needs besides for so many more tokens; negative: it
    has some to spare."""
    return -(-(issued + tokens) // BLOCK_TOKENS) - blocks
