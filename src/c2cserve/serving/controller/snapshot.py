"""The live server's state for `/metrics`, the admin API and `c2cserve top`."""

import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

from c2cserve.core.model import ModelState, ModelStatus, name_of
from c2cserve.core.policy_names import OWN, PolicyName
from c2cserve.runtime.gateway import SliceStatus, Snapshot
from c2cserve.runtime.slice_stats import SliceStats
from c2cserve.serving.controller.directory import BrokenModel, Directory, ModelRecord
from c2cserve.serving.controller.fleet import WorkerSlot
from c2cserve.serving.controller.host import ModelHost
from c2cserve.serving.controller.jobs import JobTable
from c2cserve.serving.ipc.status_page import Field
from c2cserve.serving.log_output import lost_lines

_WINDOW_S = 5.0
"""Shares are over this time, or over the time since the worker's start if that is shorter."""

COUNTERS = (
    "rejected_429", "rejected_503", "refused_queue_full", "refused_overload", "refused_patience",
    "slice_lost", "model_loads", "model_load_failures",
    "model_evictions", "models_given_up", "controller_restarts",
)  # fmt: skip
"""Counters that are shown from the start, at 0: a rate misses a counter's first appearance."""


class BusyShares:
    """The busy shares of slices, from samples of their status pages about a second apart."""

    def __init__(self) -> None:
        self._samples: dict[str, deque[tuple[int, float, float]]] = {}
        """Slice -> samples: the worker's process id, the time, its busy time so far; seconds."""

    def sample(self, slots: Sequence[WorkerSlot], now: float) -> None:
        for slot in slots:
            worker = slot.worker
            samples = self._samples.setdefault(slot.slice.id, deque())
            if worker is None or (samples and samples[-1][0] != worker.pid):
                samples.clear()
            if worker is not None:
                samples.append((worker.pid, now, worker.page[Field.BUSY_S]))
            # The sample just outside the window stays: the share is over the time since it.
            while len(samples) > 1 and now - samples[1][1] >= _WINDOW_S:
                samples.popleft()

    def share(self, slot: WorkerSlot, now: float) -> float:
        worker = slot.worker
        if worker is None:
            return 0.0
        since_s, before_s = slot.started_s, 0.0
        samples = self._samples.get(slot.slice.id)
        if samples and samples[0][0] == worker.pid:
            _, since_s, before_s = samples[0]
        spent_s = worker.page[Field.BUSY_S] - before_s
        return max(0.0, min(1.0, spent_s / max(1e-3, now - since_s)))


def take_snapshot(
    *,
    instance: str,
    started_s: float,
    draining: bool,
    slots: Sequence[WorkerSlot],
    directory: Directory,
    jobs: JobTable,
    host: ModelHost,
    counters: Counter[str],
    busy: BusyShares,
    stall_timeout_s: float,
    refused_early: int = 0,
    policy: PolicyName = OWN,
) -> Snapshot:
    """`stall_timeout_s`: how long a slice may have requests without a step being done.
    `refused_early`: requests that were refused before they reached the controller."""
    counts = _by_name(jobs.counts())
    up = {slot.slice.id for slot in slots if slot.state == "up"}
    places = find_places(directory)
    totals = {
        **dict.fromkeys(COUNTERS, 0),
        **counters,
        "refused_early": refused_early,
        "log_lines_lost": lost_lines(),
        "resumed_requests": jobs.resumed,
        "controller_request_failures": jobs.blamed,
        "model_files_changed": host.files_changed,
    }
    return Snapshot(
        instance=instance,
        started_s=started_s,
        draining=draining,
        slices=slice_statuses(slots, places, busy, stall_timeout_s),
        models=tuple(_status(model, host, places, up, counts) for model in directory.models()),
        pool_used_bytes=host.used_bytes,
        pool_budget_bytes=host.budget_bytes,
        running=sum(running for running, _ in counts.values()),
        waiting=sum(waiting for _, waiting in counts.values()),
        tenants=tuple(sorted(jobs.of_tenants())),
        policy=policy,
        counters={name: float(count) for name, count in totals.items()},
    )


@dataclass(frozen=True, slots=True)
class Places:
    """Where models are active, and where they were given up; versions count as their model."""

    slices: Mapping[str, set[str]]
    """Catalogue id -> slices on which it is active."""
    active: Mapping[str, set[str]]
    """Slice -> catalogue ids."""
    failed: Mapping[str, set[str]]


def find_places(directory: Iterable[ModelRecord]) -> Places:
    slices, active, failed = (defaultdict[str, set[str]](set) for _ in range(3))
    for record in directory:
        # The controller's thread changes both meanwhile: a copy is one operation.
        for slice_id in record.slices.copy():
            slices[record.name].add(slice_id)
            active[slice_id].add(record.name)
        for slice_id in record.failing.copy():
            failed[slice_id].add(record.name)
    return Places(slices, active, failed)


def _by_name(counts: dict[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    """Requests running and waiting by version, summed by catalogue id."""
    summed: dict[str, tuple[int, int]] = {}
    for version, (running, waiting) in counts.items():
        before = summed.get(name_of(version), (0, 0))
        summed[name_of(version)] = (before[0] + running, before[1] + waiting)
    return summed


def _status(
    model: ModelRecord | BrokenModel,
    host: ModelHost,
    places: Places,
    up: set[str],
    counts: dict[str, tuple[int, int]],
) -> ModelStatus:
    """Return a model's status by its catalogue id. Requests and slices of a draining version count
    as the model's. `up`: slices that are up. A model that all of them gave up is `failed`."""
    if isinstance(model, BrokenModel):
        return ModelStatus(
            id=model.name, aliases=model.aliases, state=ModelState.FAILED, max_context=0,
            weight_bytes=0, loaded_bytes=0, pinned=False, priority=0, created_s=model.created_s,
            error=model.error,
        )  # fmt: skip
    record, spec = model, model.hosted.spec
    running, waiting = counts.get(spec.name, (0, 0))
    failing = record.failing.copy()
    everywhere = bool(up) and up <= failing.keys()
    state = ModelState.FAILED if everywhere else record.state
    return ModelStatus(
        id=spec.name,
        aliases=record.hosted.aliases,
        state=ModelState.DRAINING if record.draining else state,
        max_context=spec.max_context,
        weight_bytes=spec.weight_bytes,
        loaded_bytes=host.loaded_bytes(spec.id),
        pinned=spec.pinned,
        priority=spec.priority,
        active_slices=tuple(sorted(places.slices.get(spec.name, ()))),
        running=running,
        waiting=waiting,
        created_s=record.created_s,
        error=record.error or "; ".join(f"on {one}: {why}" for one, why in sorted(failing.items())),
        failed_slices=tuple(sorted(failing)),
        prompt_token_s=record.prompt_token_s,
        token_s=record.token_s,
    )


def _trouble(
    active: Sequence[str], failed: Sequence[str], stalled_s: float, stall_timeout_s: float
) -> str:
    if stalled_s > stall_timeout_s:
        return f"no step was done for {stalled_s:.0f} s, though there are requests"
    if failed and not set(active) - set(failed):
        return f"every request of {', '.join(failed)} fails"
    return ""


def _down(slot: WorkerSlot, now: float) -> str:
    """Return the trouble of a slice that is not up."""
    if not slot.backs_off:
        return ""
    delay_s = slot.restart_at_s - now
    due = "" if slot.worker is not None or delay_s <= 0.0 else f"; next start in {delay_s:.0f} s"
    return f"{slot.failures} workers in a row have failed, the last one: {slot.reason}{due}"


def slice_statuses(
    slots: Iterable[WorkerSlot], places: Places, busy: BusyShares, stall_timeout_s: float
) -> tuple[SliceStatus, ...]:
    return tuple(_slice_status(slot, places, busy, stall_timeout_s) for slot in slots)


def _slice_status(
    slot: WorkerSlot, places: Places, busy: BusyShares, stall_timeout_s: float
) -> SliceStatus:
    """Return a slice's status. A slice without a worker shows zeros."""
    worker = slot.worker
    stats, last_model, stalled_s, beat_s = SliceStats(), "", 0.0, 0.0
    now = time.monotonic()
    if worker is not None:
        stats, beat_s = worker.page.stats(), worker.page[Field.BEAT_S]
        last = int(worker.page[Field.LAST_MODEL])
        last_model = name_of(worker.attached[last]) if 0 <= last < len(worker.attached) else ""
        stalled_s = worker.stalled_s(now)
    up = worker is not None and worker.up
    active = tuple(sorted(places.active.get(slot.slice.id, ())))
    failed = tuple(sorted(places.failed.get(slot.slice.id, ())))
    return SliceStatus(
        **asdict(stats),
        id=slot.slice.id,
        kind=slot.slice.kind,
        state=slot.state,
        pid=0 if worker is None else worker.pid,
        cpus=slot.slice.cpus,
        restarts=slot.restarts,
        active_models=active,
        last_model=last_model,
        kv_total_bytes=slot.slice.kv_bytes,
        busy_share=busy.share(slot, now),
        failed_models=failed,
        stalled_s=stalled_s,
        trouble=_trouble(active, failed, stalled_s, stall_timeout_s) if up else _down(slot, now),
        heartbeat_age_s=max(0.0, now - beat_s) if up else 0.0,
    )
