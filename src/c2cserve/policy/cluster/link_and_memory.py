"""Which models of a slice stream, which are resident, and how many swap weights (ours).

On a slice with known memory and link (`policy.cluster.placement.Budgets`), over models with
requests there:

    streamed    sum of S_m / TPOT_m <= share of the link, and a round <= TPOT / 2
    resident    sum of weights + expected KV <= memory
    rotating    sum of weights <= memory, and KV <= what takes turns in the rest (`turns_bytes`),
                less the largest weights that wait for memory or are idle here, if they fit
    swapped     the two largest weights + expected KV <= memory, and
                the link loads each of them once while a client reads `SWAP_TOKENS`

The slice's own share of its link has to carry streams, and models that take turns for long: its
neighbours may need their links then. The first load of a model may use theirs, too.

`S_m` is what one decode step reads over the link, and S_m / TPOT_m is what keeps the model's pace
(`link_demand`; C2CServe sections 6.1 and 6.2).

A model that runs on another slice does not begin to swap here. Two instances of it would read its
weights twice in each round, with half of the batch each. And both would take time and memory from
models that run nowhere else. So its request waits for room where it runs, or for enough memory.
"""

from math import ceil, isinf

from c2cserve.core.model import ModelSpec
from c2cserve.policy.cluster.placement import ROOMY, Ask, Budgets
from c2cserve.policy.cluster.slice_load import Instance, SliceLoad
from c2cserve.policy.slice.rotation import AHEAD_SHARE

SWAP_TOKENS = 24
"""The tokens that a model is on average ahead of its clients when its weights make room.

Fewer tokens mean more loading. More tokens mean less time for which a model can be absent. The
number was chosen in simulation.
"""


def link_demand(step_bytes: int, tpot_s: float, resident: float = 0.0) -> int:
    """Return the bytes per second that a model needs of the link, for one decode step per `tpot_s`.

        BW_m = (1 - resident) * S_m / TPOT_m    (section 6.2, first formula)

    `step_bytes`: weights read by a step, of a mixture of experts what its batch chooses.
    `resident`: the share of them in HBM, 0 to 1, which is ours: the paper has 0. Rates are whole
    numbers, so that books which are added to and taken from for days stay exact."""
    if tpot_s <= 0.0 or not 0.0 <= resident <= 1.0:
        raise ValueError(f"no pace of {tpot_s} s with {resident} of the weights resident")
    return ceil((1.0 - resident) * step_bytes / tpot_s)


class LinkAndMemory(Budgets):
    """The budgets of slices whose memory or link is known."""

    def __init__(self, *, rotates: bool = True) -> None:
        """`rotates`: slices with host memory for KV use it for requests that take turns."""
        self._rotates = rotates

    def bounded(self, load: SliceLoad) -> bool:
        return load.slice.hbm_bytes > 0

    def holds(self, ask: Ask, load: SliceLoad, weight_bytes: int) -> bool:
        if not load.slice.hbm_bytes:
            return True
        free = load.slice.hbm_bytes - load.kv_bytes - ask.kv_bytes
        if not load.keeps:
            return load.weight_bytes + weight_bytes <= free
        total = load.resident_bytes()
        if total + weight_bytes <= free:
            return True
        sizes = _resident_bytes(load)
        if not weight_bytes:  # one more request for models that are there or swap already
            return _two_largest(sizes) <= free or self._take_turns(ask, load, total)
        if not ask.runs and self._take_turns(ask, load, total + weight_bytes):
            return True
        return not ask.runs and _swappable(ask, load, [*sizes, weight_bytes], free)

    def _take_turns(self, ask: Ask, load: SliceLoad, weight_bytes: int) -> bool:
        """Return whether KV fits beside these weights if requests take turns there. They leave
        room for a model that waits for memory, and for one that is active here without requests.
        Else a model that is asked rarely would wait until no request of the others takes turns."""
        room = load.slice.hbm_bytes - weight_bytes
        if not self._rotates or not load.slice.host_kv_bytes or room <= 0:
            return False
        owed_bytes = ask.owed_bytes
        if load.unused:
            for name, one in load.active.items():
                idle = not (one.jobs or one.streams or name == ask.spec.id)
                if idle and one.spec.weight_bytes > owed_bytes:
                    owed_bytes = one.spec.weight_bytes
        room -= owed_bytes if owed_bytes < room else 0
        link = load.slice.link_bytes_per_s - self.link_bytes_per_s(load)
        kv_bytes, work = load.kv_bytes + ask.kv_bytes, load.work()
        tpot_s = min(work.tpot_s, ask.request.slo.tpot_s)
        mean = kv_bytes / (load.requests + 1)
        most = turns_bytes(room, load.slice.host_kv_bytes, link, mean, work.round_s, tpot_s)
        return kv_bytes <= most

    def resumes(self, ask: Ask, load: SliceLoad, instance: Instance) -> bool:
        """Return False if its weights stream and the link no longer carries them. Then it must be
        made anew, with resident weights."""
        tpot_s = ask.request.slo.tpot_s
        return not instance.streams or carries(load, instance.spec, tpot_s)

    def resumed_bytes(self, load: SliceLoad, instance: Instance) -> int:
        back = load.keeps and not instance.jobs and not instance.streams
        return instance.spec.weight_bytes if back else 0

    def frees(self, load: SliceLoad) -> bool:
        return not load.keeps

    def displaces(self, ask: Ask, load: SliceLoad) -> bool:
        weights = 0 if ask.spec.id in load.active else ask.spec.weight_bytes
        free = load.slice.hbm_bytes - load.kv_bytes - ask.kv_bytes
        return self.bounded(load) and load.weight_bytes + weights > free

    def activation(self, ask: Ask, load: SliceLoad) -> tuple[bool, int] | None:
        """Make weights resident if they fit, or if the link would not carry them as a stream. A
        model larger than the memory streams as well as it can, with no other stream."""
        spec = ask.spec
        free = load.slice.hbm_bytes - load.kv_bytes - ask.kv_bytes
        keep = load.keeps and (
            load.resident_bytes() + spec.weight_bytes <= free
            or not carries(load, spec, ask.request.slo.tpot_s)
        )
        if keep and spec.weight_bytes + ask.kv_bytes > load.slice.hbm_bytes:
            if self.link_bytes_per_s(load):
                return None
            keep = False
        return keep, 0 if load.keeps and not keep else spec.weight_bytes

    def link_bytes_per_s(self, load: SliceLoad) -> int:
        return sum(
            link_demand(ceil(one.spec.step_bytes(len(one.jobs))), one.tpot_s)
            for one in load.busy()
            if one.streams
        )


LINK_AND_MEMORY = LinkAndMemory()


def turns_bytes(
    room: float, host_bytes: float, link_bytes_per_s: float, request_bytes: float, round_s: float,
    tpot_s: float,
) -> float:  # fmt: skip
    """Return the KV of requests that can take turns in `room` bytes of HBM and be in time.

    A request is in HBM for `room / KV` of the time. After each step one may come in, over what
    streams leave of the link. Each must have a token in a TPOT on average:

        (round + request / link) * KV / room <= TPOT

    Exchanges are counted as if none was hidden behind a step, which leaves time for prompts. Those
    that are away lie in host memory, beside copies that running ones have there."""
    if link_bytes_per_s <= 0.0 or isinf(round_s):
        return room
    turns = tpot_s / (round_s + request_bytes / link_bytes_per_s)
    away = max(host_bytes * (1.0 - AHEAD_SHARE), host_bytes - room)
    return max(room, min(room * turns, room + away))


def stream_step_s(load: SliceLoad, spec: ModelSpec) -> float:
    """Return the least time of a decode step whose weights come over the slice's link."""
    return spec.step_bytes(1) / load.slice.link_bytes_per_s


def carries(load: SliceLoad, spec: ModelSpec, tpot_s: float) -> bool:
    """Return whether the link carries one more stream in time (C2CServe 6.2).

    All streams must fit into the slice's share of the link, and a round must leave time for others.
    A new model has nothing resident yet.
    """
    demand = link_demand(ceil(spec.step_bytes(1)), tpot_s)
    if demand > load.slice.link_bytes_per_s:
        return False
    return (
        LINK_AND_MEMORY.link_bytes_per_s(load) + demand <= load.slice.link_bytes_per_s
        and load.work().round_s + stream_step_s(load, spec) <= ROOMY * tpot_s
    )


def _resident_bytes(load: SliceLoad) -> list[int]:
    """Return the weight bytes of each model with requests that does not stream. With weight
    swapping, models without requests take no room."""
    return [one.spec.weight_bytes for one in load.busy() if not one.streams]


def _two_largest(sizes: list[int]) -> int:
    """Return the sum of the two largest sizes."""
    first = second = 0
    for size in sizes:
        if size > first:
            first, second = size, first
        elif size > second:
            second = size
    return first + second


def _swappable(ask: Ask, load: SliceLoad, sizes: list[int], free: float) -> bool:
    """Return whether models of these sizes can swap weights in `free` bytes of memory.

    The new model's size comes last. Loads under way must leave time for its own. If that alone
    takes longer than there is time, no other model may be waiting for its first load. See
    `policy.weights.weight_swapping`.
    """
    link_bytes_per_s = load.slice.link_bytes_per_s
    period_s = SWAP_TOKENS * min(ask.request.slo.tpot_s, load.work().tpot_s)
    if _two_largest(sizes) > free or sum(sizes) > period_s * link_bytes_per_s:
        return False
    loading = sum(one.spec.weight_bytes for one in load.busy() if not one.ready)
    left_s = ask.request.first_token_due_s - ask.now
    own = 0 if ask.request.slo.excuses_loads else sizes[-1]
    return loading <= max(0.0, left_s * load.slice.load_bytes_per_s - own)
