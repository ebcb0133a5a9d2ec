"""Which slice takes a request: an active instance with room, else an idle slice, else wherever it
can still be in time, making the least valuable model leave a slice that is full of them.

C2CServe sections 6.1 and 6.2, with the shadow validation of SLINFER section 6 C in closed form:
chunks of a prompt are sized so that nobody waits for a whole one (`policy.batching`), so what
matters is the sum of what there is to do.
"""

from collections.abc import Callable, Iterable, Sequence

from c2cserve.core.request import Request
from c2cserve.policy.load import Placement, SliceLoad
from c2cserve.policy.shadow import OVERESTIMATE

_ROOMY = 0.5
"""An instance is preferred to an idle slice while its times stay below this share of the targets.
Above, an idle slice serves sooner, and what is believed about time is rough."""

Value = Callable[[str], tuple[float, ...]]
"""Orders models by what it costs to let them leave a slice, lowest first."""


def in_time(load: SliceLoad, request: Request, now: float, share: float) -> bool:
    """Would the request get its first token within `share` of the time it has left, and would
    a decode step of every model here stay within that share of everybody's TPOT? (SLINFER
    figure 15: cases 1, and 2 with 3.) False if some time is not known yet."""
    if not load.requests:
        return True
    first_s = round_s = 0.0
    tpot_s = request.slo.tpot_s
    for name, instance in load.active.items():
        joins = name == request.model
        if not joins and not instance.jobs:
            continue
        more = request.prompt_len if joins else 0
        first_s += instance.times.prefill_s(instance.pending_tokens + more)
        round_s += instance.decode_s(joins, more)
        tpot_s = min(tpot_s, instance.tpot_s)
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
    request: Request, loads: Iterable[SliceLoad], value: Value, now: float
) -> Placement | None:
    """Where the request should go, of open slices; None: nowhere now. A model with requests on a
    slice is never made to leave it."""
    model = request.model
    here: list[SliceLoad] = []
    others: list[SliceLoad] = []
    for load in loads:
        instance = load.active.get(model)
        if instance is None:
            others.append(load)
        elif len(instance.jobs) < load.instance_limit:
            here.append(load)
    # Largest batch first: it uses the weights best, and lets small batches run dry (section 8).
    here.sort(key=lambda x: (-len(x.active[model].jobs), x.requests, x.slice.id))
    roomy = next((load for load in here if in_time(load, request, now, _ROOMY)), None)
    if roomy is not None:
        return Placement(roomy.slice.id)
    moves = [move for load in others if (move := _activation(load, value)) is not None]
    idle = [move for move in moves if not move[0].requests]
    if idle:
        load, leaving, _ = min(idle, key=lambda m: (m[2], len(m[0].active), m[0].slice.id))
        return Placement(load.slice.id, True, leaving)
    able = next((load for load in here if in_time(load, request, now, 1.0)), None)
    if able is not None:
        return Placement(able.slice.id)
    # Busy everywhere, or late already: wherever least is to be done.
    choices = [(load.requests, False, (), load.slice.id, None) for load in here]
    choices += [(load.requests, True, cost, load.slice.id, out) for load, out, cost in moves]
    if not choices:
        return None
    _, activate, _, slice_id, leaving = min(choices, key=lambda c: c[:4])
    return Placement(slice_id, activate, leaving)


def _activation(
    load: SliceLoad, value: Value
) -> tuple[SliceLoad, str | None, tuple[float, ...]] | None:
    """One more model on the slice: who leaves for it, and what that costs."""
    if len(load.active) < load.slice.max_active:
        return load, None, ()
    if not load.unused:
        return None
    unused = [name for name, instance in load.active.items() if not instance.jobs]
    victim = min(unused, key=lambda name: (value(name), name))
    return load, victim, value(victim)
