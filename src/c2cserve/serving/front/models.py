"""The catalogue as a front knows it: names, tokenizers and sizes, and no weights."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import replace

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
        spec = hosted.spec
        whole = ModelStatus(
            id=spec.name, aliases=hosted.aliases, state=ModelState.COLD,
            max_context=spec.max_context, weight_bytes=spec.weight_bytes, loaded_bytes=0,
            pinned=spec.pinned, priority=spec.priority, created_s=self._created_s,
        )  # fmt: skip
        states: list[ModelState] = []
        for node, one in said:
            states.append(one.state)
            whole = replace(
                whole,
                loaded_bytes=max(whole.loaded_bytes, one.loaded_bytes),
                active_slices=(*whole.active_slices, *(f"{node}/{s}" for s in one.active_slices)),
                running=whole.running + one.running,
                waiting=whole.waiting + one.waiting,
                error=whole.error or one.error,
                failed_slices=(*whole.failed_slices, *(f"{node}/{s}" for s in one.failed_slices)),
            )
        best = min((s for s in states if s in _ORDER), key=_ORDER.index, default=ModelState.COLD)
        return replace(whole, state=best)

    def _failed(self, broken: BrokenModel) -> ModelStatus:
        return ModelStatus(
            id=broken.name, aliases=broken.aliases, state=ModelState.FAILED, max_context=0,
            weight_bytes=0, loaded_bytes=0, pinned=False, priority=0,
            created_s=self._created_s, error=broken.error,
        )  # fmt: skip
