"""Where a request goes, as Aegaeon's prompts are dealt out (its Algorithm 1).

It joins a group of its model that has room. Else it begins a group on the slice with least to do.
"""

from collections.abc import Sequence
from math import isinf

from c2cserve.core.model import ModelSpec
from c2cserve.core.request import Request
from c2cserve.policy.baselines.aegaeon.turns import GROUP_MOST
from c2cserve.policy.cluster.slice_load import Placement, SliceLoad


def place_by_groups(
    request: Request, spec: ModelSpec, loads: Sequence[SliceLoad], *, streams: bool = False
) -> Placement | None:
    """Return the slice for it. A model without requests makes room for its own if need be.
    `streams`: weights need not fit into a slice's memory, as steps read them over its link."""
    moves = [
        (load, move) for load in loads
        if (streams or _holds(load, spec)) and (move := _move(load, request)) is not None
    ]  # fmt: skip
    groups = [one for one in moves if _prompts(one[0], spec.id) % GROUP_MOST > 0]
    found = min(groups or moves, key=lambda one: (*_to_do(one[0]), one[0].slice.id), default=None)
    return None if found is None else found[1]


def _holds(load: SliceLoad, spec: ModelSpec) -> bool:
    return not load.slice.hbm_bytes or spec.weight_bytes <= load.slice.hbm_bytes


def _move(load: SliceLoad, request: Request) -> Placement | None:
    name = load.slice.id
    if request.model in load.active:
        full = len(load.active[request.model].jobs) >= load.instance_limit
        return None if full else Placement(name)
    if len(load.active) < load.slice.max_active:
        return Placement(name, activate=True)
    if load.unused:
        unused = min(model for model, one in load.active.items() if not one.jobs)
        return Placement(name, activate=True, deactivate=(unused,))
    return None


def _prompts(load: SliceLoad, model: str) -> int:
    instance = load.active.get(model)
    return 0 if instance is None else len(instance.pending)


def _to_do(load: SliceLoad) -> tuple[float, int]:
    """Return the seconds of its prompts, with a switch for each model, and its requests. Prompts of
    unknown speed count as none: else they would stay unknown."""
    prompts_s = sum(seconds for _, seconds in load.work().prompts if not isinf(seconds))
    rate = load.slice.load_bytes_per_s
    waiting = sum(one.spec.weight_bytes for one in load.active.values() if one.pending)
    return prompts_s + (waiting / rate if rate else 0.0), load.requests
