"""A front's loop breaks: nodes stay, and requests go on where they run."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from played_nodes import PlayedFront, PlayedNode, answer, counters, nodes_up

from c2cserve.core import fleet
from c2cserve.core.events import Arrived, FirstToken
from c2cserve.core.request import Delta, Job, Request, Slo
from c2cserve.policy.fleet.placement import FleetSettings
from c2cserve.policy.fleet.policy import FleetPolicy
from c2cserve.runtime.gateway import Refused
from c2cserve.runtime.record import Record
from c2cserve.runtime.replay import replay

Fault = Callable[[fleet.FleetEvent], bool]
"""Whether the policy cannot take the event."""


def nodes(count: int, **more: Any) -> list[PlayedNode]:
    return [PlayedNode(f"n{number}", **more) for number in range(count)]


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> list[Fault]:
    """What policies cannot take from now on."""
    found: list[Fault] = []
    apply = FleetPolicy.apply

    def faulty(policy: FleetPolicy, event: fleet.FleetEvent) -> None:
        if any(fault(event) for fault in found):
            raise RuntimeError("a defect")
        apply(policy, event)

    monkeypatch.setattr(FleetPolicy, "apply", faulty)
    return found


def break_now(front: PlayedFront, faults: list[Fault]) -> None:
    """Let the loop break at one event that means nothing to it."""
    faults.append(lambda event: event == FirstToken("nobody", 0.0))
    front.gateway.tick(FirstToken("nobody", 0.0))
    faults.clear()


async def begin(front: PlayedFront, *jobs: Job) -> list[asyncio.Task[list[int]]]:
    """Run the jobs. Return when each has tokens."""
    begun = [asyncio.Event() for _ in jobs]
    pairs = zip(jobs, begun, strict=True)
    runs = [asyncio.create_task(front.run(job, event)) for job, event in pairs]
    await asyncio.gather(*(one.wait() for one in begun))
    return runs


def is_about(job: Job) -> Fault:
    """The policy can be told of the request neither when it comes nor afterwards."""

    def fault(event: fleet.FleetEvent) -> bool:
        return isinstance(event, Arrived | fleet.Resumed) and event.request.id == job.request.id

    return fault


async def test_requests_go_on_where_they_run(
    faults: list[Fault], caplog: pytest.LogCaptureFixture
) -> None:
    async with PlayedFront(*nodes(3, step_s=0.005)) as front:
        jobs = [front.job() for _ in range(12)]
        runs = await begin(front, *jobs)
        break_now(front, faults)
        later = front.job()
        assert await front.run(later) == answer(later.tokens, 40)
        for job, run in zip(jobs, runs, strict=True):
            assert await run == answer(job.tokens, 40)
            assert len(front.on(job)) == 1, "it was not sent again"
        assert nodes_up(front) == 3
        assert "nodes_lost" not in counters(front)
        assert counters(front)["front_restarts"] == 1
        assert counters(front)["resumed_requests"] == 0
        assert not front.ended
        books = front.policies[-1]._nodes.values()
        assert not any(book.sent or book.queued_tokens for book in books), "they have ended there"
    assert len([one for one in caplog.records if one.exc_info]) == 1


async def test_a_fresh_loop_counts_what_runs_once(faults: list[Fault]) -> None:
    [node] = nodes(1, step_s=0.02)
    async with PlayedFront(node) as front:
        runs = await begin(front, *(front.job() for _ in range(4)))
        await front.until(lambda: front.policies[0]._nodes["n0.1"].reported == 4)
        break_now(front, faults)
        book = front.policies[1]._nodes["n0.1"]
        await front.until(lambda: book.reported == 4)
        assert book.load == 4
        await asyncio.gather(*runs)


async def test_a_conversation_returns_to_its_node_after_a_break() -> None:
    """By the request that runs there, and whose prompt it repeats."""
    policy = FleetPolicy()
    [front, others] = PlayedFront(), nodes(2)
    spec = next(iter(front.gateway._models.specs))
    slo = Slo(30.0, 1.0)
    for node in others:
        one = fleet.FleetNode(f"{node.name}.1", "cpu", 1, 1000)
        policy.apply(fleet.NodeUp(one))
        policy.apply(fleet.NodeReport(one.id, ("a", "b")))
    policy.apply(fleet.ModelAdded(spec))
    policy.decide(1.0)
    for node in others:
        hashes = (hash(node.name), 7)
        before = Request(f"{node.name}-0", "a", 64, 9, 0.0, slo, prefix_hashes=hashes)
        policy.apply(fleet.Resumed(before, f"{node.name}.1", True, 0))
        policy.apply(Arrived(Request(f"{node.name}-1", "a", 64, 9, 1.0, slo, prefix_hashes=hashes)))
        [sent] = policy.decide(2.0)
        assert isinstance(sent, fleet.SendTo)
        assert sent.node_id == f"{node.name}.1"
    front.gateway.abort("the test is over")


async def test_requests_that_wait_for_a_node_get_one_after_a_break(faults: list[Fault]) -> None:
    [node] = nodes(1)
    async with PlayedFront() as front:
        job = front.job()
        run = asyncio.create_task(front.run(job))
        await asyncio.sleep(0.01)
        break_now(front, faults)
        front.nodes.append(await node.start())
        front.gateway.members({node.name: node.address})
        assert await run == answer(job.tokens, 40)


async def test_a_request_that_breaks_the_loop_fails_alone(faults: list[Fault]) -> None:
    async with PlayedFront(*nodes(2, step_s=0.01)) as front:
        job = front.job(count=100)
        [run] = await begin(front, job)
        for number in range(1, 8):  # more often than other breaks end a front
            bad = front.job()
            faults.append(is_about(bad))
            [delta] = [one async for one in front.gateway.submit([bad])]
            assert "a defect" in (delta.error or "")
            assert counters(front)["front_request_failures"] == number
        assert await run == answer(job.tokens, 100)
        assert len(front.on(job)) == 1
        assert nodes_up(front) == 2
        assert not front.ended


async def test_a_running_request_that_breaks_the_loop_ends_on_its_node(
    faults: list[Fault],
) -> None:
    [node] = nodes(1, step_s=0.01)
    async with PlayedFront(node) as front:
        bad, good = front.job(count=10_000), front.job(count=50)
        deltas: list[Delta] = []

        async def collect() -> None:
            deltas.extend([one async for one in front.gateway.submit([bad])])

        run = asyncio.create_task(collect())
        [other] = await begin(front, good)
        await front.until(lambda: len(node.engine.running) == 2)
        faults.append(is_about(bad))
        front.gateway.tick(fleet.Resumed(bad.request, "", False, 0))
        await run
        assert "a defect" in (deltas[-1].error or "")
        assert await other == answer(good.tokens, 50)
        await front.until(lambda: not node.engine.running)


async def test_a_node_that_breaks_the_loop_is_left_alone(faults: list[Fault]) -> None:
    def about(event: fleet.FleetEvent) -> bool:
        return isinstance(event, fleet.NodeReport) and event.node_id == "n0.1"

    async with PlayedFront(*nodes(2, step_s=0.005)) as front:
        jobs = [front.job() for _ in range(8)]
        runs = await begin(front, *jobs)
        faults.append(about)
        front.gateway.tick(fleet.NodeReport("n0.1"))
        assert nodes_up(front) == 1
        for job, run in zip(jobs, runs, strict=True):
            assert await run == answer(job.tokens, 40)
        await asyncio.sleep(1.0)  # twice as long as until others are connected to again
        assert "a defect" in front.gateway.snapshot().nodes["n0"]
        assert counters(front)["nodes_lost"] == 1
        assert not front.ended


async def test_a_loop_that_breaks_again_and_again_ends_the_front(faults: list[Fault]) -> None:
    async with PlayedFront(*nodes(1, step_s=0.01)) as front:
        job = front.job(count=1000)
        [run] = await begin(front, job)
        for _ in range(4):
            break_now(front, faults)
        assert not front.ended
        break_now(front, faults)
        [reason] = front.ended
        assert reason is not None
        assert "the front's loop broke 5 times within 60 s, at last: RuntimeError" in reason
        with pytest.raises(Refused, match="broke 5 times"):
            await run


async def test_a_request_that_cannot_be_sent_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fresh loop would believe that it is on its node, and its client would wait for ever."""
    async with PlayedFront(*nodes(1)) as front:
        [node] = front.gateway._nodes.values()

        def submit(*_: object) -> None:
            raise TypeError("it cannot be encoded")

        monkeypatch.setattr(node.link, "submit", submit)
        bad = front.job()
        [delta] = [one async for one in front.gateway.submit([bad])]
        assert "it cannot be encoded" in (delta.error or "")
        monkeypatch.undo()
        job = front.job()
        assert await front.run(job) == answer(job.tokens, 40)
        assert counters(front)["front_restarts"] == 0


async def test_output_that_cannot_be_handled_takes_no_node_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with PlayedFront(*nodes(1, step_s=0.005)) as front:
        bad, good = front.job(), front.job(count=60)
        [run] = await begin(front, good)
        receive = front.gateway._jobs.receive

        def faulty(delta: Delta, now: float) -> Any:
            if delta.request_id == bad.request.id:
                raise RuntimeError("a defect")
            return receive(delta, now)

        monkeypatch.setattr(front.gateway._jobs, "receive", faulty)
        [delta] = [one async for one in front.gateway.submit([bad])]
        assert "a defect" in (delta.error or "")
        assert await run == answer(good.tokens, 60)
        assert "nodes_lost" not in counters(front)


async def test_a_drain_outlives_the_loop(faults: list[Fault]) -> None:
    async with PlayedFront(*nodes(2, step_s=0.005)) as front:
        job = front.job()
        [run] = await begin(front, job)
        front.gateway.drain()
        break_now(front, faults)
        assert await run == answer(job.tokens, 40)
        await front.until(lambda: front.ended == [None])


async def test_each_loop_has_a_record_that_can_be_replayed(
    faults: list[Fault], tmp_path: Path
) -> None:
    path = tmp_path / "record"
    record = Record(path, "front", "fleet", {"settings": FleetSettings()})
    async with PlayedFront(*nodes(2, step_s=0.005), record=record) as front:
        again = Record(path, "front/2", "fleet", {"settings": FleetSettings()})
        front.records.append(again)
        runs = await begin(front, *(front.job() for _ in range(3)))
        break_now(front, faults)
        await asyncio.gather(*runs, front.run(front.job()))
    assert replay(path).equal
    assert b"Resumed" in path.read_bytes()


async def test_a_request_with_which_nodes_were_lost_stays_suspect_after_a_break(
    faults: list[Fault], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    async with PlayedFront(*nodes(4, step_s=0.2)) as front:
        job = front.job()
        run = asyncio.create_task(front.run(job))
        for _ in range(3):
            await front.until(lambda: any(one.engine.running for one in front.nodes))
            victim = next(one for one in front.nodes if one.engine.running)
            await victim.stop()
            await front.until(lambda name=victim.name: name not in up(front))
            break_now(front, faults)
        with pytest.raises(Refused, match="3 nodes were lost"):
            await run


def up(front: PlayedFront) -> list[str]:
    return [name for name, state in front.gateway.snapshot().nodes.items() if state == "up"]
