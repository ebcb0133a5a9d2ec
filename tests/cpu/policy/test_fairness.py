"""Fair shares among tenants: what is promised to each, whatever the others send."""

from collections import Counter

from cluster_cases import slice_, spec
from cluster_world import ClusterTestWorld
from hypothesis import given
from hypothesis import strategies as st

from c2cserve.core.events import Arrived, Finished
from c2cserve.core.request import Request, Slo
from c2cserve.policy.cluster.admission import AdmissionSettings
from c2cserve.policy.cluster.fairness import OUTPUT_WORK, FairShares
from c2cserve.policy.cluster.queue import WaitingQueue

_LARGEST = 100 + OUTPUT_WORK * 50
"""Work of the largest request that is drawn here."""


def request(
    name: str, tenant: str, at: float = 0.0, prompt: int = 10, output: int = 10,
    model: str = "a", ttft_s: float = 1.0,
) -> Request:  # fmt: skip
    return Request(name, model, prompt, output, at, Slo(ttft_s, 0.1), tenant=tenant)


def work(one: Request) -> float:
    return one.prompt_len + OUTPUT_WORK * one.max_new_tokens


sizes = st.tuples(st.integers(1, 100), st.integers(1, 50))


@given(st.lists(sizes, min_size=20, max_size=60), st.lists(sizes, min_size=20, max_size=60))
def test_tenants_that_always_wait_get_the_same_work(
    ours: list[tuple[int, int]], theirs: list[tuple[int, int]]
) -> None:
    """The bound of start-time fair queueing: one largest request of each."""
    shares = FairShares()
    queue = WaitingQueue(shares)
    for tenant, drawn in (("A", ours), ("B", theirs)):
        for number, (prompt, output) in enumerate(drawn):
            one = request(f"{tenant}{number}", tenant, 0.0, prompt, output)
            shares.entered(one)
            queue.push(one)
    done = Counter[str]()
    while len(queue.punctual(lambda _: True)) == 2:
        head = queue.head("a")
        assert head is not None
        one = head[1]
        queue.remove(one.id)
        shares.dispatched(one, float(one.max_new_tokens))
        shares.ended(one.id, one.max_new_tokens)
        done[one.tenant] += int(work(one))
        assert abs(done["A"] - done["B"]) <= 2 * _LARGEST


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 3)), max_size=30))
def test_with_one_tenant_the_order_is_by_urgency_alone(drawn: list[tuple[int, int]]) -> None:
    shares = FairShares()
    queue, plain = WaitingQueue(shares), WaitingQueue()
    for number, (at, ttft) in enumerate(drawn):
        one = request(f"r{number:02}", "A", at / 10, ttft_s=1.0 + ttft)
        shares.entered(one)
        queue.push(one)
        plain.push(one)
    order: list[str] = []
    while (head := queue.head("a")) is not None:
        queue.remove(head[1].id)
        shares.dispatched(head[1], 5.0)
        order.append(head[1].id)
    assert order == [one.id for one in plain]


def test_a_tenant_that_was_away_has_no_claim_on_the_past() -> None:
    shares = FairShares()
    for number in range(10):
        one = request(f"a{number}", "A")
        shares.entered(one)
        shares.dispatched(one, 10.0)
    late = request("b0", "B")
    shares.entered(late)
    assert shares.served("B") == shares.served("A")


def test_what_was_really_drawn_is_charged() -> None:
    shares = FairShares()
    one = request("a", "A", output=100)
    shares.entered(one)
    shares.dispatched(one, 80.0)
    assert shares.served("A") == 10 + OUTPUT_WORK * 80
    other = request("a2", "A")
    shares.entered(other)
    shares.ended("a", 3)
    assert shares.served("A") == 10 + OUTPUT_WORK * 3


def test_tenants_that_wait_all_the_time_get_equal_work() -> None:
    shares = FairShares()
    queue = WaitingQueue(shares)
    for tenant in "AB":
        for number in range(30):
            one = request(f"{tenant}{number:02}", tenant)
            shares.entered(one)
            queue.push(one)
    served = Counter[str]()
    for _ in range(30):
        head = queue.head("a")
        assert head is not None
        queue.remove(head[1].id)
        shares.dispatched(head[1], 10.0)
        served[head[1].tenant] += 1
    assert abs(served["A"] - 15) <= 1


def test_counters_of_absent_tenants_are_dropped() -> None:
    shares = FairShares()
    for number in range(1000):
        one = request(f"r{number}", f"tenant {number}")
        shares.entered(one)
        shares.ended(one.id)
    assert len(shares._served) <= 1


def test_a_late_request_goes_behind_those_that_can_be_in_time() -> None:
    queue = WaitingQueue()
    for name, at in (("old", 0.0), ("new", 1.5)):
        queue.push(request(name, "", at))
    queue.age(1.2)
    assert [one.id for one in queue] == ["new", "old"]
    head = queue.head("a")
    assert head is not None
    assert head[1].id == "new"
    assert queue.late("old")
    assert queue.remove("old") is not None
    assert queue.remove("new") is not None
    assert not queue


def test_displaced_requests_stay_in_front_however_late() -> None:
    queue = WaitingQueue()
    queue.push(request("moved", "A"), displaced=True)
    queue.push(request("new", "B", 9.5))
    queue.age(10.0)
    assert [one.id for one in queue] == ["moved", "new"]


def test_a_full_queue_refuses_the_tenant_with_most() -> None:
    queue = WaitingQueue()
    for number in range(5):
        queue.push(request(f"a{number}", "A", number))
    newcomer = request("b0", "B", 9.0)
    queue.push(newcomer)
    assert queue.excess(newcomer).id == "a4"


# ---- the controller -----------------------------------------------------------------------------


def flood(world: ClusterTestWorld, tenant: str, count: int, at: float = 1.0) -> None:
    for number in range(count):
        world.arrive(request(f"{tenant}{number:03}", tenant, at, ttft_s=1000.0))


def test_a_flood_of_one_tenant_does_not_delay_another() -> None:
    world = ClusterTestWorld(0, [slice_(max_batch=4)], AdmissionSettings(patience=0.0))
    world.add(spec("a"))
    flood(world, "A", 300)
    for number in range(20):
        world.arrive(request(f"B{number:02}", "B", 2.0 + number, ttft_s=1000.0))
    world.run()
    waits = [
        (live.first_dispatch_s or 0.0) - live.request.arrival_s
        for live in world.jobs.values()
        if live.request.tenant == "B"
    ]
    assert max(waits) <= 0.05, "a place of its share is free at once"
    assert all(live.ended == "finished" for live in world.jobs.values()), "no tenant starves"


def test_tenants_that_flood_are_served_in_turn() -> None:
    world = ClusterTestWorld(1, [slice_(max_batch=2)], AdmissionSettings(patience=0.0))
    world.add(spec("a"))
    flood(world, "A", 200)
    flood(world, "B", 60, at=1.01)
    world.run()
    ends = sorted((live.end_s, live.request.tenant) for live in world.jobs.values())
    first = Counter(tenant for _, tenant in ends[:100])
    assert 40 <= first["B"] <= 60


def test_events_of_requests_that_are_gone_do_not_matter() -> None:
    world = ClusterTestWorld(0, [slice_()])
    world.add(spec("a"))
    world.arrive(request("r", "A", 1.0))
    world.run(5.0)
    world.policy.apply(Finished("r", 4))
    world.policy.apply(Arrived(request("s", "A", 6.0)))
    world.policy.decide(6.0)
    assert world.policy._shares.tenants == 1


def test_a_model_is_shut_out_as_long_as_requests_wait_for_it() -> None:
    queue = WaitingQueue()
    queue.push(request("one", "A", 0.0))
    model = request("one", "A").model
    queue.shut_out(model, 80)
    assert queue.owed_bytes("another") == 80
    assert queue.owed_bytes(model) == 0, "a model leaves no room for itself"
    assert [moved.id for moved in queue.age(1e6)] == ["one"]
    assert queue.owed_bytes("another") == 80, "it is late, and waits on"
    queue.remove("one")
    queue.push(request("two", "A", 0.0))
    assert queue.owed_bytes("another") == 0, "of this one nothing is known yet"
