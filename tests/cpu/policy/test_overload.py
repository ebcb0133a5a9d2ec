"""More is asked than slices can do: who is served, and who is refused when."""

from dataclasses import replace

import pytest
from cluster_cases import request, slice_, spec
from cluster_world import ClusterTestWorld
from controller_hand import Hand, dispatched, rejects

from c2cserve.core.actions import Backlog, Reject, Withdraw
from c2cserve.core.events import Arrived, Finished, FirstToken
from c2cserve.policy.cluster.admission import AdmissionSettings, Standing, turns_before

_SERVICE_S = 0.05


def offered(load: float, seconds: float = 20.0, **settings: float) -> ClusterTestWorld:
    """A slice that does 40 requests per second, each with a TTFT target of half a second, offered
    so many times that."""
    world = ClusterTestWorld(
        3, [slice_(max_batch=1)], AdmissionSettings(**settings), service_s=_SERVICE_S
    )  # fmt: skip
    world.add(spec("a"))
    rate = load * 2 / _SERVICE_S
    for number in range(int(rate * seconds)):
        world.arrive(request(f"r{number:05}", at=1.0 + number / rate, ttft_s=0.5))
    world.run()
    return world


def in_time_per_s(world: ClusterTestWorld, seconds: float = 20.0) -> float:
    times = [
        live for live in world.jobs.values()
        if live.ended == "finished" and live.first_dispatch_s is not None
        and live.first_dispatch_s - live.request.arrival_s <= live.request.slo.ttft_s
    ]  # fmt: skip
    return len(times) / seconds


def test_goodput_holds_at_any_load() -> None:
    seconds = 10.0
    loads = (0.5, 1.0, 2.0, 4.0, 10.0)
    found = {load: in_time_per_s(offered(load, seconds), seconds) for load in loads}
    for load in (1.0, 2.0, 4.0, 10.0):
        assert found[load] >= 0.95 * max(found.values()), load


def test_in_an_overload_refusals_come_early() -> None:
    world = offered(4.0)
    waits = sorted(
        live.end_s - live.request.arrival_s
        for live in world.jobs.values() if live.ended == "rejected" and live.request.arrival_s > 3.0
    )  # fmt: skip
    assert len(waits) > 1000
    assert waits[len(waits) // 2] == 0.0, "most of them on arrival"
    assert waits[-1] <= 0.5 + 0.25, "none later than its target, and the next look"


def test_a_burst_waits_and_is_served() -> None:
    """All at once, and then nothing: to refuse any of them would help none."""
    world = ClusterTestWorld(0, [slice_(max_batch=1)], service_s=_SERVICE_S)
    world.add(spec("a"))
    for number in range(100):
        world.arrive(request(f"r{number:03}", at=1.0, ttft_s=0.5))
    world.run()
    assert {live.ended for live in world.jobs.values()} == {"finished"}


def test_a_late_request_does_not_delay_one_in_time() -> None:
    hand = Hand(slice_(max_batch=1))
    hand.arrive("first", "old", ttft_s=0.5)
    hand.now = 0.6
    hand.arrive("new", ttft_s=0.5)
    assert list(dispatched(hand.tell(Finished("first", 1)))) == ["new"]
    assert list(dispatched(hand.tell(Finished("new", 1)))) == ["old"], "in a quiet moment"


def test_the_backlog_is_told_while_there_is_an_overload() -> None:
    hand = Hand(slice_(max_batch=1), burst_s=1.0)
    told: list[Backlog] = []
    for tick in range(60):
        hand.now = tick * 0.1
        events = [Finished(f"r{tick - 2:03}b", 1)] if tick > 1 else []
        ones = [request(f"r{tick:03}{which}", at=hand.now, ttft_s=2.0) for which in "abc"]
        actions = hand.tell(*events, *(Arrived(one) for one in ones))
        told += [action for action in actions if isinstance(action, Backlog)]
    assert told
    assert told[-1].per_s > 0
    assert dict(told[-1].waiting)[""] > 0


def test_what_was_let_in_is_not_refused_for_the_time_in_which_it_was_prepared() -> None:
    """That work is lost with it. It was let in by the same rule, when it had not waited yet."""
    hand, backlog = Hand(slice_(max_batch=1), burst_s=1.0), Backlog()
    prepared_s, ttft_s, let_in, refused = 0.3, 2.0, 0, list[str]()
    running: list[str] = []
    for tick in range(150):
        hand.now = tick * 0.1
        room = backlog.share * ttft_s * backlog.per_s - sum(dict(backlog.waiting).values())
        names = [f"r{tick:03}{which}" for which in "abc"]
        if backlog.per_s:
            names = names[: max(0, int(room))]
            let_in += len(names)
        ones = [request(name, at=hand.now - prepared_s, ttft_s=ttft_s) for name in names]
        actions = hand.tell(
            *(Finished(name, 1) for name in running[:1]), *(Arrived(one) for one in ones)
        )
        if backlog.per_s:
            refused += rejects(actions).keys() & set(names)
        running = [*running[1:], *dispatched(actions)]
        running = [name for name in running if name not in rejects(actions)]
        backlog = next((one for one in actions if isinstance(one, Backlog)), backlog)
    assert let_in > 50
    assert refused == []


def test_patience_0_refuses_none_for_being_late_in_an_overload_either() -> None:
    world = offered(3.0, seconds=5.0, patience=0.0)
    assert {live.ended for live in world.jobs.values()} == {"finished"}


def test_a_tenant_in_its_share_is_not_refused_for_the_overload_of_another() -> None:
    world = ClusterTestWorld(5, [slice_(max_batch=1)], service_s=_SERVICE_S)
    world.add(spec("a"))
    for number in range(1600):
        flood = request(f"a{number:05}", at=1.0 + number / 160, ttft_s=0.5)
        world.arrive(replace(flood, tenant="A"))
    for number in range(40):  # a fifth of what the slice does
        calm = request(f"b{number:05}", at=1.0 + number / 4, ttft_s=0.5)
        world.arrive(replace(calm, tenant="B"))
    world.run()
    calm_ends = [live.ended for live in world.jobs.values() if live.request.tenant == "B"]
    assert set(calm_ends) == {"finished"}
    refused = [live for live in world.jobs.values() if live.ended == "rejected"]
    assert len(refused) > 500


@pytest.mark.parametrize(
    ("waiting", "before"),
    [({}, 0), ({"A": 100}, 1), ({"A": 100, "B": 3}, 7), ({"B": 9}, 9), ({"A": 2, "B": 50}, 52)],
)
def test_turns_before_a_tenants_next_request(waiting: dict[str, int], before: int) -> None:
    assert turns_before("B", waiting) == before


def test_a_queue_that_was_empty_in_between_does_not_stand() -> None:
    standing = Standing(1.0)
    assert not standing.note(waiting=True, now=0.0)
    assert not standing.note(waiting=True, now=0.9)
    standing.note(waiting=False, now=0.95)
    assert not standing.note(waiting=True, now=1.5)
    assert standing.note(waiting=True, now=2.5)


def test_refusals_name_the_limit_they_met() -> None:
    hand = Hand(slice_(max_batch=1), max_waiting=2)
    actions = hand.arrive("r1", "r2", "r3", "r4", ttft_s=1.0)
    assert rejects(actions) == {"r4": 429}
    assert [one.limit for one in actions if isinstance(one, Reject)] == ["queue_full"]
    hand.now = 21.0
    late = hand.tell()
    assert [one.limit for one in late if isinstance(one, Reject)] == ["patience"] * 2


def test_in_an_overload_a_request_that_is_late_on_its_slice_makes_room() -> None:
    hand = Hand(slice_(max_batch=4), burst_s=0.2)
    hand.arrive("a1", "a2", "a3", "a4", "a5", ttft_s=0.5)
    hand.tell(FirstToken("a1", 0.1))
    ends: dict[str, int] = {}
    for tick in range(1, 10):
        hand.now = tick * 0.1
        actions = hand.arrive(*[f"b{tick}{i}" for i in range(5)], ttft_s=0.5)
        ends |= rejects(actions)
        if "a2" in ends:
            break
    assert 0.5 < hand.now < 0.9
    assert Withdraw("a2", "s0") in actions
    assert dispatched(actions) or dispatched(hand.tell()), "others have its place"
    assert "a1" not in ends, "its client has seen a token"


def test_without_an_overload_a_late_request_stays_on_its_slice() -> None:
    hand = Hand(slice_(max_batch=4), burst_s=0.2)
    hand.arrive("a1", "a2", ttft_s=0.5)
    for tick in range(1, 20):
        hand.now = tick * 0.1
        assert hand.tell() == []
