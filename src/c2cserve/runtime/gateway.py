"""What the HTTP server needs of everything behind it. Implemented by `serving`, and by small
fakes in the server's tests."""

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from c2cserve.core.model import ModelStatus
from c2cserve.core.request import Delta, Job
from c2cserve.runtime.slice_stats import SliceStats


class Refused(Exception):
    """The request was not taken, or its model can not be served. `status` is HTTP's."""

    def __init__(self, status: int, reason: str, retry_after_s: float | None = None) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason
        self.retry_after_s = retry_after_s


class Superseded(Refused):
    """The model was reloaded while the request was on its way: prepare it again, for the version
    that its name leads to now. Raised before a token was sent."""

    def __init__(self) -> None:
        super().__init__(503, "the model was reloaded again and again meanwhile", 1.0)


def _unchanged() -> None:
    """Files that nothing is known of are taken as they are."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """What the server needs to talk for a model: where its tokenizer and templates are."""

    id: str
    path: str
    max_context: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    ttft_s: float
    tpot_s: float
    priority: int
    version: str = ""
    """What requests say as their model; empty: the id."""
    check_tokenizer: Callable[[], None] = _unchanged
    """Raises `Refused` (503) when the tokenizer's files are not those that were checked."""

    @property
    def key(self) -> str:
        return self.version or self.id


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceStatus(SliceStats):
    """One slice as an operator sees it: what its worker counts, and what the controller knows."""

    id: str
    kind: str
    state: str
    """`starting`, `up`, `lost`."""
    pid: int
    cpus: tuple[int, ...]
    restarts: int
    active_models: tuple[str, ...]
    last_model: str
    kv_total_bytes: int
    busy_share: float
    """Share of the last few seconds that the slice spent in steps."""
    heartbeat_age_s: float
    failed_models: tuple[str, ...] = ()
    """Models that the slice gave up, because each of their requests failed."""
    stalled_s: float = 0.0
    """How long it has had requests without a step being done; 0 while it waits for weights."""
    trouble: str = ""
    """Why requests make no progress there; empty while they do."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """State of the whole server for `/metrics`, `/ready`, the admin API and `c2cserve top`."""

    instance: str
    started_s: float
    draining: bool
    slices: tuple[SliceStatus, ...]
    models: tuple[ModelStatus, ...]
    pool_used_bytes: int
    pool_budget_bytes: int
    running: int
    waiting: int
    tenants: tuple[int, ...] = ()
    """Requests in flight of each tenant that has some, fewest first."""
    counters: dict[str, float] = field(default_factory=dict[str, float])
    """Monotonic: `rejected_429`, `rejected_503`, `refused_early`, `refused_overload`, `slice_lost`,
    `resumed_requests`, `model_loads`, `model_evictions`, `controller_restarts`,
    `controller_request_failures` ..."""


class Gateway(Protocol):
    """All methods are called on the server's event loop."""

    def resolve(self, name: str) -> ModelFiles | None:
        """The model an id or alias names, if the catalogue has it. Raises `Refused` (503) when
        its checkpoint is broken."""
        ...

    def overload(self, tenant: str, ttft_s: float, preparing: Mapping[str, int]) -> Refused | None:
        """Why a request that has not been looked into yet would be refused: in an overload, for
        coming too late. None if it may be taken. `preparing`: each tenant's requests that are on
        their way to `submit`."""
        ...

    def submit(self, job: Job) -> AsyncGenerator[Delta, None]:
        """Run a job. The iterator ends after the delta that has `finish`; closing it early (or
        `cancel`) frees the request's memory. Raises `Refused` from the first `__anext__`, which
        is `Superseded` if the job was prepared for a version that was replaced meanwhile."""
        ...

    def cancel(self, request_id: str) -> None: ...

    def snapshot(self) -> Snapshot: ...

    @property
    def ready(self) -> bool:
        """At least one slice is up and in no trouble, and the server is not draining."""
        ...

    @property
    def healthy(self) -> bool:
        """The controller's loop makes progress (not merely: the process exists), of the slices that
        are up not all are in trouble, and if none is up, it is not for failing again and again."""
        ...

    async def add_model(self, entry: dict[str, object]) -> ModelStatus:
        """Add a catalogue entry (same keys as in the TOML file). Raises `Refused` (400, 409)."""
        ...

    async def remove_model(self, name: str) -> None:
        """Drain a model, unload it everywhere, take it out. Returns when that is done."""
        ...

    async def reload_model(self, name: str) -> ModelStatus:
        """Read its files again, load them beside the old ones, and switch. Raises `Refused`; the
        old ones then go on serving."""
        ...

    def models(self) -> Sequence[ModelStatus]: ...
