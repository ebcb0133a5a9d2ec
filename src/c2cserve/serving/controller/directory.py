"""The catalogue in the live server: every model, by id and alias, with its state.

The names of a model lead to one of its versions. While the model is reloaded there is a second
version without names. That is the new version until it can answer, then the old version until it
has drained.

    reload   names ─▶ phi     phi#2 is loading
    switch   names ─▶ phi#2   phi finishes what it has
    end      names ─▶ phi#2
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from c2cserve.core.model import ModelState
from c2cserve.runtime.gateway import Refused
from c2cserve.serving.controller.host import HostedModel


@dataclass(slots=True)
class ModelRecord:
    """One version of a model."""

    hosted: HostedModel
    state: ModelState = ModelState.COLD
    error: str = ""
    created_s: int = field(default_factory=lambda: int(time.time()))
    slices: set[str] = field(default_factory=set[str])
    """Slices on which it is active."""
    failing: dict[str, str] = field(default_factory=dict[str, str])
    """Slices that gave it up -> why."""
    attached: set[str] = field(default_factory=set[str])
    """Slices whose workers have mapped it."""
    draining: bool = False
    """It finishes its requests and takes no new ones, wherever its weights are."""
    prompt_token_s: float = 0.0
    token_s: float = 0.0
    """A prompt's token and a decode step, as a slice measured them last."""
    superseded: bool = False
    """Another version has its names."""

    @property
    def id(self) -> str:
        """The id of the version."""
        return self.hosted.spec.id

    @property
    def name(self) -> str:
        """The id in the catalogue, the same for all versions."""
        return self.hosted.spec.name

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.hosted.aliases)

    @property
    def entry(self) -> dict[str, object]:
        return self.hosted.entry

    segment: str = ""
    """Path of its segment, while workers can map it."""

    @property
    def in_pool(self) -> bool:
        """Whether its segment exists, so that workers can map it."""
        return bool(self.segment)

    def out_of_pool(self, state: ModelState = ModelState.COLD, error: str = "") -> None:
        self.segment = ""
        self.slices.clear()
        self.attached.clear()
        self.error = error
        self.state = state


@dataclass(frozen=True, slots=True)
class BrokenModel:
    """A model of the catalogue whose checkpoint could not be read: it has no version yet."""

    name: str
    aliases: tuple[str, ...]
    entry: dict[str, object]
    error: str
    created_s: int = field(default_factory=lambda: int(time.time()))

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)


class Directory:
    """Names are claimed when a model is added and freed when it is forgotten. Single operations
    are atomic under the interpreter lock: the server's event loop reads, adds and switches, the
    controller removes."""

    def __init__(self) -> None:
        self._versions: dict[str, ModelRecord] = {}
        self._current: dict[str, ModelRecord | BrokenModel] = {}
        """Catalogue id -> the version that its names lead to."""
        self._names: dict[str, str] = {}
        """Ids and aliases -> catalogue id."""

    def __iter__(self) -> Iterator[ModelRecord]:
        """Iterate over all versions."""
        return iter(list(self._versions.values()))

    def models(self) -> list[ModelRecord | BrokenModel]:
        """Return the versions that names lead to."""
        return list(self._current.values())

    def check_free(self, names: tuple[str, ...]) -> None:
        """Check that names are free. Raises `Refused` (409) when a name is taken."""
        for name in names:
            if (owner := self._names.get(name)) is not None:
                raise Refused(409, f"the name {name!r} is already used by model {owner!r}")

    def add(self, model: ModelRecord | BrokenModel) -> None:
        """Add a model with its names. Raises `Refused` (409) when a name is taken."""
        self.check_free(model.names)
        self.switch(model)

    def add_beside(self, record: ModelRecord) -> None:
        """Add a version that has no names until `switch`."""
        self._versions[record.id] = record

    def switch(self, model: ModelRecord | BrokenModel) -> None:
        """Make the model's names lead to this version, from now on and at once."""
        if isinstance(model, ModelRecord):
            self._versions[model.id] = model
        before = self._current.get(model.name)
        self._current[model.name] = model
        self._names.update(dict.fromkeys(model.names, model.name))
        if isinstance(before, ModelRecord):
            before.superseded = True

    def __contains__(self, version: str) -> bool:
        return version in self._versions

    def find(self, name: str) -> ModelRecord | BrokenModel | None:
        """Return the model that has this id or alias."""
        model = self._names.get(name)
        return None if model is None else self._current.get(model)

    def get(self, version: str) -> ModelRecord:
        return self._versions[version]

    def version(self, version: str) -> ModelRecord | None:
        return self._versions.get(version)

    def remove(self, version: str) -> None:
        """Forget the version, and free its names if they lead to it."""
        record = self._versions.pop(version)
        if self._current.get(record.name) is record:
            self.forget(record)

    def forget(self, model: ModelRecord | BrokenModel) -> None:
        """Free the model's names."""
        del self._current[model.name]
        for name in model.names:
            self._names.pop(name, None)
