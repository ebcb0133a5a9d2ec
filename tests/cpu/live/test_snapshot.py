"""The state of a server with a large catalogue, taken while its controller changes it."""

import time
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

from c2cserve.core.model import ModelSpec, version_id
from c2cserve.runtime.gateway import Snapshot
from c2cserve.serving.controller.directory import Directory, ModelRecord
from c2cserve.serving.controller.host import HostedModel, ModelHost
from c2cserve.serving.controller.jobs import JobTable
from c2cserve.serving.controller.snapshot import BusyShares, take_snapshot

SLICES = tuple(f"s{number}" for number in range(64))


def record(version: str) -> ModelRecord:
    spec = ModelSpec(version, 100, 1, 512, 64)
    return ModelRecord(HostedModel(spec, cast(Any, None), (), {}, "float32", {}))


def catalogue(models: int) -> Directory:
    directory = Directory()
    for number in range(models):
        directory.add(record(f"m{number}"))
    return directory


def slot(slice_id: str) -> Any:
    return SimpleNamespace(
        worker=None, slice=SimpleNamespace(id=slice_id, kind="cpu", cpus=(0,), kv_bytes=1),
        state="lost", restarts=0, backs_off=False,
    )  # fmt: skip


class Pool:
    """An empty one."""

    files_changed = used_bytes = budget_bytes = 0

    def loaded_bytes(self, model: str) -> int:
        return 0


def snapshot(directory: Directory) -> Snapshot:
    return take_snapshot(
        instance="i", started_s=0.0, draining=False, slots=[slot(one) for one in SLICES],
        directory=directory, jobs=JobTable(), host=cast(ModelHost, Pool()), counters=Counter(),
        busy=BusyShares(), stall_timeout_s=1.0,
    )  # fmt: skip


def seconds(models: int) -> float:
    directory, best_s = catalogue(models), float("inf")
    for _ in range(3):
        began_s = time.thread_time()
        snapshot(directory)
        best_s = min(best_s, time.thread_time() - began_s)
    return best_s


def test_its_cost_grows_as_the_catalogue() -> None:
    assert seconds(2000) < 30 * seconds(200)


def test_all_versions_of_a_model_are_where_the_model_is() -> None:
    directory = catalogue(2)
    newer = record(version_id("m0", 2))
    directory.get("m0").slices.add("s1")
    directory.switch(newer)
    newer.slices.update(("s0", "s1"))
    directory.get("m1").failing["s0"] = "why"
    taken = snapshot(directory)
    assert {one.id: one.active_slices for one in taken.models} == {"m0": ("s0", "s1"), "m1": ()}
    slices = {one.id: one for one in taken.slices}
    assert slices["s0"].active_models == slices["s1"].active_models == ("m0",)
    assert slices["s0"].failed_models == ("m1",)
    assert slices["s1"].failed_models == slices["s2"].active_models == ()


class Shared(set[str]):
    """A set that another thread changes while it is iterated over; its copies are not shared."""

    shared = False

    def __iter__(self) -> Iterator[str]:
        for one in super().__iter__():
            if self.shared:
                self.symmetric_difference_update({"s1"})
            yield one


def test_the_controller_may_change_models_meanwhile() -> None:
    directory = catalogue(1)
    directory.get("m0").slices = slices = Shared({"s0"})
    slices.shared = True
    [model] = snapshot(directory).models
    assert model.active_slices == ("s0",)
