"""The catalogue as a front knows it: names, tokenizers and sizes, and no weights."""

import time
from collections.abc import Iterable, Mapping

from c2cserve.core.model import ModelSpec, ModelState, ModelStatus
from c2cserve.runtime.gateway import ModelFiles, Refused
from c2cserve.serving.controller.directory import BrokenModel
from c2cserve.serving.controller.host import HostedModel

_ORDER = (ModelState.READY, ModelState.LOADING, ModelState.COLD, ModelState.FAILED)
"""A model is in the best state that it has on any node."""


class FrontModels:
    def __init__(self, hosted: Iterable[HostedModel], broken: Iterable[BrokenModel]) -> None:
        self._hosted = {one.spec.name: one for one in hosted}
        self._broken = {one.name: one for one in broken}
        self._names = {
            name: one.spec.name for one in self._hosted.values()
            for name in (one.spec.name, *one.aliases)
        }  # fmt: skip
        self._broken_names = {name: one for one in self._broken.values() for name in one.names}
        self._created_s = int(time.time())

    @property
    def specs(self) -> list[ModelSpec]:
        return [one.spec for one in self._hosted.values()]

    def check_free(self, names: Iterable[str]) -> None:
        """Check that names are free. Raises `Refused` (409) when a name is taken."""
        for name in names:
            if (owner := self._names.get(name)) is not None or name in self._broken_names:
                raise Refused(409, f"the name {name!r} is already used by model {owner or name!r}")

    def id_of(self, name: str) -> str:
        """Return the model's id. Raises `Refused` (404)."""
        if (broken := self._broken_names.get(name)) is not None:
            return broken.name
        if (model := self._names.get(name)) is None:
            raise Refused(404, f"the model {name!r} does not exist")
        return model

    def entry_of(self, model: str) -> dict[str, object]:
        """Return the catalogue entry of an id that is there."""
        broken = self._broken.get(model)
        return broken.entry if broken is not None else self._hosted[model].entry

    def put(self, hosted: HostedModel) -> None:
        """Add a model, or replace the one of the same id."""
        name = hosted.spec.name
        self.drop(name)
        self._hosted[name] = hosted
        self._names |= dict.fromkeys((name, *hosted.aliases), name)

    def drop(self, model: str) -> bool:
        """Take a model out. Return whether it was there."""
        there = self._hosted.pop(model, None) is not None
        there |= self._broken.pop(model, None) is not None
        self._names = {name: one for name, one in self._names.items() if one != model}
        self._broken_names = {
            name: one for name, one in self._broken_names.items() if one.name != model
        }
        return there

    def find(self, name: str) -> ModelFiles | None:
        """Return the model that has this id or alias. Raises `Refused` (503) for a broken one."""
        if (broken := self._broken_names.get(name)) is not None:
            raise Refused(503, f"the model {broken.name!r} cannot be served: {broken.error}")
        model = self._names.get(name)
        return None if model is None else self._hosted[model].files

    def statuses(self, nodes: Mapping[str, Iterable[ModelStatus]]) -> list[ModelStatus]:
        """Return each model's status over all nodes. `nodes`: what each node says of models, by the
        node's name."""
        said: dict[str, list[tuple[str, ModelStatus]]] = {}
        for node, models in nodes.items():
            for one in models:
                said.setdefault(one.id, []).append((node, one))
        found = [self._status(one, said.get(one.spec.name, ())) for one in self._hosted.values()]
        return [*found, *(self._failed(one) for one in self._broken.values())]

    def _status(
        self, hosted: HostedModel, said: Iterable[tuple[str, ModelStatus]]
    ) -> ModelStatus:  # fmt: skip
        spec, found = hosted.spec, list(said)
        states = [one.state for _, one in found if one.state in _ORDER]
        return ModelStatus(
            id=spec.name, aliases=hosted.aliases,
            state=min(states, key=_ORDER.index, default=ModelState.COLD),
            max_context=spec.max_context, weight_bytes=spec.weight_bytes,
            loaded_bytes=max((one.loaded_bytes for _, one in found), default=0),
            pinned=spec.pinned, priority=spec.priority,
            active_slices=tuple(f"{node}/{s}" for node, one in found for s in one.active_slices),
            running=sum(one.running for _, one in found),
            waiting=sum(one.waiting for _, one in found),
            created_s=self._created_s,
            error=next((one.error for _, one in found if one.error), ""),
            failed_slices=tuple(f"{node}/{s}" for node, one in found for s in one.failed_slices),
        )  # fmt: skip

    def _failed(self, broken: BrokenModel) -> ModelStatus:
        return ModelStatus(
            id=broken.name, aliases=broken.aliases, state=ModelState.FAILED, max_context=0,
            weight_bytes=0, loaded_bytes=0, pinned=False, priority=0,
            created_s=self._created_s, error=broken.error,
        )  # fmt: skip
