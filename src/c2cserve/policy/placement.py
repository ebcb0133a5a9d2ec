"""Which slice takes a request: an active instance with room, else an idle slice, else wherever it
can still be in time, making the least valuable models leave a slice that is full of them.

C2CServe sections 6.1 and 6.2, with the shadow validation of SLINFER section 6 C in closed form:
chunks of a prompt are sized so that nobody waits for a whole one (`policy.batching`), so what
matters is the sum of what there is to do. A slice's budgets are the time of everybody's tokens,
memory (weights that are kept, and KV), and the link its weights come over.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, nlargest
from itertools import chain
from math import ceil

from c2cserve.core.model import ModelSpec
from c2cserve.core.request import Request
from c2cserve.policy.link_budget import link_demand
from c2cserve.policy.load import Instance, Placement, SliceLoad
from c2cserve.policy.shadow import OVERESTIMATE

_ROOMY = 0.5
"""An instance is preferred to an idle slice while its times stay below this share of the targets.
Above, an idle slice serves sooner, and what is believed about time is rough."""

SHIFT_TOKENS = 24
"""How many tokens ahead of its clients a model is on average when its weights leave for another's.
Less is more loading; more is less time in which somebody can be away (chosen in simulation)."""

Value = Callable[[str], tuple[float, ...]]
"""Orders models by what it costs to let them leave a slice, lowest first."""

Cost = tuple[float, ...]
Leaving = tuple[tuple[str, ...], Cost]
"""Who leaves a slice, and what that costs."""


@dataclass(frozen=True, slots=True)
class Move:
    """A slice could take one more model."""

    load: SliceLoad
    leaving: tuple[str, ...]
    cost: Cost
    keep: bool
    """Its weights would be kept; else they stream, or lie in the slice's memory anyway."""

    def placement(self) -> Placement:
        return Placement(self.load.slice.id, True, self.keep, self.leaving)


def in_time(load: SliceLoad, request: Request, now: float, share: float) -> bool:
    """Would the request get its first token within `share` of the time it has left, and would
    a decode step of every model here stay within that share of everybody's TPOT? (SLINFER
    figure 15: cases 1, and 2 with 3.) False if some time is not known yet."""
    joined = load.active.get(request.model)
    if not load.requests and joined is not None:
        return True
    work, prompt = load.work(), request.prompt_len
    tpot_s = min(work.tpot_s, request.slo.tpot_s)
    if OVERESTIMATE * work.round_s > share * tpot_s:
        return False
    if joined is None:
        times = load.times(request.model)
        first_s = work.pending_s + times.prefill_s(prompt)
        round_s = work.round_s + times.decode_s(1, prompt)
    else:
        times = joined.times
        more_s = times.prefill_s(joined.pending_tokens + prompt)
        less_s = times.prefill_s(joined.pending_tokens)
        first_s = work.pending_s + (more_s - less_s if less_s < more_s else more_s)
        round_s = work.round_s - joined.decode_s() + joined.decode_s(1, prompt)
    left_s = request.first_token_due_s - now
    return (
        OVERESTIMATE * (first_s + round_s) <= share * left_s
        and OVERESTIMATE * round_s <= share * tpot_s
    )


def active_if_full(loads: Sequence[SliceLoad]) -> set[str] | None:
    """The only models that may get a place if no slice takes another one; None: some slice does."""
    for load in loads:
        if load.unused or len(load.active) < load.slice.max_active:
            return None
    return set[str]().union(*[load.active for load in loads])


def place(
    request: Request,
    spec: ModelSpec,
    kv_bytes: float,
    loads: Iterable[SliceLoad],
    value: Value,
    now: float,
    *,
    never_refused: bool = False,
) -> Placement | None:
    """Where the request should go, of open slices; None: nowhere now. A model with requests on a
    slice is never made to leave it. `kv_bytes`: what the request will take of memory.
    `never_refused`: it takes an idle slice late too, or it would wait for ever."""
    model = request.model
    here: list[tuple[SliceLoad, tuple[str, ...]]] = []
    others: list[SliceLoad] = []
    for load in loads:
        instance = load.active.get(model)
        if instance is None or not (instance.jobs or _resumes(load, instance, request)):
            others.append(load)
        elif len(instance.jobs) < load.instance_limit:
            back = load.keeps and not instance.jobs and not instance.streams
            joining = _room(load, request, back * spec.weight_bytes, kv_bytes, 0, value)
            if joining is not None:
                here.append((load, joining[0]))
    # Largest batch first: it uses the weights best, and lets small batches run dry (section 8).
    here.sort(key=lambda h: (-len(h[0].active[model].jobs), h[0].requests, h[0].slice.id))
    roomy = _first_in_time(here, request, now, _ROOMY)
    if roomy is not None:
        return roomy
    moves = [
        move for load in others if not load.requests
        and (move := _activation(load, request, spec, kv_bytes, value)) is not None
    ]  # fmt: skip
    # Over the link that streams least first: interference grows with that (C2CServe 3.3.1).
    streamed = _streamed(here, others) if len(moves) > 1 else dict[str, int]()
    idle = [
        (
            move.load.slice.kind != "cpu", move.cost, streamed.get(move.load.slice.link, 0),
            len(move.load.active), move.load.slice.id, move,
        )
        for move in moves
    ]  # fmt: skip
    heapify(idle)
    first = idle[0][-1] if idle else None
    while idle:
        move = heappop(idle)[-1]
        if not _bounded(move.load) or in_time(move.load, request, now, 1.0):
            return move.placement()
    able = _first_in_time(here, request, now, 1.0)
    if able is not None:
        return able
    busy = _busy(request, spec, kv_bytes, [load for load, _ in here], others, value, now)
    return first.placement() if busy is None and never_refused and first is not None else busy


def _streamed(
    here: Iterable[tuple[SliceLoad, tuple[str, ...]]], others: Iterable[SliceLoad]
) -> dict[str, int]:
    """Link -> bytes per second that its slices ask of it."""
    streamed: dict[str, int] = {}
    for load in chain((load for load, _ in here), others):
        asked = load.work().link_bytes_per_s
        streamed[load.slice.link] = streamed.get(load.slice.link, 0) + asked
    return streamed


def _first_in_time(
    here: Iterable[tuple[SliceLoad, tuple[str, ...]]], request: Request, now: float, share: float
) -> Placement | None:
    for load, leaving in here:
        if in_time(load, request, now, share):
            return Placement(load.slice.id, deactivate=leaving)
    return None


def _busy(
    request: Request,
    spec: ModelSpec,
    kv_bytes: float,
    here: Sequence[SliceLoad],
    others: Sequence[SliceLoad],
    value: Value,
    now: float,
) -> Placement | None:
    """Busy everywhere, or late already. Where memory is what a slice runs out of (its size is
    known), one more instance where least is to be done and the request is in time, on CPUs first;
    a request that is not waits for somebody to leave. Else it goes wherever fewest are."""
    bounded = [
        (load.slice.kind != "cpu", load.work().round_s, load.slice.id, load)
        for load in others if load.slice.hbm_bytes
    ]  # fmt: skip
    heapify(bounded)
    while bounded:
        load = heappop(bounded)[3]
        if in_time(load, request, now, 1.0):
            move = _activation(load, request, spec, kv_bytes, value)
            if move is not None:
                return move.placement()
    moves = [
        move for load in others if not _bounded(load)
        and (move := _activation(load, request, spec, kv_bytes, value)) is not None
    ]  # fmt: skip
    choices = [
        (load.requests, False, (), load.slice.id, Placement(load.slice.id))
        for load in here if not _bounded(load)
    ]  # fmt: skip
    choices += [
        (move.load.requests, True, move.cost, move.load.slice.id, move.placement())
        for move in moves
    ]  # fmt: skip
    return min(choices, key=lambda c: c[:4])[4] if choices else None


def _bounded(load: SliceLoad) -> bool:
    """Its memory is known, so who could not be in time had better wait for somebody to leave."""
    return load.slice.hbm_bytes > 0


# ---- the link: whether weights stream ----------------------------------------------------------


def _carries(load: SliceLoad, spec: ModelSpec, tpot_s: float) -> bool:
    """Would the slice's share of the link bring one stream more at everybody's pace (section 6.2)?
    Nothing of a newcomer is resident yet."""
    demand = link_demand(ceil(spec.step_bytes(1)), tpot_s)
    if demand > load.slice.link_bytes_per_s:
        return False
    return load.work().link_bytes_per_s + demand <= load.slice.link_bytes_per_s


def _resumes(load: SliceLoad, instance: Instance, request: Request) -> bool:
    """Could an instance without requests go on as it is? If its weights stream and others have
    taken the link since, it must be made anew, with its weights kept."""
    return not instance.streams or _carries(load, instance.spec, request.slo.tpot_s)


# ---- memory: who leaves ------------------------------------------------------------------------


def _holds(load: SliceLoad, weights: int, kv_bytes: float, tpot_s: float) -> bool:
    """Is there memory for so much more, beside what everybody has? Where models take shifts, those
    without requests are not in the way."""
    if not _bounded(load):
        return True
    free = load.slice.hbm_bytes - load.kv_bytes - kv_bytes
    if not load.keeps:
        return load.weight_bytes + weights <= free
    sizes = [one.spec.weight_bytes for one in load.busy() if not one.streams]
    sizes += [weights] if weights else []
    return sum(sizes) <= free or _take_shifts(load, sizes, free, tpot_s)


def _take_shifts(load: SliceLoad, sizes: list[int], free: float, tpot_s: float) -> bool:
    """Could models with weights of these sizes take shifts in so much memory (`policy.shifts`)?
    Two have to fit, one that computes while the other is loaded; the link has to bring each of them
    once while a client reads `SHIFT_TOKENS`; and a newcomer has to be the only one that waits for
    its first load."""
    period_s = SHIFT_TOKENS * min(tpot_s, load.work().tpot_s)
    return (
        sum(nlargest(2, sizes)) <= free
        and sum(sizes) <= period_s * load.slice.link_bytes_per_s
        and all(one.ready for one in load.busy())
    )


def _room(
    load: SliceLoad, request: Request, weights: int, kv_bytes: float, models: int, value: Value
) -> Leaving | None:
    """Who leaves for so much memory and so many models more; None: somebody with requests would
    have to. The request's own model does not, with or without requests."""
    places, tpot_s = load.slice.max_active - len(load.active), request.slo.tpot_s
    if places >= models and _holds(load, weights, kv_bytes, tpot_s):
        return (), ()
    if not load.unused:
        return None
    leaving: list[str] = []
    unused = [(value(name), name) for name, one in load.active.items() if not one.jobs]
    for _, name in sorted(unused):
        if name == request.model:
            continue
        leaving.append(name)
        one = load.active[name]
        weights -= 0 if load.keeps else one.spec.weight_bytes
        if places + len(leaving) >= models and _holds(load, weights, kv_bytes, tpot_s):
            return tuple(leaving), value(leaving[-1])
    return None


def _activation(
    load: SliceLoad, request: Request, spec: ModelSpec, kv_bytes: float, value: Value
) -> Move | None:
    """One more model on the slice. None: somebody with requests would have to leave, or there is no
    budget for it. Its weights stream if the link carries that, else they are kept in memory; those
    of a model that is larger than the memory stream as well as they can, with none beside them."""
    anew = (spec.id,) if spec.id in load.active else ()
    keep = load.keeps and not _carries(load, spec, request.slo.tpot_s)
    if keep and spec.weight_bytes + kv_bytes > load.slice.hbm_bytes:
        if load.work().link_bytes_per_s:
            return None
        keep = False
    weights = 0 if load.keeps and not keep else spec.weight_bytes
    leaving = _room(load, request, weights, kv_bytes, 1 - len(anew), value)
    if leaving is None:
        return None
    return Move(load, anew + leaving[0], leaving[1], keep)
