"""The scheduler on simulated links: every byte arrives, in whatever order links work and fail."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated_links import Simulation, Stall

from c2cserve.transfer.engine import LinkCounts, Ticket, TransferError
from c2cserve.transfer.moves import HOST, Port, Segment, pack, ports_of
from c2cserve.transfer.settings import Settings, Urgency

GPUS = 3
TASK = 8
EQUAL = Settings(
    task_bytes=TASK, task_bytes_most=TASK, alone_bytes=TASK, peer_bytes=TASK, depth=2,
    one_path_bytes=0, stall_s=1e9,
)  # fmt: skip
"""Micro-tasks of one size."""
FAST = replace(EQUAL, task_bytes_most=8 * TASK, alone_bytes=8 * TASK, peer_bytes=8 * TASK)


def inward(size: int, gpu: int = 0, at: int = 0) -> Segment:
    return Segment(at, at, size, gpu, HOST)


def outward(size: int, gpu: int = 0, at: int = 0) -> Segment:
    return Segment(at, at, size, HOST, gpu)


def ended_s(simulation: Simulation, transfer: Ticket) -> float:
    return dict(simulation.ended)[transfer]


def counts(simulation: Simulation, port: Port) -> LinkCounts:
    return simulation.engine.counts()[port.name]


# ---- segments and ports -------------------------------------------------------------------------


def test_segments_are_packed_in_order() -> None:
    segments = [inward(5), outward(7, 2, 100)]
    assert list(pack(segments)) == [0, 0, 5, 0, HOST, 100, 100, 7, HOST, 2]


@pytest.mark.parametrize(
    "wrong",
    [{"depth": 0}, {"task_bytes": 0}, {"alone_bytes": 0}, {"task_bytes_most": 1}, {"poll_s": 0.0}],
    ids=str,
)
def test_settings_that_cannot_be_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"1 byte|smallest|sleeps"):
        Settings(**wrong)


def test_ports_and_what_they_relay_for() -> None:
    ports, relays = ports_of([0, 3], [(0, 3)])
    names = [port.name for port in ports]
    assert names == ["in0", "out0", "peer0to0", "peer0to3", "in3", "out3", "peer3to3"]
    assert [(names[link], names[port]) for link, port in relays] == [
        ("in0", "in3"), ("out0", "out3"),
    ]  # fmt: skip
    assert [ports[3].carrier, ports[4].carrier] == [0, 3]


# ---- paths --------------------------------------------------------------------------------------


@pytest.mark.parametrize("gpus", [1, 2, 4])
def test_one_transfer_has_the_links_of_all_gpus(gpus: int) -> None:
    simulation = Simulation(gpus, EQUAL)
    size = 100 * gpus * TASK
    transfer = simulation.submit([inward(size)])
    simulation.run()
    alone_s = size / 1.0
    assert ended_s(simulation, transfer) <= alone_s / gpus + 2 * TASK
    assert set(simulation.written[0][:size]) == {1}
    direct = counts(simulation, Port(0, "in"))
    assert direct.relayed_bytes == 0
    assert direct.direct_bytes >= size / gpus - 2 * TASK


@given(st.lists(st.floats(0.2, 5.0), min_size=GPUS, max_size=GPUS), st.sampled_from(["in", "out"]))
def test_throughput_is_the_sum_of_links(rates: list[float], direction: str) -> None:
    """Within what the slowest link still has outstanding when the queue is empty."""
    slack_s = (EQUAL.depth + 1) * TASK / min(rates)
    took_s = seconds_of(EQUAL, rates, direction)
    assert took_s <= 400 * TASK / sum(rates) + slack_s


@given(st.lists(st.floats(1.0, 2.0), min_size=GPUS, max_size=GPUS))
def test_large_micro_tasks_leave_links_that_end_together(rates: list[float]) -> None:
    """They get smaller towards the end."""
    slack_s = (FAST.depth + 1) * TASK / min(rates)
    assert seconds_of(FAST, rates, "in") <= 400 * TASK / sum(rates) + slack_s


def seconds_of(settings: Settings, rates: list[float], direction: str) -> float:
    ports = [Port(gpu, "in" if direction == "in" else "out") for gpu in range(GPUS)]
    simulation = Simulation(GPUS, settings, dict(zip(ports, rates, strict=True)))
    transfer = simulation.submit([(inward if direction == "in" else outward)(400 * TASK)])
    simulation.run()
    return ended_s(simulation, transfer)


def test_both_directions_have_links_of_their_own() -> None:
    simulation = Simulation(2, EQUAL)
    size = 100 * TASK
    transfers = [simulation.submit([inward(size)]), simulation.submit([outward(size)])]
    simulation.run()
    assert all(ended_s(simulation, one) <= size / 2 + 2 * TASK for one in transfers)


def test_a_link_relays_only_when_its_own_queue_is_empty() -> None:
    simulation = Simulation(2, EQUAL)
    size = 100 * TASK
    for gpu in range(2):
        simulation.submit([inward(size, gpu)])
    simulation.run()
    for gpu in range(2):
        carried = counts(simulation, Port(gpu, "in"))
        assert carried.direct_bytes >= size - 2 * TASK
        assert carried.relayed_bytes <= 2 * TASK, "pulled before its own queue had any"


def test_idle_links_relay_for_the_longest_queue() -> None:
    simulation = Simulation(3, EQUAL)
    simulation.submit([inward(10 * TASK, 0)])
    simulation.submit([inward(90 * TASK, 1)])
    simulation.run(until_s=5 * TASK)
    [first, *_] = simulation.engine.outstanding(Port(2, "in"))
    assert first.port == Port(1, "in")


def test_longest_first_ends_together() -> None:
    """A GPU helps another one before it does its own short transfer."""
    settings = replace(EQUAL, order="longest")
    simulation = Simulation(2, settings)
    short, long = (simulation.submit([inward(n * TASK, g)]) for g, n in ((0, 20), (1, 80)))
    simulation.run()
    assert abs(ended_s(simulation, short) - ended_s(simulation, long)) <= 4 * TASK
    assert counts(simulation, Port(0, "in")).relayed_bytes >= 25 * TASK


def test_peers_have_one_path() -> None:
    simulation = Simulation(3, EQUAL)
    transfer = simulation.submit([Segment(0, 0, 50 * TASK, 0, 1)])
    simulation.run()
    assert simulation.state(transfer) == "done"
    assert counts(simulation, Port(0, "peer", 1)).direct_bytes == 50 * TASK


# ---- urgency ------------------------------------------------------------------------------------


def test_the_most_urgent_class_goes_first() -> None:
    simulation = Simulation(1, EQUAL)
    tickets = [
        simulation.submit([inward(10 * TASK, at=100 * at)], urgency=urgency)
        for at, urgency in enumerate(reversed(Urgency))
    ]
    simulation.run()
    ends = [ended_s(simulation, one) for one in tickets]
    assert ends == sorted(ends, reverse=True)
    assert ends[-1] <= (10 + EQUAL.depth) * TASK


def test_a_link_carries_its_own_bytes_before_more_urgent_ones_of_others() -> None:
    simulation = Simulation(2, EQUAL)
    own = simulation.submit([inward(40 * TASK, 1)], urgency=Urgency.KV)
    simulation.submit([inward(40 * TASK)], urgency=Urgency.TOKEN)
    simulation.run()
    assert ended_s(simulation, own) <= 40 * TASK + 1e-9


def test_relays_make_way_for_what_is_a_links_own() -> None:
    """They are recalled, and sent again. The link rests before it relays again."""
    settings = replace(EQUAL, rest_s=20.0)
    simulation = Simulation(2, settings)
    size = 100 * TASK
    relayed = simulation.submit([inward(size)])
    simulation.run(until_s=4.5 * TASK)
    port = Port(1, "in")
    assert [one.relayed for one in simulation.engine.outstanding(port)] == [True] * 2
    own = simulation.submit([inward(10 * TASK, 1)])
    simulation.run(until_s=5 * TASK)
    taken = simulation.engine.outstanding(port)
    assert not any(one.relayed and not one.recalled for one in taken)
    before = counts(simulation, port).relayed_bytes
    simulation.run(until_s=14.5 * TASK + 19.0)
    assert ended_s(simulation, own) <= 14.5 * TASK + 1e-9, "as fast as on an idle link"
    assert counts(simulation, port).relayed_bytes == before
    simulation.run()
    assert counts(simulation, port).relayed_bytes > before
    assert counts(simulation, port).resent == 2
    assert counts(simulation, port).stalls == 0
    assert simulation.state(relayed) == "done"
    assert set(simulation.written[0][:size]) == {1}


def test_transfers_of_a_class_are_carried_in_order() -> None:
    simulation = Simulation(1, EQUAL)
    first, second = (simulation.submit([inward(10 * TASK, at=100 * at)]) for at in range(2))
    simulation.run()
    assert ended_s(simulation, first) <= 10 * TASK + 1e-9
    assert simulation.engine.moved_bytes(second) == 10 * TASK


# ---- background ---------------------------------------------------------------------------------


def test_background_waits_for_all_else() -> None:
    simulation = Simulation(2, EQUAL)
    behind = simulation.submit([inward(20 * TASK)], urgency=Urgency.LENDING)
    before = simulation.submit([inward(20 * TASK, at=2000)])
    simulation.run()
    assert ended_s(simulation, before) <= 10 * TASK + 3 * TASK
    assert ended_s(simulation, behind) > ended_s(simulation, before)


def test_background_takes_one_micro_task_at_a_time() -> None:
    simulation = Simulation(1, EQUAL)
    simulation.submit([inward(20 * TASK)], urgency=Urgency.LENDING)
    for _ in range(20):
        assert len(simulation.engine.outstanding(Port(0, "in"))) <= 1
        simulation.run(until_s=simulation.now + TASK / 2)


def test_background_makes_way_for_traffic_that_is_not_ours() -> None:
    simulation = Simulation(1, EQUAL)
    port = Port(0, "in")
    transfer = simulation.submit([inward(100 * TASK)], urgency=Urgency.LENDING)
    simulation.run(until_s=TASK * 10.5)
    simulation.rates = {port: 0.25}
    simulation.run(until_s=TASK * 200)
    carried = counts(simulation, port).tasks - 10
    assert 15 <= carried <= 30, "half of the link's turns, each of four times the length"
    simulation.rates = {}
    simulation.run()
    assert simulation.state(transfer) == "done"


# ---- faults -------------------------------------------------------------------------------------


def test_a_dead_relay_costs_only_time() -> None:
    size = 200 * TASK
    stalls = {Port(1, "in"): [Stall(30.0)]}
    settings = replace(EQUAL, stall_s=4 * TASK, pause_s=1e9)
    simulation = Simulation(2, settings, stalls=stalls)
    transfer = simulation.submit([inward(size)])
    simulation.run()
    assert simulation.state(transfer) == "done"
    assert min(simulation.written[0][:size]) == 1
    # All but what was carried before and is sent again takes the direct path.
    assert ended_s(simulation, transfer) <= size - 30.0 + 8 * TASK
    assert counts(simulation, Port(1, "in")).resent == 2


def test_a_relay_with_an_error_never_relays_again_but_has_its_own_transfers() -> None:
    stalls = {Port(1, "in"): [Stall(0.0, 1.0, error=True)]}
    simulation = Simulation(2, EQUAL, stalls=stalls)
    transfer = simulation.submit([inward(50 * TASK)])
    other = simulation.submit([inward(5 * TASK, 1)])
    simulation.run()
    assert (simulation.state(transfer), simulation.state(other)) == ("done", "done")
    carried = counts(simulation, Port(1, "in"))
    assert (carried.errors, carried.relayed_bytes, carried.direct_bytes) == (1, 0, 5 * TASK)


@pytest.mark.parametrize("begun", [False, True])
def test_stuck_relays_take_no_slot_of_the_direct_path(begun: bool) -> None:
    """Nor do those that have begun, and are not over though they were recalled."""
    settings = replace(EQUAL, stall_s=4 * TASK)
    simulation = Simulation(2, settings, stalls={Port(1, "in"): [Stall(0.0)]})
    simulation.begun_for_ever = begun
    simulation.submit([inward(20 * TASK)])
    simulation.run(until_s=10 * TASK)
    other = simulation.submit([inward(20 * TASK, 1)])
    simulation.run()
    assert simulation.state(other) == "done"
    assert counts(simulation, Port(1, "in")).direct_bytes >= 10 * TASK


def test_a_stalled_relay_is_tried_again_later_and_later() -> None:
    settings = replace(EQUAL, stall_s=2 * TASK, pause_s=4 * TASK)
    stalls = {Port(1, "in"): [Stall(0.0, 30 * TASK)]}
    simulation = Simulation(2, settings, stalls=stalls)
    transfer = simulation.submit([inward(300 * TASK)])
    simulation.run()
    carried = counts(simulation, Port(1, "in"))
    assert simulation.state(transfer) == "done"
    assert carried.relayed_bytes > 80 * TASK
    assert 1 <= carried.stalls <= 6


def test_the_direct_path_fails_the_transfer() -> None:
    simulation = Simulation(1, EQUAL)
    transfer = simulation.submit([inward(50 * TASK)])
    simulation.break_link(Port(0, "in"))
    simulation.run()
    with pytest.raises(TransferError, match="broken"):
        simulation.engine.poll(transfer)
    assert not simulation.engine.outstanding(Port(0, "in"))


def test_cancelled_transfers_leave_the_links() -> None:
    simulation = Simulation(2, EQUAL)
    gone = simulation.submit([inward(100 * TASK)])
    simulation.run(until_s=10 * TASK)
    simulation.cancel(gone)
    assert simulation.state(gone) == "moving", "what is under way has to end"
    stays = simulation.submit([inward(10 * TASK, 1)])
    simulation.run()
    assert (simulation.state(gone), simulation.state(stays)) == ("cancelled", "done")
    assert ended_s(simulation, gone) <= 12 * TASK + 1e-9
    simulation.cancel(stays)
    assert simulation.state(stays) == "done"


# ---- all of it together -------------------------------------------------------------------------

Action = tuple[float, str, Segment, Urgency]
SIZES = st.integers(0, 12 * TASK)


@st.composite
def actions(draw: st.DrawFn) -> list[Action]:
    """(pause before, whether a transfer is cancelled some time later, segment, urgency)"""
    found: list[Action] = []
    at = 0
    for _ in range(draw(st.integers(1, 8))):
        size, gpu = draw(SIZES), draw(st.integers(0, GPUS - 1))
        other = (gpu + draw(st.integers(1, GPUS - 1))) % GPUS
        kind = draw(st.sampled_from(["in", "out", "peer"]))
        ends = {"in": (gpu, HOST), "out": (HOST, gpu), "peer": (gpu, other)}[kind]
        segment = Segment(at, at, size, *ends)
        at += size
        pause_s = draw(st.floats(0, 4 * TASK))
        then = draw(st.sampled_from(["stays", "stays", "cancelled"]))
        found.append((pause_s, then, segment, draw(st.sampled_from(Urgency))))
    return found


@st.composite
def stalls(draw: st.DrawFn) -> dict[Port, Sequence[Stall]]:
    found: dict[Port, Sequence[Stall]] = {}
    for port in ports_of(range(GPUS), permutations(range(GPUS), 2))[0]:
        start_s = draw(st.floats(0, 10 * TASK))
        length_s = draw(st.sampled_from([1.0, 3 * TASK, 30 * TASK, math.inf]))
        error = draw(st.booleans())
        if draw(st.booleans()):
            found[port] = [Stall(start_s, start_s + length_s, error)]
    return found


@given(
    actions(), stalls(), st.integers(1, 3), st.sampled_from(["direct", "longest"]),
    st.lists(st.floats(0.2, 4.0), min_size=GPUS, max_size=GPUS),
)  # fmt: skip
def test_all_bytes_arrive_whatever_fails(
    todo: list[Action], faults: dict[Port, Sequence[Stall]], depth: int, order: str,
    rates: list[float],
) -> None:  # fmt: skip
    settings = replace(
        FAST, depth=depth, stall_s=4 * TASK, pause_s=2 * TASK,
        order="direct" if order == "direct" else "longest",
    )  # fmt: skip
    speeds = {
        port: rates[port.gpu] for port in ports_of(range(GPUS), permutations(range(GPUS), 2))[0]
    }
    simulation = Simulation(GPUS, settings, speeds, faults)
    submitted: list[tuple[Ticket, Segment, str]] = []
    for pause_s, then, segment, urgency in todo:
        simulation.run(until_s=simulation.now + pause_s)
        transfer = simulation.submit([segment], urgency=urgency)
        submitted.append((transfer, segment, then))
        if then == "cancelled":
            simulation.run(until_s=simulation.now + pause_s / 2)
            simulation.cancel(transfer)
    simulation.run()
    for transfer, segment, then in submitted:
        state = simulation.state(transfer)
        assert state == "done" or (state, then) == ("cancelled", "cancelled")
        if state == "done":
            written = simulation.written[segment.target_gpu]
            assert set(written[segment.target : segment.target + segment.size]) <= {1}
    assert simulation.late_writes == 0
    assert len(simulation.ended) == len(submitted)
    assert simulation.now < 1e4
