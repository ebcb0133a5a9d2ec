"""Which slice takes a request: an active instance with room, else an idle slice, else wherever it
can still be in time, making the least valuable models leave a slice that is full of them.

C2CServe sections 6.1 and 6.2, with the shadow validation of SLINFER section 6 C in closed form:
chunks of a prompt are sized so that nobody waits for a whole one (`policy.batching`), so what
matters is the sum of what there is to do. A slice's budgets are the time of everybody's tokens,
memory (weights that are kept, and KV), and the link its weights come over.
"""

from collections.abc import Callable, Iterable, Sequence

from c2cserve.core.model import ModelSpec
from c2cserve.core.request import Request
from c2cserve.policy.link_budget import link_demand
from c2cserve.policy.load import Placement, SliceLoad
from c2cserve.policy.shadow import OVERESTIMATE

_ROOMY = 0.5
"""An instance is preferred to an idle slice while its times stay below this share of the targets.
Above, an idle slice serves sooner, and what is believed about time is rough."""

BURST = 20
"""Tokens that each of a model's requests gains while its weights are in a slice's memory, where
those come and go (`policy.swaps`)."""
SHARE = 0.3
"""Of the link, for that: first tokens find it free most of the time."""

Value = Callable[[str], tuple[float, ...]]
"""Orders models by what it costs to let them leave a slice, lowest first."""

Move = tuple[SliceLoad, tuple[str, ...], tuple[float, ...]]
"""A slice that could take one more model, who leaves for it, and what that costs."""


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
    if any(len(load.active) < load.slice.max_active or load.unused for load in loads):
        return None
    return {name for load in loads for name in load.active}


def place(
    request: Request,
    spec: ModelSpec,
    kv_bytes: float,
    loads: Iterable[SliceLoad],
    value: Value,
    now: float,
) -> Placement | None:
    """Where the request should go, of open slices; None: nowhere now. A model with requests on a
    slice is never made to leave it. `kv_bytes`: what the request will take of memory."""
    model = request.model
    here: list[SliceLoad] = []
    others: list[SliceLoad] = []
    for load in loads:
        instance = load.active.get(model)
        if instance is None:
            others.append(load)
        elif len(instance.jobs) < load.instance_limit and _holds(load, 0, kv_bytes):
            here.append(load)
    # Largest batch first: it uses the weights best, and lets small batches run dry (section 8).
    here.sort(key=lambda x: (-len(x.active[model].jobs), x.requests, x.slice.id))
    roomy = next((load for load in here if in_time(load, request, now, _ROOMY)), None)
    if roomy is not None:
        return Placement(roomy.slice.id)
    idle = [
        move for load in others if not load.requests
        and (move := _activation(load, request, spec, kv_bytes, value, now)) is not None
        and (not _bounded(load) or in_time(load, request, now, 1.0))
    ]  # fmt: skip
    if idle:
        load, leaving, _ = min(
            idle, key=lambda m: (not m[0].is_cpu, m[2], len(m[0].active), m[0].slice.id)
        )
        return Placement(load.slice.id, True, leaving)
    able = next((load for load in here if in_time(load, request, now, 1.0)), None)
    if able is not None:
        return Placement(able.slice.id)
    return _busy(request, spec, kv_bytes, here, others, value, now)


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
    bounded = [load for load in others if _bounded(load)]
    bounded.sort(key=lambda x: (not x.is_cpu, x.round_s(), x.slice.id))
    for load in bounded:
        if in_time(load, request, now, 1.0):
            move = _activation(load, request, spec, kv_bytes, value, now)
            if move is not None:
                return Placement(load.slice.id, True, move[1])
    moves = [
        move for load in others if not _bounded(load)
        and (move := _activation(load, request, spec, kv_bytes, value, now)) is not None
    ]  # fmt: skip
    choices = [(load.requests, False, (), load.slice.id, ()) for load in here if not _bounded(load)]
    choices += [
        (load.requests, True, cost, load.slice.id, out)
        for load, out, cost in moves
    ]  # fmt: skip
    if not choices:
        return None
    _, activate, _, slice_id, leaving = min(choices, key=lambda c: c[:4])
    return Placement(slice_id, activate, leaving)


def _bounded(load: SliceLoad) -> bool:
    """Its memory is known, so who could not be in time had better wait for somebody to leave."""
    return load.slice.hbm_bytes > 0


def _holds(load: SliceLoad, weights: int, kv_bytes: float) -> bool:
    """Is there memory for so much more, beside what everybody has? Weights that come and go are
    nobody's (`policy.swaps`)."""
    if not _bounded(load):
        return True
    if load.swaps:
        return load.kv_bytes + kv_bytes <= load.slice.kv_bytes
    return load.weight_bytes + weights + load.kv_bytes + kv_bytes <= load.slice.hbm_bytes


def _carries(load: SliceLoad, request: Request, spec: ModelSpec, now: float) -> bool:
    """Would the link bring the weights of one busy model more? Section 6.2's budget, where a model
    comes once for `BURST` tokens instead of with each; and first tokens wait for those that come
    before them."""
    if not load.swaps:
        return True
    weights, coming, tpot_s = spec.weight_bytes, spec.weight_bytes, request.slo.tpot_s
    for instance in load.busy():
        weights += instance.spec.weight_bytes
        tpot_s = min(tpot_s, instance.tpot_s)
        if all(job.first_s is None for job in instance.jobs.values()):
            coming += instance.spec.weight_bytes
    slice_ = load.slice
    resident = min(1.0, (slice_.hbm_bytes - slice_.kv_bytes) / weights)
    demand = link_demand(weights, BURST * tpot_s, resident)
    left_s = request.first_token_due_s - now
    alone = coming == spec.weight_bytes
    return demand <= SHARE * slice_.link_bytes_per_s and (
        alone or coming <= left_s * slice_.link_bytes_per_s
    )


def _activation(
    load: SliceLoad, request: Request, spec: ModelSpec, kv_bytes: float, value: Value, now: float
) -> Move | None:
    """One more model on the slice: who leaves for it, and what that costs. None: somebody with
    requests would have to, or there is no budget for it."""
    if not _carries(load, request, spec, now):
        return None
    weights = spec.weight_bytes
    places = load.slice.max_active - len(load.active)
    if places > 0 and _holds(load, weights, kv_bytes):
        return load, (), ()
    if not load.unused:
        return None
    leaving: list[str] = []
    unused = [(value(name), name) for name, one in load.active.items() if not one.jobs]
    for _, name in sorted(unused):
        leaving.append(name)
        weights -= load.active[name].spec.weight_bytes
        if places + len(leaving) > 0 and _holds(load, weights, kv_bytes):
            return load, tuple(leaving), value(leaving[-1])
    return None
