"""A model as policies see it, and the states it goes through."""

from dataclasses import dataclass
from enum import StrEnum

from c2cserve.core.request import Slo

_VERSION_MARK = "#"
"""No catalogue id has one."""


def version_id(name: str, number: int) -> str:
    """What a version of a catalogue model is called: its id for the first one, then `id#2` ...

    A version is one reading of a checkpoint's files. Reloading a model makes another version, and
    everything that belongs to one (weights, KV, tokenizer) goes by the version's id.
    """
    return name if number == 1 else f"{name}{_VERSION_MARK}{number}"


def name_of(version: str) -> str:
    """The catalogue's id of the model that this is a version of."""
    return version.partition(_VERSION_MARK)[0]


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Sizes and targets of one version of a catalogue model. `id` names the version.

    `kv_block_bytes` is one block-first KV block: all layers, K and V, of `BLOCK_TOKENS` tokens.
    `parameters` counts weights, 0 where they were not counted. A mixture of experts has `experts`
    in each layer, of which a token uses `experts_per_token`; `expert_bytes` is one expert of all
    layers."""

    id: str
    weight_bytes: int
    layers: int
    kv_block_bytes: int
    max_context: int
    slo: Slo = Slo()
    priority: int = 0
    pinned: bool = False
    keep_warm_s: float = 0.0
    parameters: int = 0
    experts: int = 0
    experts_per_token: int = 0
    expert_bytes: int = 0

    @property
    def name(self) -> str:
        """The catalogue's id of the model."""
        return name_of(self.id)

    def step_bytes(self, tokens: int) -> float:
        """Return the weight bytes that a step over so many tokens is expected to read. A dense
        model reads all. A mixture reads what is not experts, and the experts that some token chose
        (evenly)."""
        if not self.experts:
            return float(self.weight_bytes)
        missed = (1.0 - self.experts_per_token / self.experts) ** tokens
        return self.weight_bytes - self.experts * self.expert_bytes * missed


class ModelState(StrEnum):
    """Where a catalogue model's weights are. Any of them can be asked for at any time."""

    COLD = "cold"
    """Weights are on disk only; the first request loads them."""
    LOADING = "loading"
    """Coming into the pool; usable from its first layers on."""
    READY = "ready"
    DRAINING = "draining"
    """Being removed: finishes what it has, takes nothing new."""
    FAILED = "failed"
    """Its checkpoint is broken, its files are not those that were checked, or every slice has given
    it up. It is tried again after a while."""


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
    failed_slices: tuple[str, ...] = ()
    """Those that gave it up, because each of its requests failed there."""
    prompt_token_s: float = 0.0
    token_s: float = 0.0
    """A prompt's token and a decode step, as a slice measured them last; 0: none has yet."""
