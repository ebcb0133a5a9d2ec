"""Placing as simpler systems do it: the papers' baselines.

ServerlessLLM, as SLINFER section IX-A tunes it: an instance takes a fixed number of requests at a
time. It has a slice (or a fixed part of a node) to itself, and stays for a while when it is idle. A
request goes to an instance that has room, else a free slice gets a new one, else it waits.

`scatter` looks at no load: any slice, chosen by a hash of the request's id."""

from collections.abc import Sequence
from zlib import crc32

from c2cserve.core.model import ModelSpec
from c2cserve.core.request import Request
from c2cserve.policy.baselines.presets import Limit
from c2cserve.policy.cluster.slice_load import Placement, SliceLoad


def limit(limits: Sequence[Limit], spec: ModelSpec, load: SliceLoad) -> int:
    """Requests an instance of the model may have here."""
    row = next((one for one in limits if spec.weight_bytes <= one.weight_bytes), limits[-1])
    return row.cpu if load.is_cpu else row.gpu


def place_by_limits(
    request: Request, spec: ModelSpec, loads: Sequence[SliceLoad], limits: Sequence[Limit]
) -> Placement | None:
    """CPUs first. Of several instances with room the emptiest: requests are dealt out in turn."""
    here = [
        load for load in loads
        if request.model in load.active
        and len(load.active[request.model].jobs) < limit(limits, spec, load)
    ]  # fmt: skip
    if here:
        best = min(here, key=lambda x: (len(x.active[request.model].jobs), x.slice.id))
        return Placement(best.slice.id)
    free = [load for load in loads if not load.active]
    if not free:
        return None
    return Placement(min(free, key=lambda x: (not x.is_cpu, x.slice.id)).slice.id, activate=True)


def scatter(
    request: Request, loads: Sequence[SliceLoad], seed: int, share: bool
) -> Placement | None:
    """Return one of the slices that can take it. A model without requests there makes room."""
    moves: list[Placement] = []
    for load in sorted(loads, key=lambda x: x.slice.id):
        most = load.slice.max_active if share else 1
        if request.model in load.active:
            if len(load.active[request.model].jobs) < load.instance_limit:
                moves.append(Placement(load.slice.id))
        elif len(load.active) < most:
            moves.append(Placement(load.slice.id, activate=True))
        elif load.unused:
            unused = min(name for name, one in load.active.items() if not one.jobs)
            moves.append(Placement(load.slice.id, activate=True, deactivate=(unused,)))
    return moves[crc32(f"{seed} {request.id}".encode()) % len(moves)] if moves else None
