"""Reloads of one model, with a host and a controller that do as told."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from c2cserve.core.events import ClusterEvent, ModelAdded, ModelRemoving
from c2cserve.core.model import ModelSpec, ModelState, version_id
from c2cserve.runtime.gateway import ModelFiles, Refused
from c2cserve.serving.controller.changes import ModelChanges
from c2cserve.serving.controller.directory import Directory, ModelRecord
from c2cserve.serving.controller.host import HostedModel

SIZE = 10


def hosted(number: int) -> HostedModel:
    version = version_id("m", number)
    spec = ModelSpec(version, SIZE, 1, 64, 128)
    files = ModelFiles("m", "/m", 128, 100, (), 1.0, 1.0, 0, version)
    return HostedModel(spec, files, ("alias",), {}, "float32", {"id": "m"})


class Host:
    """The pool's budget, and versions on demand."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = self.files_changed = 0
        self._made = 1

    def prepare(self, entry: dict[str, object]) -> HostedModel:
        self._made += 1
        return replace(hosted(self._made), entry=entry)

    def load(self, model: HostedModel) -> None: ...
    def segment(self, model: str) -> str | None: ...
    def evict(self, model: str) -> None: ...
    def loaded_bytes(self, model: str) -> int:
        return 0

    def close(self) -> None: ...


class Case:
    """A ready model, and a controller that answers each event with `reply`."""

    def __init__(self, budget_bytes: int, reply: Callable[["Case", ClusterEvent], None]) -> None:
        self.directory = Directory()
        self.events: list[ClusterEvent] = []
        self.changes = ModelChanges(
            Host(budget_bytes), self.directory, self._post, set, lambda: {"s0"}
        )
        self._reply = reply
        self.old = ModelRecord(hosted(1), ModelState.READY, segment="/segment", attached={"s0"})
        self.directory.add(self.old)

    def _post(self, event: ClusterEvent) -> None:
        self.events.append(event)
        asyncio.get_running_loop().call_soon(self._reply, self, event)

    def forget(self, version: str) -> None:
        self.directory.remove(version)
        self.changes.forgotten(version)


def current(case: Case) -> str:
    record = case.directory.find("alias")
    assert isinstance(record, ModelRecord)
    return record.id


def loads(case: Case, event: ClusterEvent) -> None:
    if isinstance(event, ModelAdded):
        record = case.directory.get(event.spec.id)
        record.state, record.segment, record.attached = ModelState.READY, "/new", {"s0"}


def test_names_are_switched_once_the_new_version_is_loaded() -> None:
    case = Case(2 * SIZE, loads)
    asyncio.run(case.changes.reload("m"))
    assert case.events == [ModelAdded(hosted(2).spec, replaces="m"), ModelRemoving("m")]
    assert current(case) == "m#2"
    assert case.old.superseded
    case.directory.remove("m")
    assert current(case) == "m#2", "the old version has no names to free"


def test_a_load_that_fails_leaves_the_old_version() -> None:
    def fails(case: Case, event: ClusterEvent) -> None:
        if isinstance(event, ModelAdded):
            case.directory.get(event.spec.id).out_of_pool(ModelState.FAILED, "ended at byte 7")
        elif isinstance(event, ModelRemoving):
            case.forget(event.model)

    case = Case(2 * SIZE, fails)
    with pytest.raises(Refused, match=r"ended at byte 7.*goes on") as refused:
        asyncio.run(case.changes.reload("m"))
    assert refused.value.status == 503
    assert current(case) == "m"
    assert case.events[-1] == ModelRemoving("m#2")
    assert "m#2" not in case.directory


def test_without_room_names_are_switched_at_once() -> None:
    case = Case(2 * SIZE - 1, lambda case, event: None)
    asyncio.run(case.changes.reload("m"))
    assert current(case) == "m#2"
    assert case.events == [ModelAdded(hosted(2).spec, replaces="m"), ModelRemoving("m")]


def test_weights_that_leave_the_pool_meanwhile_are_not_waited_for() -> None:
    case = Case(2 * SIZE, lambda case, event: case.old.out_of_pool())
    asyncio.run(asyncio.wait_for(case.changes.reload("m"), 1.0))
    assert current(case) == "m#2"


def test_a_removal_waits_for_a_reload_and_ends_the_new_version() -> None:
    def both(case: Case, event: ClusterEvent) -> None:
        loads(case, event)
        if isinstance(event, ModelRemoving):
            case.forget(event.model)

    async def run(case: Case) -> None:
        await asyncio.gather(case.changes.reload("m"), case.changes.remove("alias"))

    case = Case(2 * SIZE, both)
    asyncio.run(run(case))
    assert case.directory.find("m") is None
    assert case.events[1:] == [ModelRemoving("m"), ModelRemoving("m#2")]
