"""What the cluster policy does in situations built by hand."""

from dataclasses import replace

import pytest
from cluster_cases import request, slice_, spec
from cluster_world import ClusterTestWorld
from controller_hand import Hand, dispatched, rejects

from c2cserve.core.actions import (
    Activate,
    Deactivate,
    Dispatch,
    Evict,
    Forget,
    Load,
    Reject,
    Withdraw,
)
from c2cserve.core.events import (
    Arrived,
    Cancelled,
    Draining,
    Finished,
    FirstToken,
    ModelAdded,
    ModelFailed,
    ModelLoaded,
    ModelRemoving,
    ModelUsable,
    SliceLost,
    SliceUp,
    StepTimes,
)
from c2cserve.core.machine import GpuShare, most_active
from c2cserve.core.model import ModelSpec
from c2cserve.policy.cluster.admission import AdmissionSettings

# ---- routing ------------------------------------------------------------------------------------


def test_the_first_request_activates_an_idle_slice() -> None:
    hand = Hand(slice_("s0"), slice_("s1"))
    assert hand.arrive("r1") == [Activate("a", "s0"), Dispatch("r1", "s0")]


def test_an_active_instance_with_room_takes_the_next() -> None:
    hand = Hand(slice_("s0"), slice_("s1"))
    hand.arrive("r1")
    hand.tell(StepTimes("s0", "a", 0.01, 0.001), FirstToken("r1", 0.1))
    assert hand.arrive("r2") == [Dispatch("r2", "s0")]


@pytest.mark.parametrize(
    ("decode_s", "token_s"),
    [(0.06, 0.001), (0.01, 0.06), (0.0, 0.0)],
    ids=["decodes too slow for the TPOT", "prefill too slow for the TTFT", "nothing known"],
)
def test_it_spreads_to_an_idle_slice_when_targets_come_near(
    decode_s: float, token_s: float
) -> None:
    hand = Hand(slice_("s0"), slice_("s1"))
    hand.arrive("r1")
    hand.tell(StepTimes("s0", "a", decode_s, token_s), FirstToken("r1", 0.1))
    assert hand.arrive("r2") == [Activate("a", "s1"), Dispatch("r2", "s1")]


def test_without_an_idle_slice_it_batches_up_to_the_targets_then_spreads() -> None:
    hand = Hand(slice_("s0"), slice_("s1"))
    hand.arrive("r1", "r2")
    for one in ("s0", "s1"):
        hand.tell(StepTimes(one, "a", 0.06, 0.001))
    hand.tell(FirstToken("r1", 0.1), FirstToken("r2", 0.1))
    assert dispatched(hand.arrive("r3", "r4")) == {"r3": "s0", "r4": "s0"}
    for one in ("s0", "s1"):
        hand.tell(StepTimes(one, "a", 0.2, 0.001))
    assert dispatched(hand.arrive("r5")) == {"r5": "s1"}


def busy_slice() -> Hand:
    """Its one slice computes 25 prompt tokens a second, and decodes for one request. It can run out
    of memory, so no request goes there that would be late."""
    hand = Hand(replace(slice_(max_batch=8), hbm_bytes=1 << 30))
    hand.arrive("r0")
    hand.tell(StepTimes("s0", "a", 0.001, 0.04), FirstToken("r0", 0.1))
    return hand


def test_a_prompt_that_is_done_makes_room_for_one_that_waits() -> None:
    hand = busy_slice()
    assert dispatched(hand.arrive("r1", "r2", "r3")) == {"r1": "s0", "r2": "s0"}
    hand.now = 0.1
    assert dispatched(hand.tell(FirstToken("r1", 0.1))) == {"r3": "s0"}


@pytest.mark.parametrize("end", ["cancelled", "late"])
def test_those_behind_one_that_finds_no_place_are_tried_when_it_leaves(end: str) -> None:
    hand = busy_slice()
    long = Arrived(request("long", prompt=99, ttft_s=1.0))
    short = Arrived(request("short", at=0.9))
    assert dispatched(hand.tell(long, short)) == {}
    hand.now = 0.95 if end == "cancelled" else 1.05
    assert dispatched(hand.tell(*[Cancelled("long")] * (end == "cancelled"))) == {"short": "s0"}


def test_the_largest_batch_is_filled_first() -> None:
    hand = Hand(slice_("s0"), slice_("s1"))
    hand.arrive("r1", "r2")
    hand.tell(StepTimes("s0", "a", 0.01, 0.001), StepTimes("s1", "a", 0.01, 0.001))
    hand.arrive("r3")
    hand.tell(Finished("r2", 3))
    assert dispatched(hand.arrive("r4")) == {"r4": "s0"}


def test_a_slice_full_of_models_lets_the_least_valuable_leave() -> None:
    hand = Hand(slice_("s0", max_active=2), models="")
    pinned, old, new = spec("p", pinned=True), spec("o"), spec("n")
    hand.ready(pinned, old, new)
    for at, name in enumerate("po"):
        hand.now = float(at)
        hand.arrive(f"r{name}", model=name)
        hand.tell(Finished(f"r{name}", 1))
    assert hand.arrive("rn", model="n") == [
        Deactivate("o", "s0"), Activate("n", "s0"), Dispatch("rn", "s0"),
    ]  # fmt: skip
    assert hand.arrive("ro", model="o") == [
        Deactivate("p", "s0"), Activate("o", "s0"), Dispatch("ro", "s0"),
    ], "n has a request now"  # fmt: skip
    assert hand.arrive("rp", model="p") == [], "both have one"
    assert dispatched(hand.tell(Finished("rn", 1))) == {"rp": "s0"}


@pytest.mark.parametrize(
    ("valuable", "plain"),
    [(spec("v", priority=1), spec("x")), (spec("v", keep_warm_s=60.0), spec("x"))],
    ids=["priority", "keep warm"],
)
def test_what_a_model_is_worth(valuable: ModelSpec, plain: ModelSpec) -> None:
    hand = Hand(slice_("s0", max_active=2), models="")
    hand.ready(valuable, plain, spec("n"))
    for at, name in enumerate("vx"):
        hand.now = float(at)
        hand.arrive(f"r{name}", model=name)
        hand.tell(Finished(f"r{name}", 1))
    assert hand.arrive("rn", model="n")[0] == Deactivate("x", "s0")


def test_one_model_never_takes_all_of_a_slice() -> None:
    hand = Hand(slice_("s0", max_batch=4), models="ab")
    assert len(dispatched(hand.arrive(*(f"a{i}" for i in range(30))))) == 5
    assert dispatched(hand.arrive("b", model="b")) == {"b": "s0"}
    assert len(dispatched(hand.arrive(*(f"b{i}" for i in range(30)), model="b"))) == 2
    assert len(hand.policy._queue) == 25 + 28


def test_late_binding_waiting_requests_go_to_whichever_slice_frees_first() -> None:
    hand = Hand(slice_("s0", max_batch=1), slice_("s1", max_batch=1))
    hand.arrive("r1", "r2", "r3")
    assert dispatched(hand.tell(Finished("r2", 1))) == {"r3": "s1"}


def test_urgency_is_due_time_with_priority_worth_seconds() -> None:
    hand = Hand(slice_("s0", max_batch=1))
    hand.arrive("r0")
    hand.now = 1.0
    late, strict = request("late", at=1.0), request("strict", at=1.0, ttft_s=0.5)
    first, old = request("first", at=1.0, priority=2), request("old", at=0.9)
    hand.tell(*(Arrived(one) for one in (late, strict, first, old)))
    order = []
    while hand.policy._queue:
        running = next(iter(hand.policy._where))
        order += dispatched(hand.tell(Finished(running, 1)))
    assert order == ["first", "strict", "old", "late"]


def test_low_priority_waits_only_so_long_behind_high() -> None:
    world = ClusterTestWorld(
        0, [slice_(max_batch=1)], AdmissionSettings(patience=0.0), service_s=0.1
    )
    world.add(spec("a"))
    world.arrive(request("low", at=1.0))
    for i in range(200):  # twice what the slice can do
        world.arrive(request(f"h{i:03}", at=0.05 * i, priority=3))
    world.run()
    low = world.jobs["low"]
    assert low.first_dispatch_s is not None
    overtaken = [
        j for j in world.jobs.values() if 1.0 < (j.first_dispatch_s or 0) < low.first_dispatch_s
    ]
    assert all(live.request.arrival_s <= 4.0 for live in overtaken), "3 steps of priority are 3 s"


# ---- pool ---------------------------------------------------------------------------------------


def test_a_cold_model_is_loaded_and_its_requests_wait_until_it_is_usable() -> None:
    hand = Hand(slice_(), models="")
    assert hand.tell(ModelAdded(spec("a"))) == [Load("a")], "there is room: why wait"
    assert hand.arrive("r1") == []
    assert dispatched(hand.tell(ModelUsable("a"))) == {"r1": "s0"}
    assert hand.tell(ModelLoaded("a", 10, 1.0)) == []


def test_least_recently_used_models_make_room() -> None:
    hand = Hand(slice_(), models="abc", budget=35)
    for at, name in enumerate("cab"):
        hand.now = float(at)
        hand.arrive(f"r{name}", model=name)
        hand.tell(Finished(f"r{name}", 1))
    assert hand.tell(ModelAdded(spec("d", 15))) == [], "nobody asked for it and the pool is full"
    actions = hand.arrive("rd", model="d")
    assert actions == [Deactivate("c", "s0"), Evict("c"), Load("d")]
    actions = hand.arrive("rc", model="c")
    assert actions == [Deactivate("a", "s0"), Evict("a"), Load("c")]


def test_nothing_in_use_pinned_loading_or_needless_is_evicted() -> None:
    hand = Hand(slice_(), models="", budget=60)
    hand.ready(spec("used"), spec("pinned", pinned=True), spec("small", 5), spec("big", 30))
    hand.arrive("r1", model="used")
    hand.arrive("r2", model="small")
    hand.tell(Finished("r2", 1))
    hand.tell(ModelAdded(spec("new", 33)))
    hand.now = 1.0
    hand.arrive("rb", model="big")
    hand.tell(Finished("rb", 1))
    assert hand.arrive("r3", model="new") == [
        Deactivate("big", "s0"), Evict("big"), Load("new"),
    ], "small was used before, but need not go"  # fmt: skip
    hand.tell(ModelAdded(spec("other", 33)))
    assert hand.arrive("r4", model="other") == [], "all that is left is loading, used or pinned"
    hand.tell(ModelUsable("new"))
    assert hand.tell(Finished("r3", 1)) == [], "its last layers are still on their way"
    assert hand.tell(ModelLoaded("new", 33, 1.0))[1:] == [Evict("new"), Load("other")]


def test_a_model_that_can_never_fit_is_refused_with_numbers() -> None:
    hand = Hand(slice_(), models="", budget=50)
    hand.ready(spec("pinned", 30, pinned=True))
    hand.tell(ModelAdded(spec("big", 51)), ModelAdded(spec("beside", 21)))
    [refused] = hand.arrive("r1", model="big")
    assert isinstance(refused, Reject)
    assert refused.status == 503
    assert "51 bytes" in refused.reason
    assert "budget is 50" in refused.reason
    [refused] = hand.arrive("r2", model="beside")
    assert isinstance(refused, Reject)
    assert "pinned models keep 30" in refused.reason


def test_who_waits_when_a_model_becomes_impossible_is_refused() -> None:
    hand = Hand(slice_(), models="", budget=47)
    hand.ready(spec("used", 40))
    assert Dispatch("r0", "s0") in hand.tell(Arrived(request("r0", "used")))
    hand.tell(ModelAdded(spec("waits", 33)))
    assert hand.tell(Arrived(request("r1", "waits"))) == []
    actions = hand.tell(ModelAdded(spec("kept", 26, pinned=True)))
    (reject,) = [action for action in actions if isinstance(action, Reject)]
    assert (reject.request_id, reject.status) == ("r1", 503)
    assert "33" in reject.reason
    assert "26" in reject.reason


def test_loads_nobody_asked_for_leave_the_way_free() -> None:
    hand = Hand(slice_(), models="", budget=1000)
    actions = hand.tell(
        *(ModelAdded(spec(f"m{i}")) for i in range(9)), ModelAdded(spec("p", pinned=True))
    )
    assert actions == [Load("p"), Load("m0")]
    assert hand.arrive("r", model="m8") == [Load("m8")]
    assert hand.tell(ModelUsable("p"), ModelLoaded("p", 10, 1.0)) == [], "m0 and m8 are under way"
    loaded = hand.tell(ModelUsable("m8"), ModelLoaded("m8", 10, 1.0))
    assert [a for a in loaded if isinstance(a, Load)] == [Load("m1")]


def test_a_failed_load_ends_its_requests_and_is_tried_again_later() -> None:
    hand = Hand(slice_(), models="")
    hand.tell(ModelAdded(spec("a")))
    hand.arrive("r1", "r2")
    assert rejects(hand.tell(ModelFailed("a", "no such tensor"))) == {"r1": 503, "r2": 503}
    hand.now = 1.0
    [refused] = hand.arrive("r3")
    assert isinstance(refused, Reject)
    assert refused.status == 503
    assert "no such tensor" in refused.reason
    assert refused.retry_after_s == pytest.approx(4.0)
    hand.now = 5.0
    assert hand.arrive("r4") == [Load("a")]
    hand.tell(ModelFailed("a", "again"))
    hand.now = 14.0
    assert rejects(hand.arrive("r5")) == {"r5": 503}, "10 s the second time"
    hand.now = 15.0
    assert hand.arrive("r6") == [Load("a")]
    assert dispatched(hand.tell(ModelUsable("a"))) == {"r6": "s0"}


def test_a_load_that_fails_half_way_ends_what_already_runs() -> None:
    hand = Hand(slice_(), models="")
    hand.tell(ModelAdded(spec("a")))
    hand.arrive("r1")
    hand.tell(ModelUsable("a"))
    actions = hand.tell(ModelFailed("a", "disk error"))
    assert actions[0] == Withdraw("r1", "s0")
    assert rejects(actions) == {"r1": 503}
    assert actions[-1] == Deactivate("a", "s0")
    assert hand.tell(Finished("r1", 0, failed=True)) == []


def test_a_removed_model_finishes_what_it_has() -> None:
    hand = Hand(slice_(max_batch=1))
    hand.arrive("r1", "r2")
    assert hand.tell(ModelRemoving("a")) == []
    assert rejects(hand.arrive("r3")) == {"r3": 404}
    assert dispatched(hand.tell(Finished("r1", 1))) == {"r2": "s0"}
    assert hand.tell(Finished("r2", 1)) == [Deactivate("a", "s0"), Forget("a")]
    hand.ready(spec("a"))
    assert "r4" in dispatched(hand.arrive("r4"))


# ---- admission ----------------------------------------------------------------------------------


def test_a_full_queue_refuses_with_429_and_a_time() -> None:
    hand = Hand(slice_(max_batch=1), max_waiting=2)
    actions = hand.arrive("r1", "r2", "r3", "r4")
    assert dispatched(actions) == {"r1": "s0"}
    assert rejects(actions) == {"r4": 429}
    [refused] = [a for a in actions if isinstance(a, Reject)]
    assert "2 requests" in refused.reason
    assert refused.retry_after_s >= 1.0


def test_a_busy_model_can_not_fill_the_queue_for_others() -> None:
    hand = Hand(slice_(max_batch=1), models="ab", max_waiting=4)
    hand.arrive("a1", "a2", "a3", "a4", "a5")
    hand.arrive("b1", model="b")
    assert rejects(hand.arrive("b2", model="b")) == {"a5": 429}
    assert rejects(hand.arrive("a6")) == {"a6": 429}
    assert rejects(hand.arrive("b3", model="b")) == {"a4": 429}
    assert rejects(hand.arrive("b4", model="b")) == {"b4": 429}, "two each"


def test_a_request_that_would_wait_far_too_long_is_refused_early() -> None:
    hand = Hand(slice_(max_batch=1), patience=2.0)
    hand.arrive("r0", "r1", "r2")
    while hand.policy._where:  # one request a second is what the slice can do
        hand.now += 1.0
        hand.tell(Finished(next(iter(hand.policy._where)), 1))
    hand.now += 100.0
    actions = hand.arrive("s0", "s1", "s2", "s3", "s4", "s5")
    assert dispatched(actions) == {"s0": "s0"}
    refused = [a for a in actions if isinstance(a, Reject)]
    assert {r.request_id for r in refused} == {"s4", "s5"}
    assert all(r.status == 429 and r.retry_after_s > 1.5 for r in refused)
    assert "requests ahead" in refused[0].reason


def test_who_waits_for_weights_is_ahead_of_nobody() -> None:
    """Slices are free while a disk is slow: others are not to be refused for that."""
    hand = Hand(slice_(max_batch=1), models="a", patience=2.0)
    hand.arrive("r0", "r1", "r2")
    while hand.policy._where:  # one request a second is what the slice can do
        hand.now += 1.0
        hand.tell(Finished(next(iter(hand.policy._where)), 1))
    hand.tell(ModelAdded(spec("b")))
    hand.now += 100.0
    hand.arrive(*(f"b{i}" for i in range(9)), model="b")
    actions = hand.arrive("s0", "s1")
    assert dispatched(actions) == {"s0": "s0"}
    assert not rejects(actions)
    assert dispatched(hand.tell(Finished("s0", 1))) == {"s1": "s0"}


def test_waiting_alone_is_refused_in_the_end_unless_patience_is_unlimited() -> None:
    for patience, end in ((3.0, {"r2": 429}), (0.0, {})):
        hand = Hand(slice_(max_batch=1), patience=patience)
        hand.arrive("r1", "r2")
        assert hand.policy.wakeup is not None
        hand.now = 2.9
        assert rejects(hand.tell()) == {}
        hand.now = 3.2
        assert rejects(hand.tell()) == end


def test_what_a_quiet_server_finishes_is_not_what_it_can_do() -> None:
    hand = Hand(slice_(max_batch=16), patience=1.0)
    for i in range(5):
        hand.now += 10.0
        hand.arrive(f"r{i}")
        hand.tell(Finished(f"r{i}", 1))
    assert rejects(hand.arrive(*(f"b{i}" for i in range(30)))) == {}


def test_draining_refuses_what_is_new_and_finishes_what_is_there() -> None:
    hand = Hand(slice_(max_batch=1))
    hand.arrive("r1", "r2")
    assert rejects(hand.tell(Draining(), Arrived(request("r3")))) == {"r3": 503}
    assert not hand.policy.done
    assert dispatched(hand.tell(Finished("r1", 1))) == {"r2": "s0"}
    assert not hand.policy.done
    hand.tell(Finished("r2", 1))
    assert hand.policy.done


def test_without_a_slice_requests_wait_for_one_and_then_get_503() -> None:
    hand = Hand(no_slice_grace_s=3.0, patience=0.0)
    assert hand.arrive("r1") == []
    hand.now = 2.0
    assert hand.arrive("r2") == []
    hand.now = 3.5
    assert rejects(hand.tell()) == {"r1": 503, "r2": 503}
    assert rejects(hand.arrive("r3")) == {"r3": 503}
    hand.tell(SliceUp(slice_()))
    assert dispatched(hand.arrive("r4")) == {"r4": "s0"}


# ---- faults -------------------------------------------------------------------------------------


def test_displaced_requests_go_to_the_front_and_are_never_refused() -> None:
    hand = Hand(slice_("s0", max_batch=1), slice_("s1", max_batch=1), patience=1.0, max_waiting=2)
    hand.arrive("r0", "r1", "r2", "r3")
    hand.now = 0.9
    resumed = replace(request("r0"), prompt_len=13, max_new_tokens=5, sent=3)
    hand.tell(SliceLost("s0", (resumed,)))
    hand.now = 5.0
    assert rejects(hand.tell()) == {"r2": 429, "r3": 429}
    assert dispatched(hand.tell(Arrived(request("r4", at=5.0)), Finished("r1", 1))) == {"r0": "s1"}


def test_a_lost_slice_knows_nothing_when_it_is_back() -> None:
    hand = Hand(slice_("s0"))
    hand.arrive("r1")
    assert hand.tell(SliceLost("s0", (request("r1"),))) == []
    assert hand.tell(SliceUp(slice_("s0"))) == [Activate("a", "s0"), Dispatch("r1", "s0")]


def test_a_cancelled_request_leaves_from_wherever_it_is() -> None:
    hand = Hand(slice_(max_batch=1))
    hand.arrive("r1", "r2", "r3")
    assert hand.tell(Cancelled("r2")) == []
    actions = hand.tell(Cancelled("r1"))
    assert actions == [Withdraw("r1", "s0"), Dispatch("r3", "s0")]
    assert hand.tell(Arrived(request("r4")), Cancelled("r4")) == []
    assert hand.tell(Cancelled("nobody")) == []


def test_models_stay_on_a_gpu_until_memory_is_needed() -> None:
    """To deactivate a model gives up its weights in the slice's memory, so a large catalogue would
    be loaded again at each switch. The slice decides which weights make room."""
    gpu = replace(
        slice_("g"), kind="gpu", gpu=GpuShare("g", 1), kv_bytes=1 << 20, slab_bytes=1,
        hbm_bytes=1 << 20, link_bytes_per_s=1000.0, max_active=most_active("gpu"),
    )  # fmt: skip
    hand, names = Hand(gpu, models="", budget=600), [f"m{number}" for number in range(60)]
    hand.ready(*(spec(name) for name in names))
    for turn in range(2):
        for name in names:
            actions = hand.arrive(f"r{turn}{name}", model=name)
            assert not any(isinstance(action, Deactivate) for action in actions)
            assert any(isinstance(action, Activate) for action in actions) == (turn == 0)
            hand.tell(Finished(f"r{turn}{name}", 1))
