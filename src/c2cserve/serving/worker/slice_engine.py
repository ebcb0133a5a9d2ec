"""The port between a worker's loop and its engine."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from c2cserve.core.actions import EngineAction
from c2cserve.core.model import ModelSpec
from c2cserve.core.request import Job
from c2cserve.runtime.slice_stats import SliceStats


@dataclass(frozen=True, slots=True)
class Unusable:
    """An attached model that this slice cannot read after all."""

    model: str
    segment: str
    reason: str


@dataclass(frozen=True, slots=True)
class EngineState:
    parked: bool
    """A step, or a load into the slice's memory, waits for weights that are being loaded into the
    pool, or registered with the GPU. The end of that is not notified of, so `poll` has to look."""
    prepared: Sequence[Job] = ()
    """Requests that can be added now. `prepare` was called for them, or they had to leave the
    slice's steps for a while. Of these it is the rest."""
    unusable: Sequence[Unusable] = ()
    """Models that were found to be so since the last `poll`. They stay attached."""


class SliceEngine(Protocol):
    """The port between the slice's loop and the engine; `serving.worker.engine_host` implements it.

    `submit` and `poll` report outcomes of steps through the callback `report`, which the engine got
    when it was made. An engine that computes on another thread or device calls `notify` when there
    is something to poll.
    """

    def attach(
        self, spec: ModelSpec, segment: str, config: dict[str, object], dtype: str
    ) -> None: ...

    def detach(self, model: str) -> None: ...

    def prepare(self, job: Job) -> bool:
        """Begin to prepare a request. Return whether it can be added at once. If not, `poll` has
        it later. An exception is the fault of this request alone."""
        ...

    def forget(self, request_id: str) -> bool:
        """Drop a request that is prepared, or has been, and will not be added. Return whether there
        was one: if not, it has been added, or was never known."""
        ...

    def add(self, job: Job) -> bool:
        """Take a request. Return whether it is `events.Submitted.chained`. An exception is the
        fault of this request alone."""
        ...

    def submit(self, action: EngineAction) -> None: ...

    def poll(self) -> EngineState:
        """Report what is done, and go on with what can."""
        ...

    @property
    def stats(self) -> SliceStats:
        """The rows of the table whose source is the engine, as of the last `poll`; the others are
        0. Making them takes as long as a good part of a small step's launch."""
        ...
