"""The dashboard's state: one JSON document of a server, a simulation or a replay.

docs/dashboard.md describes it for other readers. Times are seconds on the source's own clock, sizes
are bytes. None (`null`) means that the source does not tell; it never means zero.
"""

from dataclasses import dataclass
from typing import Literal

VERSION = 1
"""Rises when a field changes its meaning or goes. New fields do not raise it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceView:
    """What a slice computes, keeps, loads and streams. Rates are over the last seconds."""

    id: str
    kind: str
    state: str
    """`starting`, `up` or `lost`."""
    trouble: str
    """Why its requests make no progress; empty while they do."""
    model: str
    """The model of its last step; empty before the first one."""
    active_models: tuple[str, ...]
    loading_models: tuple[str, ...]
    """Active models whose weights are on their way into the slice's memory."""
    resident_models: tuple[str, ...] | None
    """Models whose weights are in the slice's memory as a whole."""
    running: int
    waiting: int
    busy_share: float
    """0..1"""
    kv_used_bytes: int
    kv_total_bytes: int
    kv_host_bytes: int | None
    weights_kept_bytes: int | None
    weights_lent_bytes: int | None
    """Weights in memory that neighbouring GPUs lend."""
    output_tokens_per_s: float
    streamed_bytes_per_s: float
    """Weights that steps read over the slice's link."""
    loaded_bytes_per_s: float
    """Weights that loads of whole models copied over it."""
    peer_bytes_per_s: float | None
    """Weights that steps read from neighbouring GPUs."""
    switches: int
    restarts: int | None
    link: str
    """The id of the link that its weights come over; empty: they are read in place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelView:
    """A model's state, where its bytes are, and how it meets its targets."""

    id: str
    state: str
    """`core.model.ModelState`."""
    error: str
    pinned: bool
    weight_bytes: int
    pool_bytes: int
    """Bytes of its weights that are in the pool of host memory."""
    active_slices: tuple[str, ...]
    resident_slices: tuple[str, ...] | None
    """Slices whose memory holds all of its weights."""
    running: int
    waiting: int
    ttft_target_s: float | None
    tpot_target_s: float | None
    judged: int
    """Requests of the last minute that ended with a first token and were not cancelled."""
    met: int
    """Requests among those that met both targets."""
    ttft_p50_s: float | None
    ttft_p95_s: float | None
    tpot_p50_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkView:
    """A link that weights come over: what is used of what was measured."""

    id: str
    slices: tuple[str, ...]
    bytes_per_s: float
    """The shares of its slices together."""
    origin: Literal["measured", "assumed", "simulated"]
    """Where `bytes_per_s` is from: this machine's profile, the nearest known GPU, a simulation."""
    used_bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusalView:
    """One refused request that had reached the controller."""

    at_s: float
    model: str
    status: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueView:
    running: int
    waiting: int
    oldest_waiting_s: float
    """How long the request that came first among those waiting has waited; 0: none waits."""
    tenants: tuple[int, ...]
    """Requests in flight of each tenant that has some, fewest first."""
    refused: dict[str, int]
    """Refused requests since the start, by why."""
    recent: tuple[RefusalView, ...]
    """The newest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestView:
    """A request's timeline. Its phases follow one another; None: not begun, or not told."""

    id: str
    model: str
    slice: str
    state: str
    """`waiting`, `running`, `done`, `failed`, `cancelled` or `refused`."""
    arrived_s: float
    ended_s: float | None
    prompt_tokens: int
    output_tokens: int | None
    queue_s: float | None
    """The time from its arrival until the controller sent it to a slice."""
    slice_queue_s: float | None
    """The time from there to its first step."""
    switch_s: float | None
    """The time from the choice of its model to the first kernel; 0 without a switch."""
    weights_s: float | None
    """Its first step waited so long for weights that were still loading."""
    prefill_s: float | None
    decode_s: float | None
    """The time from its first token to its end."""
    ttft_s: float | None
    switched: bool | None
    met: bool | None
    """Whether it met its targets; None: not judged."""
    placed: int
    """How often it was sent to a slice; more than 1 after a fault or a preemption."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Playback:
    """Where a replay stands in its record."""

    begin_s: float
    end_s: float
    speed: float
    """Seconds of the record per second; 0: paused."""
    over: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DashboardState:
    v: int = VERSION
    source: Literal["server", "record"]
    name: str
    """The server's instance, or the record's file name."""
    now_s: float
    """The time of the state, on the clock of all its times."""
    draining: bool
    pool_used_bytes: int
    pool_budget_bytes: int
    slices: tuple[SliceView, ...]
    models: tuple[ModelView, ...]
    links: tuple[LinkView, ...]
    queue: QueueView
    requests: tuple[RequestView, ...]
    """Those in flight, newest first, then those that ended last."""
    trouble: str = ""
    """Why a part of the document stands still; empty while none does."""
    playback: Playback | None = None
