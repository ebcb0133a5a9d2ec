"""What a worker's loop needs of its engine, and what it shows of it on the status page."""

from dataclasses import dataclass
from typing import Protocol

from c2cserve.core.actions import ExecutorAction
from c2cserve.core.model import ModelSpec
from c2cserve.core.request import Job


class SliceEngine(Protocol):
    """What the slice's loop needs of the engine; `serving.worker.engine_host` implements it.
    Outcomes of steps come through the `emit` and `deliver` callbacks it was made with, out of
    `submit` or `poll`; who computes elsewhere calls `ring` when there is something to be polled."""

    def attach(
        self, spec: ModelSpec, segment: str, config: dict[str, object], dtype: str
    ) -> None: ...

    def detach(self, model: str) -> None: ...

    def add(self, job: Job) -> bool:
        """Take a request; whether it is `events.Submitted.chained`. What it raises is the fault of
        this request."""
        ...

    def submit(self, action: ExecutorAction) -> None: ...

    def poll(self) -> None: ...

    @property
    def parked(self) -> bool: ...

    @property
    def weights(self) -> "WeightUse": ...

    @property
    def renewals(self) -> int:
        """How often parts were built anew after a failed step."""
        ...

    @property
    def paused_kv(self) -> "PausedKv": ...


@dataclass(frozen=True, slots=True)
class WeightUse:
    """Where steps found their weights, bytes since the start. All 0 where they are near anyway."""

    kept_bytes: int = 0
    """In HBM now, because they were used."""
    hit_bytes: int = 0
    """Read there."""
    streamed_bytes: int = 0
    """Read from their home, over the link."""
    graph_steps: int = 0
    """Steps that were one launch."""
    graph_captures: int = 0
    graph_capture_failures: int = 0
    graphs_dropped: int = 0
    flash_steps: int = 0
    """Steps whose prompts went through FlashInfer's attention,"""
    flash_missed_steps: int = 0
    """and those too long for small steps' kernels whose prompts did not: it has no module."""
    lent_bytes: int = 0
    """Copied now into neighbours' memory, for all slices of the GPU."""
    peer_bytes: int = 0
    """Of those streamed, read there."""


@dataclass(frozen=True, slots=True)
class PausedKv:
    """KV of requests that rotate through host memory."""

    host_bytes: int = 0
    """There now, copies made ahead of time too."""
    out_bytes: int = 0
    """Copied there since the start,"""
    in_bytes: int = 0
    """and back."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What the slice's policy counts, for the status page."""

    running: int
    waiting: int
    kv_used_bytes: int
    cached_tokens: int
    preemptions: int
    retries: int = 0
    """Requests whose step failed and that ran again,"""
    retries_failed: int = 0
    """and those that failed again, alone."""
