"""In an overload a model takes no place from one that will be asked more often meanwhile."""

import pytest
from cluster_cases import request, slice_, spec
from controller_hand import Hand, dispatched

from c2cserve.core.events import Finished, StepTimes
from c2cserve.core.machine import GpuShare, Slice
from c2cserve.policy.cluster.placement import awaited
from c2cserve.policy.cluster.pool.residency import ModelBook
from c2cserve.policy.cluster.quantify import Learned
from c2cserve.policy.cluster.slice_load import SliceLoad

NOW = 20.0


def books(load: SliceLoad, **every_s: float) -> dict[str, ModelBook]:
    """Models that had requests on the slice until now, one in so many seconds. A step of each takes
    0.08 s, so two of them do not fit into a time per token of 0.1 s."""
    models = {name: ModelBook(spec(name, 60)) for name in every_s}
    for name, gap_s in every_s.items():
        load.activate(models[name].spec)
        load.believe(name, Learned(0.08, 0.001))
        models[name].slice_id = load.slice.id
        for number in range(int(NOW / gap_s)):
            models[name].asks.note(number * gap_s)
    return models


def gives_way(load: SliceLoad, models: dict[str, ModelBook], waiting: int = 1) -> bool:
    """Whether a request for the model `rare` must leave the slice to others. An answer of 50 tokens
    takes 4 s."""
    return awaited(request("r", "rare"), load, models, waiting, 50.0, NOW)


def test_a_model_that_is_asked_more_often_has_its_place_back() -> None:
    load = SliceLoad(slice_())
    models = books(load, often=1.0, rare=10.0)
    assert gives_way(load, models), "four requests of the other one are expected meanwhile"
    assert not gives_way(load, models, waiting=4), "as many wait for this one"


def test_who_is_asked_as_rarely_takes_it() -> None:
    load = SliceLoad(slice_())
    assert not gives_way(load, books(load, other=8.0, rare=8.0))


def test_a_place_that_is_held_elsewhere_is_free() -> None:
    load = SliceLoad(slice_())
    models = books(load, often=1.0, rare=10.0)
    models["often"].slice_id = "s1"
    assert not gives_way(load, models), "it was last on another slice"
    models["often"].slice_id, models["often"].running = "s0", 1
    assert not gives_way(load, models), "it runs"


def test_its_own_instance_with_requests_takes_more() -> None:
    load = SliceLoad(slice_())
    models = books(load, often=1.0, rare=10.0)
    load.add(request("r0", "rare"))
    assert not gives_way(load, models)


def test_nothing_is_held_while_times_are_not_known() -> None:
    load = SliceLoad(slice_())
    models = books(load, often=1.0, rare=10.0)
    load.believe("rare", Learned())
    assert not gives_way(load, models)


@pytest.mark.parametrize(("hbm_bytes", "held"), [(100, True), (200, False)])
def test_a_model_whose_weights_fit_beside_loses_nothing(hbm_bytes: int, *, held: bool) -> None:
    gpu = Slice(
        "s0", "gpu", kv_bytes=hbm_bytes, slab_bytes=1, max_batch=4, max_active=8,
        gpu=GpuShare("s0", 100), hbm_bytes=hbm_bytes, link_bytes_per_s=1e3,
    )  # fmt: skip
    load = SliceLoad(gpu)
    models = books(load, often=1.0, rare=10.0)
    for name in models:
        load.believe(name, Learned(0.04, 0.001))
    assert gives_way(load, models) == held


def test_a_model_that_is_asked_for_the_first_time_is_not_held_back() -> None:
    load = SliceLoad(slice_())
    models = books(load, often=1.0, rare=10.0)
    models["rare"].asks.begin(NOW)
    assert not gives_way(load, models)


@pytest.mark.parametrize("overload", [False, True])
def test_places_are_held_only_in_an_overload(*, overload: bool) -> None:
    hand = Hand(slice_(max_batch=1), models="ab")
    hand.arrive("b", model="b")
    hand.tell(StepTimes("s0", "b", 0.08, 0.001), Finished("b", 256))
    for number in range(20):
        hand.now = float(number)
        hand.arrive(f"a{number}")
        hand.tell(StepTimes("s0", "a", 0.08, 0.001), Finished(f"a{number}", 8))
    if overload:  # some find no place for longer than a burst
        running = dispatched(hand.arrive(*[f"x{number}" for number in range(9)]))
        hand.now += 0.3
        hand.tell()
        hand.arrive("y0", "y1")
        while running:
            running = dispatched(hand.tell(*[Finished(name, 8) for name in running]))
    assert dispatched(hand.arrive("b0", model="b")) == ({} if overload else {"b0": "s0"})
    assert dispatched(hand.arrive("a20")) == {"a20": "s0"}
