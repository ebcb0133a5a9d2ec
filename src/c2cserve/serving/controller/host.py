"""The port between the live controller and the models: the catalogue, their files, the pool.

`serving.controller.catalog_host` implements it.
"""

from dataclasses import dataclass
from typing import Protocol

from c2cserve.core.model import ModelSpec
from c2cserve.runtime.gateway import ModelFiles


@dataclass(frozen=True, slots=True)
class HostedModel:
    """A checked catalogue entry, ready to load: one version of a model (`core.model.version_id`).
    It holds all that was read of its files, so versions do not affect each other."""

    spec: ModelSpec
    files: ModelFiles
    aliases: tuple[str, ...]
    config: dict[str, object]
    dtype: str
    entry: dict[str, object]


class ModelHost(Protocol):
    """Thread-safe; models are named by their versions. Loading reports `ModelUsable`,
    `ModelLoaded` and `ModelFailed` to the host's listener, from the host's own threads."""

    def prepare(self, entry: dict[str, object]) -> HostedModel:
        """Resolve, download if need be, and check everything that can be checked before weights
        move. Every call makes another version. Blocking. Raises `Refused` (400) with what to
        do."""
        ...

    def load(self, model: HostedModel) -> None:
        """Start loading, and return at once. Failures are reported as `ModelFailed`; a file that
        differs from the checked one is a failure too."""
        ...

    def segment(self, model: str) -> str | None:
        """Return the path of the model's segment, from `ModelUsable` until `evict`. Return None if
        the load has failed since; `ModelFailed` is then reported next."""
        ...

    def evict(self, model: str) -> None:
        """Drop the weights; mappings that workers still have stay valid until they unmap."""
        ...

    def loaded_bytes(self, model: str) -> int: ...

    @property
    def files_changed(self) -> int:
        """How often a file was found to differ from the one that was checked."""
        ...

    @property
    def used_bytes(self) -> int: ...

    @property
    def budget_bytes(self) -> int: ...

    def close(self) -> None:
        """Cancel loads and remove everything this instance put into shared memory."""
        ...
