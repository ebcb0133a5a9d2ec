"""A model as policies see it, and the states it goes through."""

from dataclasses import dataclass
from enum import StrEnum

from c2cserve.core.request import Slo


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Sizes and targets of one catalogue model.

    `kv_block_bytes` is one block-first KV block: all layers, K and V, of `BLOCK_TOKENS` tokens.
    """

    id: str
    weight_bytes: int
    layers: int
    kv_block_bytes: int
    max_context: int
    slo: Slo = Slo()
    priority: int = 0
    pinned: bool = False
    keep_warm_s: float = 0.0


class ModelState(StrEnum):
    """Where a catalogue model's weights are. Any of them can be asked for at any time."""

    COLD = "cold"
    """On disk only; the first request loads it."""
    LOADING = "loading"
    """Coming into the pool; usable from its first layers on."""
    READY = "ready"
    DRAINING = "draining"
    """Being removed: finishes what it has, takes nothing new."""
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """What the outside may know about a catalogue model."""

    id: str
    aliases: tuple[str, ...]
    state: ModelState
    max_context: int
    weight_bytes: int
    loaded_bytes: int
    pinned: bool
    priority: int
    active_slices: tuple[str, ...] = ()
    running: int = 0
    waiting: int = 0
    created_s: int = 0
    error: str = ""
