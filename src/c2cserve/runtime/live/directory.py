"""The catalogue as the live server knows it: every model, by id and alias, with its state."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from c2cserve.core.model import ModelState
from c2cserve.runtime.gateway import Refused
from c2cserve.runtime.live.host import HostedModel


@dataclass(slots=True)
class ModelRecord:
    hosted: HostedModel
    state: ModelState = ModelState.COLD
    error: str = ""
    created_s: int = field(default_factory=lambda: int(time.time()))
    slices: set[str] = field(default_factory=set[str])
    """Where it is active."""
    failing: dict[str, str] = field(default_factory=dict[str, str])
    """Slices that gave it up, and why."""

    @property
    def id(self) -> str:
        return self.hosted.spec.id

    @property
    def in_pool(self) -> bool:
        """Usable: its segment exists and workers can map it."""
        return self._in_pool

    _in_pool: bool = False

    def usable(self) -> None:
        self._in_pool = True

    def out_of_pool(self, state: ModelState = ModelState.COLD, error: str = "") -> None:
        self._in_pool = False
        self.slices.clear()
        self.error = error
        if self.state is not ModelState.DRAINING:
            self.state = state


class Directory:
    """Names are claimed when a model is added and freed when it is forgotten. Single operations
    are atomic under the interpreter lock: the server's event loop reads, the controller writes."""

    def __init__(self) -> None:
        self._records: dict[str, ModelRecord] = {}
        self._names: dict[str, str] = {}

    def __iter__(self) -> Iterator[ModelRecord]:
        return iter(list(self._records.values()))

    def add(self, hosted: HostedModel) -> ModelRecord:
        """Raises `Refused` (409) when a name is taken."""
        names = (hosted.spec.id, *hosted.aliases)
        for name in names:
            if (owner := self._names.get(name)) is not None:
                raise Refused(409, f"the name {name!r} is already used by model {owner!r}")
        record = ModelRecord(hosted)
        self._records[record.id] = record
        self._names.update(dict.fromkeys(names, record.id))
        return record

    def __contains__(self, model: str) -> bool:
        return model in self._records

    def find(self, name: str) -> ModelRecord | None:
        """By id or alias."""
        model = self._names.get(name)
        return None if model is None else self._records.get(model)

    def get(self, model: str) -> ModelRecord:
        return self._records[model]

    def remove(self, model: str) -> None:
        record = self._records.pop(model)
        for name in (record.id, *record.hosted.aliases):
            self._names.pop(name, None)
