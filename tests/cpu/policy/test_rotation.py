"""Rotation serves those who lag behind most, and never hands out room that is not there."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from c2cserve.core.request import Slo
from c2cserve.policy.slice.rotation import (
    PACED,
    EagerCopies,
    KvClaim,
    KvState,
    Rotation,
    RotationSettings,
    lag_s,
    rotate,
    step_transfer,
)

SLO = Slo(5.0, 0.1)
PLAIN = RotationSettings(transfer_bytes=100)
RUNNING, WAITING, PAUSED = KvState.RUNNING, KvState.WAITING, KvState.PAUSED


def tenant(name: str, state: KvState, size: int, since_s: float) -> KvClaim:
    return KvClaim(name, state, size, since_s, SLO)


populations = st.lists(
    st.tuples(st.sampled_from(KvState), st.integers(1, 40), st.integers(0, 20)), max_size=20
).map(lambda drawn: [tenant(f"r{i:02}", *one) for i, one in enumerate(drawn)])
tunings = st.builds(
    RotationSettings, st.floats(0, 10), st.floats(-2, 2), st.floats(-2, 2), st.integers(0, 200)
)


def test_the_three_cases_of_virtual_lag_time() -> None:
    config = RotationSettings(alpha=3.0, beta_b=0.5, beta_f=0.5)
    assert lag_s(tenant("a", RUNNING, 1, 4.0), config, 10.0) == -6.0
    assert lag_s(tenant("a", WAITING, 1, 9.0), config, 10.0) == 0.0
    assert lag_s(tenant("a", WAITING, 1, 4.0), config, 10.0) == pytest.approx(6.0 - 2.5)
    assert lag_s(tenant("a", PAUSED, 1, 9.0), config, 10.0) == pytest.approx(3 * (1 - 0.05))
    assert lag_s(tenant("a", PAUSED, 1, 9.96), config, 10.0) == 0.0


@given(populations, st.integers(0, 100), tunings)
def test_whoever_is_prioritized_has_room(
    everybody: list[KvClaim], free: int, config: RotationSettings
) -> None:
    by_id = {one.id: one for one in everybody}
    rotation = rotate(everybody, free, config, 20.0)
    assert len(set(rotation.preempted)) == len(rotation.preempted)
    assert len(set(rotation.prioritized)) == len(rotation.prioritized)
    leaving = [by_id[name] for name in rotation.preempted]
    coming = [by_id[name] for name in rotation.prioritized]
    assert all(one.state is RUNNING for one in leaving)
    assert all(one.state is not RUNNING for one in coming)
    needed = sum(one.kv_bytes for one in coming)
    assert needed <= free + sum(one.kv_bytes for one in leaving)
    assert needed <= free + config.transfer_bytes or not leaving
    # Nobody is preempted in vain: without the last of them there would not be enough.
    assert not leaving or needed > free + sum(one.kv_bytes for one in leaving[:-1])


@given(populations, st.integers(0, 100), tunings)
def test_largest_lag_first_and_longest_run_leaves(
    everybody: list[KvClaim], free: int, config: RotationSettings
) -> None:
    by_id = {one.id: one for one in everybody}
    rotation = rotate(everybody, free, config, 20.0)
    if sum(one.kv_bytes for one in everybody if one.state is not RUNNING) <= free:
        assert not rotation.preempted
        assert len(rotation.prioritized) == sum(one.state is not RUNNING for one in everybody)
        arrivals = [by_id[name].since_s for name in rotation.prioritized]
        assert arrivals == sorted(arrivals), "no contention: first come, first served"
        return
    lags = [lag_s(by_id[name], config, 20.0) for name in rotation.prioritized]
    assert lags == sorted(lags, reverse=True)
    runs = [by_id[name].since_s for name in rotation.preempted]
    assert runs == sorted(runs)
    stayed = [o for o in everybody if o.state is RUNNING and o.id not in rotation.preempted]
    assert all(since <= one.since_s for since in runs for one in stayed)
    assert rotate(reversed(everybody), free, config, 20.0) == rotation


def test_without_a_transfer_budget_only_free_room_is_given() -> None:
    everybody = [tenant("a", RUNNING, 50, 0.0), tenant("b", WAITING, 30, 1.0)]
    no_moves = RotationSettings(transfer_bytes=0)
    assert rotate(everybody, 20, no_moves, 20.0) == Rotation((), ())
    assert rotate(everybody, 20, PLAIN, 20.0) == Rotation(("a",), ("b",))


def test_alpha_weighs_paused_requests_against_new_ones() -> None:
    everybody = [
        tenant("old", RUNNING, 10, 0.0),
        tenant("new", WAITING, 10, 12.0),
        tenant("paused", PAUSED, 10, 17.0),
    ]
    assert rotate(everybody, 0, RotationSettings(1.0, 0, 0, 10), 20.0).prioritized == ("new",)
    assert rotate(everybody, 0, RotationSettings(3.0, 0, 0, 10), 20.0).prioritized == ("paused",)


def test_four_requests_take_turns_in_room_for_two() -> None:
    """Figure 9: nobody waits for ever, and nobody runs for ever."""
    config = RotationSettings(alpha=1.0, beta_b=0.0, beta_f=0.0, transfer_bytes=10)
    states = {name: tenant(name, WAITING, 10, 0.0) for name in "abcd"}
    ran = dict.fromkeys("abcd", 0)
    for tick in range(1, 41):
        now = float(tick)
        holding = sum(one.kv_bytes for one in states.values() if one.state is RUNNING)
        rotation = rotate(states.values(), 20 - holding, config, now)
        for name in rotation.preempted:
            states[name] = tenant(name, PAUSED, 10, now)
        for name in rotation.prioritized:
            states[name] = tenant(name, RUNNING, 10, now)
        for name, one in states.items():
            ran[name] += one.state is RUNNING
    assert sum(ran.values()) == 80
    assert max(ran.values()) - min(ran.values()) <= 2


# ---- eager copies -------------------------------------------------------------------------------

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["grow", "start", "share", "moved", "out", "in", "forget"]),
        st.sampled_from("ab"), st.integers(0, 6),
    ),
    max_size=80,
)  # fmt: skip


@given(STEPS, st.integers(0, 30))
def test_copies_are_a_prefix_within_host_memory(
    steps: list[tuple[str, str, int]], room: int
) -> None:
    copies = EagerCopies(room * 8)
    tokens, away, moving = dict.fromkeys("ab", 0), dict.fromkeys("ab", False), dict[str, int]()
    for what, name, count in steps:
        held = -(-tokens[name] // 4)
        if what == "grow" and not away[name]:
            tokens[name] += count
            copies.filled(name, tokens[name] // 4)
        elif what == "start" and not away[name]:
            first, moved = copies.start(name, 8, count)
            assert moved <= count
            assert moved == 0 or first + moved <= tokens[name] // 4, "a dirty block is copied"
            assert not (moved and name in moving)
            if moved:
                moving[name] = moved
        elif what == "share" and not away[name] and not copies.has_own(name):
            found = min(copies.shared(name) + count, tokens[name] // 4)
            copies.share(name, found)
            assert copies.synced(name) == copies.shared(name) == found
        elif what == "out" and not away[name] and held:
            dirty = copies.rotate_out(name, held, 8)
            if dirty is not None:
                assert dirty == (copies.synced(name), held - copies.synced(name))
                away[name], moving[name] = True, dirty[1]
        elif what == "moved":
            copies.moved(name)
            moving.pop(name, None)
        elif what == "in" and away[name] and name not in moving:
            assert copies.synced(name) == held
            copies.resumed(name, 8)
            assert copies.synced(name) == tokens[name] // 4
            away[name] = False
        elif what == "forget":
            copies.forget(name, 8)
            tokens[name], away[name] = 0, False
            moving.pop(name, None)
        own = {n: copies.synced(n) - copies.shared(n) + moving.get(n, 0) for n in "ab"}
        assert all(copies.has_own(n) == (own[n] > 0) for n in "ab")
        used = sum(own.values()) * 8
        assert copies.used_bytes == used <= room * 8


def test_a_request_that_was_copied_eagerly_moves_its_tail_only() -> None:
    copies = EagerCopies(1000)
    copies.filled("r", 9)
    assert copies.start("r", 8, 100) == (0, 9)
    assert copies.start("r", 8, 100) == (0, 0), "one move at a time"
    copies.moved("r")
    assert copies.rotate_out("r", 10, 8) == (9, 1)


def test_a_full_host_memory_keeps_requests_where_they_are() -> None:
    copies = EagerCopies(80)
    copies.filled("r", 9)
    assert copies.rotate_out("r", 11, 8) is None
    assert copies.rotate_out("r", 10, 8) == (0, 10)


def paced(name: str, state: KvState, size: int, due_s: float) -> KvClaim:
    return KvClaim(name, state, size, 0.0, SLO, due_s)


def test_at_its_pace_a_request_lags_from_when_its_next_token_is_due() -> None:
    assert lag_s(paced("a", RUNNING, 1, 12.0), PACED, 10.0) == -2.0
    assert lag_s(paced("a", RUNNING, 1, 8.0), PACED, 10.0) == 0.0, "it does not leave late"
    assert lag_s(paced("a", PAUSED, 1, 12.0), PACED, 10.0) == pytest.approx(-6.0)
    assert lag_s(paced("a", PAUSED, 1, 9.0), PACED, 10.0) == pytest.approx(3.0)


def test_at_their_pace_requests_leave_only_for_one_that_is_due() -> None:
    running = [paced("far", RUNNING, 10, 20.0), paced("near", RUNNING, 10, 11.0)]
    ahead, due = paced("out", PAUSED, 10, 12.0), paced("out", PAUSED, 10, 9.0)
    assert rotate([*running, ahead], 0, PACED, 10.0) == Rotation((), ())
    assert rotate([*running, due], 0, PACED, 10.0) == Rotation(("far",), ("out",))
    small = paced("small", PAUSED, 4, 12.0)
    assert rotate([*running, ahead, small], 5, PACED, 10.0).prioritized == ("small",), "it fits"


def test_an_iteration_moves_what_the_link_carries_in_a_step() -> None:
    late, later = paced("late", PAUSED, 40, 9.0), paced("later", PAUSED, 70, 8.0)
    claims = [late, later, paced("runs", RUNNING, 200, 20.0)]
    assert step_transfer(claims, PACED, 100, 0, 10.0) == 100
    assert step_transfer(claims, PACED, 50, 0, 10.0) == 70, "the one that lags most may come in"
    assert step_transfer(claims, PACED, 100, 30, 10.0) == 70
    assert step_transfer(claims, PACED, 100, 130, 10.0) == 0
    assert step_transfer(claims, RotationSettings(transfer_bytes=80), 100, 0, 10.0) == 80
