"""What a fresh policy is told when the controller's loop starts anew while workers live on.

Everything that the one before knew and that matters is kept outside of it: models and their
weights in the directory and the pool, requests and what their clients have in the table of jobs.
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from c2cserve.core.events import (
    Arrived,
    ClusterEvent,
    Draining,
    ModelAdded,
    ModelLoaded,
    ModelRemoving,
    ModelUsable,
    PoolState,
    SliceLost,
)
from c2cserve.core.model import ModelState
from c2cserve.serving.controller.directory import Directory, ModelRecord
from c2cserve.serving.controller.jobs import JobTable, LiveJob


@dataclass(frozen=True, slots=True)
class Entry:
    """Events of one tick. `job`: the request that they are about, if it is one."""

    events: tuple[ClusterEvent, ...]
    job: str | None = None


def retell(
    budget_bytes: int,
    directory: Directory,
    known: Mapping[str, str],
    jobs: JobTable,
    *,
    draining: bool,
) -> Iterator[Entry]:
    """Yield the ticks of a fresh policy, of which no slice is known yet.

    `known`: versions that the one before was told of, and what they replace. Each request has a
    tick of its own: if the loop breaks in it, that request is at fault. What refuses newcomers
    comes last.
    """
    records = [(directory.get(one), known[one]) for one in known if one in directory]
    states = (_state(record, replaces) for record, replaces in records)
    yield Entry((PoolState(budget_bytes), *itertools.chain.from_iterable(states)))
    for live in jobs.live():
        yield Entry((_resumed(live),), live.request.id)
    for record, _ in records:
        if record.draining:
            yield Entry((ModelRemoving(record.id),))
    if draining:
        yield Entry((Draining(),))


def _state(record: ModelRecord, replaces: str) -> Iterator[ClusterEvent]:
    spec = record.hosted.spec
    loading = record.state is ModelState.LOADING
    yield ModelAdded(spec, replaces, in_pool=record.in_pool or loading)
    if record.in_pool:
        yield ModelUsable(spec.id)
        if not loading:
            yield ModelLoaded(spec.id, spec.weight_bytes, 0.0)


def _resumed(live: LiveJob) -> ClusterEvent:
    """A request that was placed before is never refused for being late."""
    if live.moved:
        return SliceLost(live.lost_slice, (live.request,))
    return Arrived(live.request)
