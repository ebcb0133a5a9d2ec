"""Several decode steps decided at once, where single decisions would come to the same.

While every request on a slice only decodes and nobody comes or goes, `next_turn` alone decides, and
it can be asked for the next steps ahead, with the times they are expected to take. The slice can
then be told all of them: fewer decisions for the same steps. Whoever runs them stops at the end of
a step when anything else happens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from c2cserve.core.actions import RunStep
from c2cserve.core.request import BLOCK_TOKENS
from c2cserve.core.step import Step
from c2cserve.policy.batching import ActiveModel, Flight
from c2cserve.policy.kv import KvArena


@dataclass(frozen=True, slots=True)
class Limits:
    steps: int
    """That may be decided at once."""
    max_batch: int
    by_headroom: bool
    """A request's rank is when it is late, and grows with its tokens; else it stays as it is."""


@dataclass(frozen=True, slots=True)
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
        decodes, _ = model.line_up()
        step = Step(next(step_ids), model.name, tuple(seq.issue(1) for seq in decodes))
        expected_s = model.time.decode_step_s(len(decodes))
        flights.append(Flight(step, model, decodes, len(decodes), 0, expected_s))
    if len(flights) == 1:
        flights[0].model.last_step = flights[0].step.id
    else:
        for index in order:
            models[index].last_step = next(step_ids)
    steps = [flight.step for flight in flights]
    run = RunStep(steps[0], tuple(steps[1:]), tuple(numbers[index] for index in order))
    return Ahead(flights, run)


def _make_room(models: Sequence[ActiveModel], order: Sequence[int], arena: KvArena) -> bool:
    """Blocks for all tokens that will be drawn. False: there is not enough memory."""
    for index, model in enumerate(models):
        times = order.count(index)
        needs = [(seq, lacking(seq.issued, len(seq.blocks), times)) for seq in model.seqs.values()]
        needed = sum(more for _, more in needs)
        if needed and arena.available(model.key) < needed:
            return False
        for seq, more in needs:
            if more:
                seq.blocks += arena.allocate(model.key, more) or ()
    return True


def plan(models: Sequence[ActiveModel], now: float, limits: Limits, late_ran: bool) -> list[int]:
    """Which model runs next, then next, and so on: indices into `models`, which are all that have
    requests here. Less than two: there is nothing to be decided ahead."""
    left = limits.steps
    for model in models:
        left = min(left, _decodes_left(model))
        if left < 2 or model.time.decode_s <= 0.0 or len(model.seqs) > limits.max_batch:
            return []
    if len(models) < 2:
        return [0] * left if models else []
    ranks = [model.first() for model in models]
    paces = [model.tpot_s if limits.by_headroom else 0.0 for model in models]
    steps_s = [model.time.decode_step_s(len(model.seqs)) for model in models]
    last = [model.last_step for model in models]
    number = max(last)
    order: list[int] = []
    counts = [0] * len(models)
    for _ in range(limits.steps):
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
        if not seq.started or seq.paused or seq.busy or seq.issued != seq.length - 1:
            return 0
        left = min(left, seq.request.prompt_len + seq.request.max_new_tokens - seq.length)
    return left


def lacking(issued: int, blocks: int, tokens: int) -> int:
    """Blocks that a request which has so many needs besides for so many more tokens."""
    return max(0, -(-(issued + tokens) // BLOCK_TOKENS) - blocks)
