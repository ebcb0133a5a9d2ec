"""Which slice takes a request: an active instance with room, else an idle slice, else one where it
can still be in time. The least valuable models leave a slice that is full of them.

C2CServe sections 6.1 and 6.2, with the shadow validation of SLINFER section 6 C in closed form.
Chunks are sized so that no request waits for a whole prompt (`policy.slice.batching`). So what
matters is the sum of what there is to do. A slice's budgets are the time of all requests' tokens
and, where they are known, memory and link (`Budgets`)."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop
from math import ceil, isinf
from typing import Protocol

from c2cserve.core.model import ModelSpec
from c2cserve.core.request import Request
from c2cserve.policy.cluster.pool.residency import ModelBook
from c2cserve.policy.cluster.quantify import OVERESTIMATE
from c2cserve.policy.cluster.slice_load import Instance, Placement, SliceLoad

ROOMY = 0.5
"""An instance is preferred to an idle slice while its times stay below this share of the targets.
Above, an idle slice serves sooner, and what is believed about time is rough."""

Value = Callable[[str], tuple[float, ...]]
"""Orders models by what it costs to let them leave a slice, lowest first."""

Cost = tuple[float, ...]
Victims = tuple[tuple[str, ...], Cost]
"""The models that leave a slice, and what that costs."""


@dataclass(frozen=True, slots=True)
class Ask:
    """What is to be placed, and when."""

    request: Request
    spec: ModelSpec
    kv_bytes: float
    value: Value
    now: float
    budgets: "Budgets"
    runs: bool = False
    """The model has requests on some slice."""
    owed_bytes: int = 0
    """Weights of another model, which runs nowhere and waits for memory."""


class Budgets(Protocol):
    """A slice's memory and its share of a link, where their sizes are known."""

    def bounded(self, load: SliceLoad) -> bool:
        """Return whether the slice can run out of memory."""
        ...

    def holds(self, ask: Ask, load: SliceLoad, weight_bytes: int) -> bool:
        """Return whether there is memory for the request's KV and so many bytes of weights, beside
        what is there."""
        ...

    def resumes(self, ask: Ask, load: SliceLoad, instance: Instance) -> bool:
        """Return whether an instance without requests can go on as it is."""
        ...

    def resumed_bytes(self, load: SliceLoad, instance: Instance) -> int:
        """Return the memory that the instance's weights take once it has a request again."""
        ...

    def frees(self, load: SliceLoad) -> bool:
        """Return whether memory is free once an instance without requests is deactivated."""
        ...

    def displaces(self, ask: Ask, load: SliceLoad) -> bool:
        """Return whether memory is too small for one more model beside the weights of all models
        that are active there, also of those without requests."""
        ...

    def activation(self, ask: Ask, load: SliceLoad) -> tuple[bool, int] | None:
        """Return whether the weights of one more model would be kept as a whole, and the memory
        that they take. None: there is no budget for the model."""
        ...

    def link_bytes_per_s(self, load: SliceLoad) -> int:
        """Return what the slice asks of its link."""
        ...


@dataclass(frozen=True, slots=True)
class Activation:
    """One more model on a slice."""

    load: SliceLoad
    victims: tuple[str, ...]
    cost: Cost
    keep: bool
    """Its weights would be kept; else they stream, or lie in the slice's memory anyway."""

    def placement(self) -> Placement:
        return Placement(self.load.slice.id, True, self.keep, self.victims)


def _predictable(load: SliceLoad, request: Request) -> bool:
    """Return whether all times on the slice are known.

    If some are not, only its other budgets tell whether the request can be in time there. What is
    never tried is never known.
    """
    return not isinf(load.work().round_s + load.times(request.model).decode_s(1, 1))


def in_time(
    load: SliceLoad, request: Request, now: float, share: float, *, late: bool = False
) -> bool:
    """Whether a decode step of every model here stays within `share` of each TPOT, and first tokens
    within that of the time they have left. First tokens are the request's, and those that would be
    in time without it. (SLINFER figure 15: cases 3, 1 and 2.) False if some time is not known yet.
    `late`: its own first token may be late.

    A slice computes prompts by due time. So before a prompt's first token come those due earlier,
    and on GPU slices a round of decodes for each `tpot_s` of them. Decodes of CPU slices, whose
    rounds take most of a TPOT, wait for prompts and catch up."""
    joined = load.active.get(request.model)
    if not load.requests and joined is not None:
        return True
    work, prompt = load.work(), request.prompt_len
    tpot_s = min(work.tpot_s, request.slo.tpot_s)
    if OVERESTIMATE * work.round_s > share * tpot_s:
        return False
    times = load.times(request.model)
    round_s = work.round_s + times.decode_s(1, prompt)
    if joined is not None:
        round_s = work.round_s - joined.decode_s() + joined.decode_s(1, prompt)
    if OVERESTIMATE * round_s > share * tpot_s:
        return False

    def fits(prompts_s: float, due_s: float) -> bool:
        rounds = 1.0 if load.is_cpu else max(1.0, prompts_s / tpot_s)
        return OVERESTIMATE * (prompts_s + rounds * round_s) <= share * (due_s - now)

    own_s, own_due_s = times.prefill_s(prompt), request.first_token_due_s
    own_fits, before_s = late, 0.0
    for due_s, prompt_s in work.prompts:
        if due_s > own_due_s:
            own_fits = own_fits or fits(before_s + own_s, own_due_s)
            if not own_fits:
                return False
        before_s += prompt_s
        if due_s > own_due_s and fits(before_s, due_s) and not fits(before_s + own_s, due_s):
            return False
    return own_fits or fits(before_s + own_s, own_due_s)


def worth_a_try(load: SliceLoad, request: Request, now: float, share: float, *, late: bool) -> bool:
    """Whether the request may be in time on a slice beside what is there (`in_time`). True if times
    are not known."""
    predictable = load.requests and _predictable(load, request)
    return not predictable or in_time(load, request, now, share, late=late)


def active_if_full(loads: Sequence[SliceLoad]) -> set[str] | None:
    """Return the only models that may get a place. None: some slice takes another one."""
    for load in loads:
        if load.unused or len(load.active) < load.slice.max_active:
            return None
    return set[str]().union(*[load.active for load in loads])


def awaited(
    request: Request, load: SliceLoad, models: Mapping[str, ModelBook], waiting: int,
    mean_output: float, now: float,
) -> bool:  # fmt: skip
    """Return whether the model would take a place on the slice from one that will be asked more
    often meanwhile, and that runs nowhere now. (In an overload. Else a place is for who asks.)

        meanwhile = load + mean output * round        asks = rate * meanwhile + those that wait

    Another model had its place here if it was here last. It loses that if its weights do not fit
    beside those with requests, or its steps not into a round."""
    instance = load.active.get(request.model)
    if (instance is not None and instance.jobs) or not load.unused:
        return False
    own, slice_ = models[request.model], load.slice
    round_s = load.work().round_s + load.times(request.model).decode_s(1, request.prompt_len)
    load_s = own.spec.weight_bytes / slice_.load_bytes_per_s if slice_.load_bytes_per_s else 0.0
    meanwhile_s = mean_output * round_s + load_s * load.keeps
    asks = waiting + own.asks.per_s(now) * meanwhile_s
    size = sum(one.spec.weight_bytes for one in load.busy() if not one.streams)
    size += own.spec.weight_bytes + ceil(load.kv_bytes)
    names = [name for name, one in load.active.items() if not one.jobs and name != request.model]
    here = [(models[n].asks.per_s(now), n) for n in names if models[n].slice_id == slice_.id]
    for rate, name in sorted(here, reverse=True):
        if not rate * meanwhile_s > asks:  # also while times are not known
            return False
        other, step_s = models[name], load.times(name).decode_s(1, request.prompt_len)
        fits = not slice_.hbm_bytes or size + other.spec.weight_bytes <= slice_.hbm_bytes
        if fits and OVERESTIMATE * (round_s + step_s) <= request.slo.tpot_s:
            size, round_s = size + other.spec.weight_bytes, round_s + step_s
        elif not other.running:
            return True
    return False


def place(
    request: Request,
    spec: ModelSpec,
    kv_bytes: float,
    loads: list[SliceLoad],
    value: Value,
    now: float,
    *,
    late: bool = False,
    runs: bool = False,
    owed_bytes: int = 0,
    budgets: Budgets,
) -> Placement | None:
    """Return where the request should go, of open slices; None: nowhere now.

    A model with requests on a slice is never made to leave it. `kv_bytes`: what the request will
    take of memory. `late`: it also goes where no other request becomes late because of it, and to
    an idle slice in any case. `runs`: its model has requests on some slice. `owed_bytes`: requests
    that take turns leave room for so many bytes of another model's weights."""
    ask, model = Ask(request, spec, kv_bytes, value, now, budgets, runs, owed_bytes), request.model
    here: list[tuple[SliceLoad, tuple[str, ...]]] = []
    others: list[SliceLoad] = []
    for load in loads:
        instance = load.active.get(model)
        if instance is None or not (instance.jobs or budgets.resumes(ask, load, instance)):
            others.append(load)
        elif len(instance.jobs) < load.instance_limit:
            joining = _room(ask, load, budgets.resumed_bytes(load, instance), 0)
            if joining is not None:
                here.append((load, joining[0]))
    # Largest batch first: it uses the weights best, and lets small batches run dry (section 8).
    here.sort(key=lambda h: (-len(h[0].active[model].jobs), h[0].requests, h[0].slice.id))
    roomy = _first_in_time(ask, here, ROOMY)
    if roomy is not None:
        return roomy
    idle = _idle(ask, others)
    first = idle[0][-1] if idle else None
    if runs and first is not None and budgets.displaces(ask, first.load):
        # A second instance must not displace weights while the first is in time.
        able = _first_in_time(ask, here, 1.0)
        if able is not None:
            return able
    while idle:
        move = heappop(idle)[-1]
        if not budgets.bounded(move.load) or _may_be_in_time(ask, move.load):
            return move.placement()
    able = _first_in_time(ask, here, 1.0)
    if able is not None:
        return able
    for load, victims in here:
        if budgets.bounded(load) and not _predictable(load, request):
            return Placement(load.slice.id, deactivate=victims)
    slices = [load for load, _ in here]
    busy = _busy(ask, slices, others)
    if busy is not None or not late:
        return busy
    if first is not None:
        return first.placement()
    return _first_in_time(ask, here, 1.0, late=True) or _busy(ask, slices, others, late=True)


def _idle(
    ask: Ask, others: Sequence[SliceLoad]
) -> list[tuple[bool, Cost, int, int, str, Activation]]:
    """Return the slices without requests that the model can be activated on, as a heap: CPUs
    first, then the cheapest."""
    moves = [
        move for load in others if not load.requests
        and (move := _activation(ask, load)) is not None
    ]  # fmt: skip
    if not moves:
        return []
    # Over the link that streams least first: interference grows with that (C2CServe 3.3.1).
    streamed = defaultdict[str, int](int)
    for load in others if len(moves) > 1 else ():
        streamed[load.slice.link] += ask.budgets.link_bytes_per_s(load)
    idle = [
        (
            move.load.slice.kind != "cpu", move.cost, streamed[move.load.slice.link],
            len(move.load.active), move.load.slice.id, move,
        )
        for move in moves
    ]  # fmt: skip
    heapify(idle)
    return idle


def place_owed(
    request: Request, spec: ModelSpec, loads: Sequence[SliceLoad], value: Value, now: float,
    budgets: Budgets,
) -> Placement | None:  # fmt: skip
    """Return where to send a request whose tenant has less than its share of each of the `loads`.
    It goes where the tenant has fewest, with its model active if possible. Others' requests make
    room there in time and in memory for KV (`policy.slice_shares`), not their weights: None if they
    are in the way."""

    def order(load: SliceLoad) -> tuple[int, int, str]:
        return load.tenants.get(request.tenant, 0), load.requests, load.slice.id

    active = [load for load in loads if request.model in load.active]
    if active:
        return Placement(min(active, key=order).slice.id)
    ask = Ask(request, spec, 0.0, value, now, budgets)
    for load in sorted(loads, key=order):
        if (move := _activation(ask, load)) is not None:
            return move.placement()
    return None


def _first_in_time(
    ask: Ask,
    here: Iterable[tuple[SliceLoad, tuple[str, ...]]],
    share: float,
    *,
    late: bool = False,
) -> Placement | None:
    for load, victims in here:
        if in_time(load, ask.request, ask.now, share, late=late):
            return Placement(load.slice.id, deactivate=victims)
    return None


def _may_be_in_time(ask: Ask, load: SliceLoad, *, late: bool = False) -> bool:
    if not _predictable(load, ask.request):
        return True
    return in_time(load, ask.request, ask.now, 1.0, late=late)


def _busy(
    ask: Ask, here: Sequence[SliceLoad], others: Sequence[SliceLoad], *, late: bool = False
) -> Placement | None:
    """Busy everywhere, or late already. Where slices can run out of memory, one more instance
    starts where least is to be done. CPUs go first, and the request must be in time there. A
    request that is not in time waits for others to leave. Else it goes where fewest are."""
    bounded = [
        (load.slice.kind != "cpu", load.work().round_s, load.slice.id, load)
        for load in others if ask.budgets.bounded(load)
    ]  # fmt: skip
    heapify(bounded)
    while bounded:
        load = heappop(bounded)[3]
        if _may_be_in_time(ask, load, late=late):
            move = _activation(ask, load)
            if move is not None:
                return move.placement()
    moves = [
        move for load in others if not ask.budgets.bounded(load)
        and (move := _activation(ask, load)) is not None
    ]  # fmt: skip
    choices: list[tuple[int, bool, tuple[float, ...], str, Placement]] = [
        (load.requests, False, (), load.slice.id, Placement(load.slice.id))
        for load in here if not ask.budgets.bounded(load)
    ]  # fmt: skip
    choices += [
        (move.load.requests, True, move.cost, move.load.slice.id, move.placement())
        for move in moves
    ]  # fmt: skip
    return min(choices, key=lambda c: c[:4])[4] if choices else None


# ---- memory: which models leave a slice --------------------------------------------------------


def _room(ask: Ask, load: SliceLoad, weights: int, models: int) -> Victims | None:
    """Return the models that leave for the request's KV, so much memory and so many models more.
    None: a model with requests would have to. The request's own model does not, with or without
    requests."""
    places = load.slice.max_active - len(load.active)
    holds, frees = ask.budgets.holds(ask, load, weights), ask.budgets.frees(load)
    if places >= models and holds:
        return (), ()
    if not load.unused or not (holds or frees):
        return None
    victims: list[str] = []
    unused = [(ask.value(name), name) for name, one in load.active.items() if not one.jobs]
    heapify(unused)
    while unused:
        _, name = heappop(unused)
        if name == ask.spec.id:
            continue
        victims.append(name)
        weights -= load.active[name].spec.weight_bytes if frees else 0
        if places + len(victims) >= models and ask.budgets.holds(ask, load, weights):
            return tuple(victims), ask.value(victims[-1])
    return None


def _activation(ask: Ask, load: SliceLoad) -> Activation | None:
    """Return how the slice takes one more model. None: there is no budget for it, or a model with
    requests would have to leave."""
    budget = ask.budgets.activation(ask, load)
    if budget is None:
        return None
    keep, weights = budget
    anew = (ask.spec.id,) if ask.spec.id in load.active else ()
    victims = _room(ask, load, weights, 1 - len(anew))
    return None if victims is None else Activation(load, anew + victims[0], victims[1], keep)
