"""The ticks that bring a fresh policy up to date when the controller's loop starts anew.

Workers live on meanwhile. Everything that mattered to the policy before is kept outside of it.
Models and their weights are in the directory and the pool; requests, and the tokens that their
clients have, are in the table of jobs.
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
class RestartTick:
    """The events of one tick. `job`: the request that they are about, if there is one."""

    events: tuple[ClusterEvent, ...]
    job: str | None = None


def restart_ticks(
    budget_bytes: int,
    directory: Directory,
    announced: Mapping[str, str],
    jobs: JobTable,
    *,
    draining: bool,
) -> Iterator[RestartTick]:
    """Yield the first ticks of a fresh policy, before any slice is up for it.

    `announced`: versions that the policy before was notified of, and the versions that they
    replace. Each request has a tick of its own: if the loop breaks in it, that request is at fault.
    Events that make the policy refuse newcomers come last.
    """
    records = [(directory.get(one), announced[one]) for one in announced if one in directory]
    states = (_state(record, replaces) for record, replaces in records)
    yield RestartTick((PoolState(budget_bytes), *itertools.chain.from_iterable(states)))
    for live in jobs.live():
        yield RestartTick((_resumed(live),), live.request.id)
    for record, _ in records:
        if record.draining:
            yield RestartTick((ModelRemoving(record.id),))
    if draining:
        yield RestartTick((Draining(),))


def _state(record: ModelRecord, replaces: str) -> Iterator[ClusterEvent]:
    spec = record.hosted.spec
    loading = record.state is ModelState.LOADING
    yield ModelAdded(spec, replaces, in_pool=record.in_pool or loading)
    if record.in_pool:
        yield ModelUsable(spec.id)
        if not loading:
            yield ModelLoaded(spec.id, spec.weight_bytes, 0.0)


def _resumed(live: LiveJob) -> ClusterEvent:
    """Return the event for one request. A request that was placed before is never refused as
    late."""
    if live.moved:
        return SliceLost(live.lost_slice, (live.request,))
    return Arrived(live.request)
