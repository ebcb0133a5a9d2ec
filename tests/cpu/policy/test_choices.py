"""Choices of one request are let in, served or refused together; and a tenant with less
than its share is never refused because of others."""

from collections import defaultdict
from dataclasses import replace
from random import Random

from cluster_cases import request, slice_, spec
from cluster_world import ClusterTestWorld, Live
from controller_hand import Hand, dispatched, rejects
from hypothesis import given, settings
from hypothesis import strategies as st

from c2cserve.core.actions import ClusterAction
from c2cserve.core.events import Arrived, Cancelled, Finished, FirstToken
from c2cserve.core.request import Request
from c2cserve.policy.cluster.admission import AdmissionSettings
from c2cserve.policy.cluster.fairness import within_share

_SERVICE_S = 0.05
_PLACES = 8


def choices(
    name: str, count: int, at: float = 0.0, ttft_s: float = 0.5, tenant: str = ""
) -> list[Request]:
    return [
        replace(
            request(f"{name}.{number:04}", at=at, ttft_s=ttft_s), group=name, tenant=tenant
        )
        for number in range(count)
    ]  # fmt: skip


def ask(hand: Hand, *asked: Request) -> list[ClusterAction]:
    return hand.tell(*(Arrived(one) for one in asked))


def world(limits: AdmissionSettings | None = None) -> ClusterTestWorld:
    made = ClusterTestWorld(7, [slice_(max_batch=_PLACES // 2)], limits, service_s=_SERVICE_S)
    made.add(spec("a"))
    return made


def by_group(made: ClusterTestWorld) -> dict[str, list[Live]]:
    found = defaultdict[str, list[Live]](list)
    for live in made.jobs.values():
        found[live.request.group].append(live)
    return found


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 60), st.floats(0.0, 3.0), st.sampled_from("AB")), max_size=10
    ),
    st.sampled_from([0.0, 1.0, 20.0]),
    st.sampled_from([16, 1024]),
)
def test_all_choices_are_served_or_all_are_refused_before_any_begins(
    asked: list[tuple[int, float, str]], patience: float, max_waiting: int
) -> None:
    made = world(AdmissionSettings(patience=patience, max_waiting=max_waiting))
    for number, (count, at, tenant) in enumerate(asked):
        for one in choices(f"r{number}", count, 1.0 + at, tenant=tenant):
            made.arrive(one)
    made.run()
    for name, lives in by_group(made).items():
        assert len({live.ended for live in lives}) == 1, name
        if lives[0].ended == "rejected":
            assert all(live.first_dispatch_s is None for live in lives), name
            assert len({live.end_s for live in lives}) == 1, "in one tick"


def test_a_request_that_never_fits_at_once_is_served_in_turns() -> None:
    for limits in (None, AdmissionSettings(patience=1.0), AdmissionSettings(max_waiting=10)):
        made = world(limits)
        for one in choices("r", 300, 1.0):
            made.arrive(one)
        made.run()
        assert {live.ended for live in made.jobs.values()} == {"finished"}, limits


def test_requests_of_many_choices_without_a_pause_are_served_one_after_the_other() -> None:
    """Three loops of one key. Each asks again when it has an answer, or some time after a
    refusal."""
    made, random = world(), Random(1)
    due, busy, asked, answered, at = [1.0, 1.0, 1.0], list[str](), 0, 0, 1.0
    while at < 7.0:
        for _ in [one for one in due if one <= at]:
            asked += 1
            busy.append(f"t{asked}")
            for one in choices(busy[-1], 40, at):
                made.arrive(one)
        due = [one for one in due if one > at]
        at += 0.05
        made.run(until=at)
        groups = by_group(made)
        for name in busy[:]:
            if all(live.ended for live in groups[name]):
                busy.remove(name)
                served = groups[name][0].ended == "finished"
                answered += served
                due.append(at if served else at + random.uniform(1.0, 2.0))
    could = 6.0 * (_PLACES // 2 + 1) / _SERVICE_S / 40
    assert answered >= 0.6 * could


def test_choices_of_a_begun_request_come_before_others_of_their_tenant() -> None:
    hand = Hand(slice_(max_batch=2))
    assert len(dispatched(ask(hand, *choices("many", 4)))) == 2
    hand.arrive("other", ttft_s=0.1)
    hand.now = 0.6
    assert list(dispatched(hand.tell(Finished("many.0000", 1)))) == ["many.0002"]
    assert list(dispatched(hand.tell(Finished("many.0001", 1)))) == ["many.0003"]
    assert list(dispatched(hand.tell(Finished("many.0002", 1)))) == ["other"]


def test_in_an_overload_a_request_is_refused_with_all_choices_at_once() -> None:
    made = world()
    for number in range(3000):
        made.arrive(request(f"s{number:04}", at=1.0 + number / 600, ttft_s=0.5))
    for number in range(40):
        for one in choices(f"m{number}", 5, 2.0 + number / 20):
            made.arrive(one)
    made.run()
    lives = [lives for name, lives in by_group(made).items() if name]
    refused = [each for each in lives if each[0].ended == "rejected"]
    assert len(refused) > 10
    for each in refused:
        assert {live.ended for live in each} == {"rejected"}
        assert len({live.end_s for live in each}) == 1


def test_choices_that_begin_in_their_turns_do_not_shorten_the_queue() -> None:
    """Their first tokens come late because there are so many, not because others were let in."""
    made = world()
    for one in choices("many", 200, 1.0):
        made.arrive(one)
    for number in range(50):
        made.arrive(replace(request(f"s{number}", at=5.0 + number / 10, ttft_s=0.5), tenant="B"))
    made.run()
    assert {live.ended for live in made.jobs.values()} == {"finished"}


def test_a_newcomer_is_not_behind_choices_that_have_not_run() -> None:
    made = world()
    for name, at in (("A", 1.0), ("B", 1.1)):
        for one in choices(name, 60, at, ttft_s=20.0, tenant=name):
            made.arrive(one)
    made.run()
    ends = {name: [one.end_s for one in lives] for name, lives in by_group(made).items()}
    halfway_s = sorted(ends["A"] + ends["B"])[70]
    assert sum(end_s <= halfway_s for end_s in ends["B"]) >= 20


def test_a_choice_that_its_client_gives_up_leaves_the_others() -> None:
    hand = Hand(slice_(max_batch=2))
    ask(hand, *choices("many", 4))
    actions = hand.tell(
        FirstToken("many.0000", 0.1), Cancelled("many.0001"), Cancelled("many.0002")
    )
    assert list(dispatched(actions)) == ["many.0003"]
    hand.now = 60.0
    assert not rejects(hand.tell())


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 30), st.floats(0.0, 1.0)), min_size=3, max_size=8),
    st.lists(st.floats(0.0, 0.2), min_size=3, max_size=10),
    st.integers(1, 2),
)
def test_a_tenant_below_its_share_is_never_refused(
    flood: list[tuple[int, float]], gaps_s: list[float], width: int
) -> None:
    """Whatever another tenant asks for. This one has less than half of the requests under way, and
    of the places."""
    made = world()
    for number, (count, at) in enumerate(flood):
        for one in choices(f"f{number}", count, 1.0 + at, tenant="A"):
            made.arrive(one)
    at = 1.2
    mine: list[str] = []
    for number, gap_s in enumerate(gaps_s):
        made.run(until=at)
        present = [one for one in made.jobs.values() if not one.ended]
        own = sum(one.request.tenant == "B" for one in present)
        if within_share(own + width, len(present) + width, 2, _PLACES):
            for more in range(width):
                name = f"m{number}.{more}"
                made.arrive(replace(request(name, at=at, ttft_s=0.5), tenant="B"))
                mine.append(name)
        at = max(at + gap_s, made.now) + 1e-6
    made.run()
    ends = {name: made.jobs[name].ended for name in mine}
    assert set(ends.values()) <= {"finished"}, ends
