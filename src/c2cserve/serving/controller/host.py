"""What the live controller needs of whoever keeps models: the catalogue, their files, the pool.

Implemented in `cli` (which alone may join the catalogue, the engine's layouts and the pool).
"""

from dataclasses import dataclass
from typing import Protocol

from c2cserve.core.model import ModelSpec
from c2cserve.runtime.gateway import ModelFiles


@dataclass(frozen=True, slots=True)
class HostedModel:
    """A checked catalogue entry, ready to load: one version of a model (`core.model.version_id`).
    All that is known of its files is in it, so versions cannot get in each other's way."""

    spec: ModelSpec
    files: ModelFiles
    aliases: tuple[str, ...]
    config: dict[str, object]
    dtype: str
    entry: dict[str, object]


class ModelHost(Protocol):
    """Models are named by their versions. Thread-safe. Loading reports `ModelUsable`,
    `ModelLoaded`, `ModelFailed` to the listener it was made with, from its own threads."""

    def prepare(self, entry: dict[str, object]) -> HostedModel:
        """Resolve, download if need be, and check everything that can be checked before weights
        move. Every call makes another version. Blocking. Raises `Refused` (400) with what to
        do."""
        ...

    def load(self, model: HostedModel) -> None:
        """Start loading; returns at once. What goes wrong is reported as `ModelFailed`, also that
        a file is not what it was when it was checked."""
        ...

    def segment(self, model: str) -> str | None:
        """Path of the model's segment, from `ModelUsable` until `evict`; None if its load has
        failed since, which is then reported next."""
        ...

    def evict(self, model: str) -> None:
        """Drop the weights; mappings that workers still have stay valid until they unmap."""
        ...

    def loaded_bytes(self, model: str) -> int: ...

    @property
    def files_changed(self) -> int:
        """How often a file was found to be another one than was checked."""
        ...

    @property
    def used_bytes(self) -> int: ...

    @property
    def budget_bytes(self) -> int: ...

    def close(self) -> None:
        """Cancel loads and remove everything this instance put into shared memory."""
        ...
