"""Which models of a slice stream, which are kept, and how many take turns in its memory (ours).

On a slice with known memory and link (`policy.cluster.placement.Budgets`), over models with
requests there:

    streamed    sum of S_m / TPOT_m <= share of the link, and a round <= TPOT / 2
    kept        sum of kept weights + expected KV <= memory
    swapped     the two largest kept weights + expected KV <= memory, and
                the link loads each of them once while a client reads `SWAP_TOKENS`
"""

from heapq import nlargest
from math import ceil

from c2cserve.core.model import ModelSpec
from c2cserve.policy.cluster.link_budget import link_demand
from c2cserve.policy.cluster.placement import ROOMY, Ask
from c2cserve.policy.cluster.slice_load import Instance, SliceLoad

SWAP_TOKENS = 24
"""How many tokens ahead of its clients a model is on average when its weights leave for another's.
Less is more loading; more is less time for which a model can be absent (chosen in simulation)."""


class LinkAndMemory:
    """`policy.cluster.placement.Budgets` of slices whose memory or link is known."""

    def bounded(self, load: SliceLoad) -> bool:
        return load.slice.hbm_bytes > 0

    def holds(self, ask: Ask, load: SliceLoad, weight_bytes: int) -> bool:
        if not load.slice.hbm_bytes:
            return True
        free = load.slice.hbm_bytes - load.kv_bytes - ask.kv_bytes
        if not load.keeps:
            return load.weight_bytes + weight_bytes <= free
        sizes = _kept_bytes(load)
        if sum(sizes) + weight_bytes <= free:
            return True
        if not weight_bytes:  # one request more for models that are swapped already
            return sum(nlargest(2, sizes)) <= free
        return _swappable(ask, load, [*sizes, weight_bytes], free)

    def resumes(self, ask: Ask, load: SliceLoad, instance: Instance) -> bool:
        """If its weights stream and others have taken the link since, it must be made anew, with
        its weights kept."""
        tpot_s = ask.request.slo.tpot_s
        return not instance.streams or _carries(load, instance.spec, tpot_s)

    def resumed_bytes(self, load: SliceLoad, instance: Instance) -> int:
        back = load.keeps and not instance.jobs and not instance.streams
        return instance.spec.weight_bytes if back else 0

    def freed_bytes(self, load: SliceLoad, instance: Instance) -> int:
        return 0 if load.keeps else instance.spec.weight_bytes

    def activation(self, ask: Ask, load: SliceLoad) -> tuple[bool, int] | None:
        """Its weights are kept if they fit, or if the link would not carry them as a stream. Those
        of a model larger than the memory stream as well as they can, with no other stream."""
        spec = ask.spec
        free = load.slice.hbm_bytes - load.kv_bytes - ask.kv_bytes
        keep = load.keeps and (
            sum(_kept_bytes(load)) + spec.weight_bytes <= free
            or not _carries(load, spec, ask.request.slo.tpot_s)
        )
        if keep and spec.weight_bytes + ask.kv_bytes > load.slice.hbm_bytes:
            if self.link_bytes_per_s(load):
                return None
            keep = False
        return keep, 0 if load.keeps and not keep else spec.weight_bytes

    def link_bytes_per_s(self, load: SliceLoad) -> int:
        return sum(
            link_demand(ceil(one.spec.step_bytes(len(one.jobs))), one.tpot_s)
            for one in load.active.values()
            if one.streams and one.jobs
        )


LINK_AND_MEMORY = LinkAndMemory()


def stream_step_s(load: SliceLoad, spec: ModelSpec) -> float:
    """Return the least time of a decode step whose weights come over the slice's link."""
    return spec.step_bytes(1) / load.slice.link_bytes_per_s


def _carries(load: SliceLoad, spec: ModelSpec, tpot_s: float) -> bool:
    """Whether the slice's share of the link brings one more stream at the pace of all, and leaves
    the slice time for others (C2CServe 6.2). A new model has nothing resident yet."""
    demand = link_demand(ceil(spec.step_bytes(1)), tpot_s)
    if demand > load.slice.link_bytes_per_s:
        return False
    return (
        LINK_AND_MEMORY.link_bytes_per_s(load) + demand <= load.slice.link_bytes_per_s
        and load.work().round_s + stream_step_s(load, spec) <= ROOMY * tpot_s
    )


def _kept_bytes(load: SliceLoad) -> list[int]:
    """Return the weight bytes of each model with requests that does not stream. Where weights are
    swapped, models without requests are not in the way."""
    return [one.spec.weight_bytes for one in load.busy() if not one.streams]


def _swappable(ask: Ask, load: SliceLoad, sizes: list[int], free: float) -> bool:
    """Whether models with weights of these sizes, the new one's last, can share so much memory by
    `policy.weights.weight_swapping`. Loads under way must leave time for the new model's. (If it
    alone takes longer than there is time, no other may be waiting for its first load.)"""
    link_bytes_per_s = load.slice.link_bytes_per_s
    period_s = SWAP_TOKENS * min(ask.request.slo.tpot_s, load.work().tpot_s)
    if sum(nlargest(2, sizes)) > free or sum(sizes) > period_s * link_bytes_per_s:
        return False
    loading = sum(one.spec.weight_bytes for one in load.busy() if not one.ready)
    left_s = ask.request.first_token_due_s - ask.now
    return loading <= max(0.0, left_s * link_bytes_per_s - sizes[-1])
