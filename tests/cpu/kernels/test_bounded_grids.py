"""How many CTAs read a weight: all that fit, or as few as saturate its link."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from c2cserve.core.tensors import Home
from c2cserve.engine.gpu.lanes import lane_contexts
from c2cserve.kernels.gpu import driver, launch_context
from c2cserve.kernels.gpu.aot.repository import Repository
from c2cserve.kernels.gpu.aot.variants import Variant
from c2cserve.kernels.gpu.gemm.choice.assumed import assumed_h200
from c2cserve.kernels.gpu.gemm.choice.choose import Chooser
from c2cserve.kernels.gpu.launch_context import LaunchContext

SMS = 132
ALONE, THREES = Variant("direct", "bfloat16", 16), Variant("split", "bfloat16", 16, 3)
EIGHTS = Variant("split", "bfloat16", 16, 8)
REPOSITORY = cast(Repository, None)


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def fitting(_repository: Any, variant: Variant) -> int:
        return {1: SMS, 3: 39, 8: 14}[variant.cluster]

    def properties(_device: int) -> SimpleNamespace:
        return SimpleNamespace(multi_processor_count=SMS)

    def stream(_device: int) -> None: ...

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.cuda, "Event", SimpleNamespace)

    def word(*_: object, **__: object) -> None: ...

    monkeypatch.setattr(driver, "new_stream", stream)
    monkeypatch.setattr(torch, "zeros", word)
    monkeypatch.setattr(launch_context, "_resident_clusters", fitting)


def test_alone_a_context_fills_its_sms() -> None:
    context = LaunchContext(0, REPOSITORY)
    homes: tuple[Home, ...] = ("hbm", "peer", "host")
    assert {context.clusters(ALONE, home) for home in homes} == {SMS}
    assert {context.clusters(THREES, home) for home in homes} == {39}


def test_readers_are_bounded_by_their_link_in_whole_clusters() -> None:
    context = LaunchContext(0, REPOSITORY, readers={"host": 4, "peer": 32})
    assert [context.clusters(ALONE, home) for home in ("host", "peer", "hbm")] == [4, 32, SMS]
    assert [context.clusters(THREES, home) for home in ("host", "peer", "hbm")] == [1, 10, 39]
    assert context.clusters(EIGHTS, "host") == 1, "a cluster is not divided"


def test_readers_of_a_small_slice_are_no_more_than_fit() -> None:
    context = LaunchContext(0, REPOSITORY, 16, readers={"peer": 32})
    assert context.clusters(ALONE, "peer") == 16


def test_grids_leave_sms_to_the_readers_beside() -> None:
    context = LaunchContext(0, REPOSITORY, spared_sms=4)
    assert context.clusters(ALONE) == 128
    assert context.clusters(THREES) == 35, "each reader may lie where a cluster of three would"
    assert context.clusters(EIGHTS) == 10
    assert LaunchContext(0, REPOSITORY, 2, spared_sms=4).clusters(ALONE) == 1


def test_lanes_pick_dataflows_for_the_same_sms() -> None:
    """A model changes lanes between two steps, and its answers must not change with them."""
    repository, chooser = REPOSITORY, Chooser(assumed_h200())
    lanes = lane_contexts(0, repository, chooser, 2)
    assert [lane.picked_for for lane in lanes] == [128, 128]
    assert [lane.clusters(ALONE) for lane in lanes] == [128, SMS], "grids differ"
    [alone] = lane_contexts(0, repository, chooser, 1)
    assert alone.picked_for == SMS


def test_a_cluster_that_does_not_fit_is_an_error() -> None:
    with pytest.raises(driver.CudaError, match="clusters of 8 SMs"):
        LaunchContext(0, REPOSITORY, 4).clusters(EIGHTS)


def test_as_few_ctas_read_a_link_as_saturate_it() -> None:
    assert Chooser(assumed_h200()).readers() == {"host": 4, "peer": 32}


def test_nothing_begins_early_beside_bounded_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []

    def launch(_kernel: object, grid: int, *_: object, pdl: bool) -> None:
        told.append((grid, pdl))

    def hold_back(stream: int, word: int) -> None:
        told.append("hold back")

    def zeros(*_: object, **__: object) -> SimpleNamespace:
        return SimpleNamespace(data_ptr=lambda: 64)

    monkeypatch.setattr(driver, "launch", launch)
    monkeypatch.setattr(driver, "hold_back", hold_back)
    monkeypatch.setattr(launch_context, "current_stream", lambda _device: 7)
    monkeypatch.setattr(torch, "zeros", zeros)
    repository = cast(Repository, SimpleNamespace(kernel=lambda _variant: None))
    homes: tuple[Home, ...] = ("host", "hbm", "peer")
    for readers, held in (({}, 0), ({"host": 4}, 1)):
        context = LaunchContext(0, repository, readers=cast(Any, readers))
        told.clear()
        for home in homes:
            context.launch(ALONE, 2, cast(Any, None), pdl=True, home=home)
        assert told.count("hold back") == held
        assert [one for one in told if one != "hold back"] == [(2, True)] * 3
        assert not held or told[1] == "hold back", "right behind what reads the link"
