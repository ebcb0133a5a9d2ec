"""The port between the HTTP server and everything behind it. `serving` implements it, and so do
small fakes in the server's tests."""

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from c2cserve.core.model import ModelStatus
from c2cserve.core.policy_names import OWN, PolicyName
from c2cserve.core.request import Delta, Job, SamplingDefaults
from c2cserve.runtime.slice_stats import SliceStats


class Refused(Exception):
    """The request was not accepted, or its model cannot be served. `status` is HTTP's."""

    def __init__(self, status: int, reason: str, retry_after_s: float | None = None) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason
        self.retry_after_s = retry_after_s


class Superseded(Refused):
    """The model was reloaded before the request reached it: prepare the request again, for the
    version that the model's name leads to now. Raised before a token was sent."""

    def __init__(self) -> None:
        super().__init__(503, "the model was reloaded again and again meanwhile", 1.0)


def _unchanged() -> None:
    """Accept the files as they are, because none were checked before."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """What the server needs to read and write text for a model: above all its tokenizer's place."""

    id: str
    path: str
    max_context: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    ttft_s: float
    tpot_s: float
    priority: int
    version: str = ""
    """The model's name in requests to the controller; empty: the id."""
    check_tokenizer: Callable[[], None] = _unchanged
    """Raises `Refused` (503) when the tokenizer's files are not those that were checked."""
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    tables: str = "c2cserve"
    """The beginning of the paths of files that hold vocabularies for workers. They go with the
    run."""

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
class NodeUse:
    """What a node of a cluster has to do, and what its pool holds."""

    running: int
    waiting: int
    models: int
    pool_used_bytes: int
    pool_budget_bytes: int


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
    policy: PolicyName = OWN
    tenants: tuple[int, ...] = ()
    """The number of requests in flight of each tenant that has some, fewest first."""
    nodes: dict[str, str] = field(default_factory=dict[str, str])
    """A front's nodes: name -> `up`, `draining`, or why there is no connection."""
    node_use: dict[str, NodeUse] = field(default_factory=dict[str, NodeUse])
    """Nodes that are connected, by name."""
    members_age_s: float | None = None
    """A front's: how long ago Ray said who is a member. Serving goes on without that."""
    counters: dict[str, float] = field(default_factory=dict[str, float])
    """Monotonic: `rejected_429`, `rejected_503`, `refused_early`, `refused_overload`, `slice_lost`,
    `resumed_requests`, `model_loads`, `model_evictions`, `controller_restarts`,
    `controller_request_failures` ..."""


class Gateway(Protocol):
    """All methods are called on the server's event loop."""

    def resolve(self, name: str) -> ModelFiles | None:
        """Return the model that has this id or alias, None if there is none. Raises `Refused` (503)
        when its checkpoint is broken."""
        ...

    def overload(
        self, model: str, tenant: str, ttft_s: float, arrived_s: float,
        preparing: Mapping[str, int],
    ) -> Refused | None:  # fmt: skip
        """Return why a request is refused before its body is read: in an overload, it would be
        late. None if it may be accepted. `model`: its version. `arrived_s`: when it came, by
        `time.monotonic`. `preparing`: tenant -> its requests that are being prepared for
        `submit`."""
        ...

    @property
    def may_refuse(self) -> bool:
        """Whether `overload` may refuse any request now."""
        ...

    def submit(self, jobs: Sequence[Job]) -> AsyncGenerator[Delta, None]:
        """Run the choices of a request: they are let in or refused together. The iterator has the
        deltas of all, each choice's in order. Closing it cancels those that have not finished; it
        need not end by itself. Raises `Refused` from the first `__anext__`, which is `Superseded`
        if the jobs were prepared for a version that was replaced meanwhile."""
        ...

    def cancel(self, request_id: str) -> None:
        """End one choice, and free its memory. The others go on."""
        ...

    def snapshot(self) -> Snapshot: ...

    @property
    def ready(self) -> bool:
        """Whether at least one slice is up and in no trouble, and the server is not draining."""
        ...

    @property
    def healthy(self) -> bool:
        """Whether the server makes progress, which is more than that its process exists.

        The controller's loop ticks. Not all slices that are up are in trouble. If no slice is up,
        it is not because workers fail again and again.
        """
        ...

    async def add_model(self, entry: dict[str, object]) -> ModelStatus:
        """Add a catalogue entry (same keys as in the TOML file). Raises `Refused` (400, 409)."""
        ...

    async def remove_model(self, name: str) -> None:
        """Drain a model, unload it everywhere and take it out. Return when that is done."""
        ...

    async def reload_model(self, name: str) -> ModelStatus:
        """Read the model's files again, load them beside the old ones, and switch. Raises
        `Refused`; the old files then go on serving."""
        ...

    def models(self) -> Sequence[ModelStatus]: ...
