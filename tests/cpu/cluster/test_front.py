"""A front over nodes that are played: no token is lost or repeated, whatever nodes do."""

import asyncio
import socket
from dataclasses import fields, replace
from pathlib import Path

import pytest
from played_nodes import PlayedFront, PlayedNode, answer, counters, nodes_up

from c2cserve.cluster import messages as msg
from c2cserve.cluster import port
from c2cserve.core.fleet import FleetNode
from c2cserve.core.request import Delta, FinishReason, Timing, TokenLogprob
from c2cserve.policy.fleet.placement import FleetSettings
from c2cserve.runtime.gateway import Refused
from c2cserve.runtime.record import Record
from c2cserve.runtime.replay import replay
from c2cserve.server.metrics import SnapshotCollector


def nodes(count: int, **more: float) -> list[PlayedNode]:
    return [PlayedNode(f"n{number}", **more) for number in range(count)]


async def test_a_request_runs_on_one_node_with_its_version_and_clock() -> None:
    async with PlayedFront(*nodes(3)) as front:
        job = front.job("b")
        assert await front.run(job) == answer(job.tokens, 40)
        [name] = front.on(job)
        [node] = [one for one in front.nodes if one.name == name]
        own = node.engine.jobs[0].request
        assert own.model == "b#2"
        assert abs(own.arrival_s - job.request.arrival_s) < 30.0
        assert front.gateway.resolve("b-alias") is not None
        assert front.gateway.resolve("c") is None


@pytest.mark.parametrize(("token_s", "serves"), [(0.9, "cheap"), (1.1, "dear")])
async def test_the_cheapest_node_whose_tokens_are_in_time_serves(
    token_s: float, serves: str, tmp_path: Path
) -> None:
    """By what nodes announce; the target is 1 s."""
    cheap, dear = PlayedNode("cheap", 1.0, token_s=token_s), PlayedNode("dear", 9.0, token_s=0.01)
    record = Record(tmp_path / "record", "front", "fleet", {"settings": FleetSettings()})
    async with PlayedFront(dear, cheap, record=record) as front:
        while len(front.gateway.snapshot().node_use) < 2:  # both have reported
            await asyncio.sleep(0.01)
        for _ in range(3):
            job = front.job()
            assert await front.run(job) == answer(job.tokens, 40)
            assert front.on(job) == [serves]
    assert replay(tmp_path / "record").equal


async def test_a_lost_node_costs_no_token() -> None:
    async with PlayedFront(*nodes(3, step_s=0.005)) as front:
        jobs = [front.job() for _ in range(6)]
        begun = asyncio.Event()
        runs = [asyncio.create_task(front.run(job, begun)) for job in jobs]
        await begun.wait()
        victim = next(one for one in front.nodes if one.engine.running)
        await victim.stop()
        for job, run in zip(jobs, runs, strict=True):
            assert await run == answer(job.tokens, 40)
        assert counters(front)["nodes_lost"] == 1
        assert counters(front)["resumed_requests"] >= 1
        assert any(len(front.on(job)) == 2 for job in jobs)


async def test_a_silent_node_is_lost_and_what_it_says_later_is_ignored() -> None:
    """Its connection stays open: only the front's own timeout notices."""
    front = PlayedFront(*nodes(2, step_s=0.01), timeout_s=1.0)
    async with front:
        job, begun = front.job(count=60), asyncio.Event()
        run = asyncio.create_task(front.run(job, begun))
        await begun.wait()
        victim = next(one for one in front.nodes if one.engine.running)
        assert victim.port is not None
        [connection] = victim.port.fronts
        sent: list[bytes] = []
        transport = connection._transport
        assert transport is not None
        transport.write = sent.append  # type: ignore[method-assign]
        assert await run == answer(job.tokens, 60)
        assert len(front.on(job)) == 2
        assert sent, "the node had gone on"


async def test_a_cut_node_is_said_to_be_silent_until_its_machine_answers() -> None:
    """Packets vanish: new connections get no answer. A dead server's machine refuses them."""
    [node] = nodes(1)
    async with PlayedFront(node, timeout_s=1.0) as front:
        assert node.port is not None
        assert node.port._server is not None
        [connection] = node.port.fronts
        assert connection._transport is not None
        connection._transport.write = lambda _: None  # type: ignore[method-assign]
        node.port._server.close()
        full = socket.create_server(("127.0.0.1", node.address.port), backlog=0)
        with socket.create_connection(full.getsockname()), full:  # the next ones get no answer
            await front.until(lambda: not nodes_up(front))
            for _ in range(20):
                assert front.gateway.snapshot().nodes == {"n0": "no sign of life for 1 s"}
                await asyncio.sleep(0.1)
        await front.until(lambda: "cannot connect" in front.gateway.snapshot().nodes["n0"])


async def test_a_node_without_slices_keeps_no_requests() -> None:
    """Its worker died, and its successor may not start soon. What it still says is ignored."""
    async with PlayedFront(*nodes(2, step_s=0.01)) as front:
        job, begun = front.job(count=400), asyncio.Event()
        run = asyncio.create_task(front.run(job, begun))
        await begun.wait()
        victim = next(one for one in front.nodes if one.engine.running)
        victim.engine.slice_state = "lost"
        assert await run == answer(job.tokens, 400)
        assert len(front.on(job)) == 2
        await front.until(lambda: not victim.engine.running)
        later = front.job(count=5)
        await front.run(later)
        assert front.on(later) != [victim.name]


async def test_the_only_node_keeps_its_requests_while_its_worker_starts_again() -> None:
    [node] = nodes(1, step_s=0.01)
    async with PlayedFront(node) as front:
        job, begun = front.job(count=250), asyncio.Event()
        run = asyncio.create_task(front.run(job, begun))
        await begun.wait()
        node.engine.slice_state = "lost"
        assert await run == answer(job.tokens, 250)
        assert front.on(job) == ["n0"]
        assert len(node.engine.jobs) == 1


async def test_a_node_that_gives_up_in_the_middle() -> None:
    first, second = nodes(2)
    first.engine.gives_up_after = second.engine.gives_up_after = 7
    async with PlayedFront(first, second, settings=FleetSettings(tries=3)) as front:
        job = front.job(count=13)
        begun = asyncio.Event()
        assert await front.run(job, begun) == answer(job.tokens, 13)
        assert len(front.on(job)) == 2


async def test_a_refusal_goes_to_the_next_node_and_then_to_the_client() -> None:
    first, second = nodes(2)
    async with PlayedFront(first, second) as front:
        first.engine.refusal = second.engine.refusal = Refused(429, "full", 3.0)
        job = front.job()
        with pytest.raises(Refused) as refused:
            await front.run(job)
        assert (refused.value.status, refused.value.retry_after_s) == (429, 3.0)
        assert len(front.on(job)) == 2
        second.engine.refusal = None
        job = front.job()
        assert await front.run(job) == answer(job.tokens, 40)


async def test_requests_wait_for_a_node() -> None:
    async with PlayedFront() as front:
        job = front.job()
        run = asyncio.create_task(front.run(job))
        await asyncio.sleep(0.05)
        late = await PlayedNode("late").start()
        front.nodes.append(late)
        front.gateway.members({"late": late.address})
        assert await run == answer(job.tokens, 40)


async def test_requests_do_not_wait_for_ever() -> None:
    async with PlayedFront(settings=FleetSettings(no_node_s=0.05)) as front:
        with pytest.raises(Refused) as refused:
            await front.run(front.job())
        assert refused.value.status == 503


async def test_a_node_that_comes_back_is_used_again() -> None:
    [node] = nodes(1)
    async with PlayedFront(node) as front:
        await node.stop()
        await front.until(lambda: not nodes_up(front))
        await node.start()
        front.gateway.members({})
        front.gateway.members({node.name: node.address})
        await front.until(lambda: nodes_up(front) == 1)
        job = front.job()
        assert await front.run(job) == answer(job.tokens, 40)


async def test_a_request_that_returns_to_a_node_is_not_cancelled_by_its_old_connection() -> None:
    """A cut: the front has given its connection up, and the node has not noticed."""
    [node] = nodes(1, step_s=0.01)
    async with PlayedFront(node) as front:
        job, begun = front.job(count=100), asyncio.Event()
        run = asyncio.create_task(front.run(job, begun))
        await begun.wait()
        assert node.port is not None
        [old] = node.port.fronts
        link = next(iter(front.gateway._nodes.values())).link
        old.connection_lost = lambda exc: None  # type: ignore[method-assign]
        link.end("a cut")
        await front.until(lambda: len(node.engine.running) == 2)
        old.end("no sign of life")
        assert await run == answer(job.tokens, 100)
        assert len(node.engine.jobs) == 2


async def test_a_member_is_connected_once() -> None:
    [node] = nodes(1)
    async with PlayedFront(node) as front:
        for members in ({}, {node.name: node.address}) * 3:
            front.gateway.members(members)
        await asyncio.sleep(0.7)
        assert node.port is not None
        assert len(node.port.fronts) == 1


async def test_a_front_needs_the_secret() -> None:
    node = await PlayedNode("n0").start(secret=b"wrong")
    async with PlayedFront() as front:
        front.nodes.append(node)
        front.gateway.members({"n0": node.address})
        await asyncio.sleep(0.2)
        assert nodes_up(front) == 0
        assert not node.engine.jobs


async def test_a_client_that_leaves_frees_the_node() -> None:
    async with PlayedFront(*nodes(1, step_s=0.01)) as front:
        job = front.job(count=1000)
        stream = front.gateway.submit([job])
        await anext(stream)
        await stream.aclose()
        engine = front.nodes[0].engine
        await front.until(lambda: not engine.running)
        assert front.gateway.snapshot().running == 0


async def test_a_front_that_ends_frees_the_node() -> None:
    [node] = nodes(1, step_s=0.01)
    async with PlayedFront(node) as front:
        begun = asyncio.Event()
        run = asyncio.create_task(front.run(front.job(count=1000), begun))
        await begun.wait()
        front.gateway.abort("over")
        with pytest.raises(Refused):
            await run
        await front.until(lambda: not node.engine.running)
        assert front.ended == ["over"]


async def test_a_drain_finishes_what_runs() -> None:
    async with PlayedFront(*nodes(1, step_s=0.002)) as front:
        job, begun = front.job(), asyncio.Event()
        run = asyncio.create_task(front.run(job, begun))
        await begun.wait()
        front.gateway.drain()
        with pytest.raises(Refused):
            await front.run(front.job())
        assert await run == answer(job.tokens, 40)
        await front.until(lambda: front.ended == [None])


async def test_a_node_without_the_model_is_told_who_has_it() -> None:
    """A copy comes from the pool that has the model. `a` is on `n0` only, which is crowded."""
    first, second = nodes(2, step_s=0.01)
    second.engine.held_models = ("b",)
    async with PlayedFront(first, second) as front:
        await front.until(lambda: front.gateway.snapshot().counters.get("fetched_models") == 2)
        first.engine.refusal = Refused(429, "full", 3.0)
        job = front.job("a")
        assert await front.run(job) == answer(job.tokens, 40)
        assert front.on(job) == ["n0", "n1"]
        [source] = second.weights.sources
        assert (source.model, source.port) == ("a", 7)
        assert not first.weights.sources


async def test_a_change_of_a_pool_is_reported_before_the_next_report_is_due(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was evicted is not asked for there."""
    [node] = nodes(1)
    async with PlayedFront(node) as front:
        monkeypatch.setattr(port, "_REPORT_S", 1000.0)
        book = front.policies[0]._nodes["n0.1"]
        await front.until(lambda: book.held == {"a", "b"})
        node.engine.held_models = ("b",)
        node.weights.pool_changes += 1
        await front.until(lambda: book.held == {"b"})


async def test_a_model_of_this_front_alone_does_not_exist() -> None:
    """Another front started the nodes, with another catalogue."""
    async with PlayedFront(*nodes(2)) as front:
        for node in front.nodes:
            del node.engine.catalogue["b"]
        with pytest.raises(Refused) as refused:
            await front.run(front.job("b"))
        assert refused.value.status == 404
        job = front.job("a")
        assert await front.run(job) == answer(job.tokens, 40)


async def test_counters_of_lost_nodes_stay_in_the_sum() -> None:
    async with PlayedFront(*nodes(3)) as front:
        await front.until(lambda: counters(front).get("steps") == 3.0)
        await front.nodes[0].stop()
        await front.until(lambda: nodes_up(front) == 2)
        assert counters(front)["steps"] == 3.0


async def test_the_state_is_summed_over_nodes() -> None:
    async with PlayedFront(*nodes(3)) as front:
        await front.until(lambda: front.gateway.snapshot().pool_used_bytes == 600)
        state = front.gateway.snapshot()
        assert state.pool_budget_bytes == 3000
        assert state.counters["steps"] == 3.0
        assert [model.state for model in state.models] == ["ready", "ready"]
        assert {one.pool_used_bytes for one in state.node_use.values()} == {200}
        assert sorted(state.node_use) == ["n0", "n1", "n2"]
        shown = {
            (sample.name, sample.labels.get("node")): sample.value
            for metric in SnapshotCollector(front.gateway).collect() for sample in metric.samples
        }  # fmt: skip
        assert shown["c2cserve:pool_used_bytes", None] == 600.0
        assert shown["c2cserve:node_pool_used_bytes", "n1"] == 200.0
        assert shown["c2cserve:node_up", "n2"] == 1.0
        assert 0.0 <= shown["c2cserve:members_age_seconds", None] < 60.0


async def test_the_front_s_record_replays(tmp_path: Path) -> None:
    record = Record(tmp_path / "record", "front", "fleet", {"settings": FleetSettings()})
    async with PlayedFront(*nodes(2), record=record) as front:
        await asyncio.gather(*(front.run(front.job(model)) for model in "abab"))
        await front.nodes[0].stop()
        await front.run(front.job())
    result = replay(tmp_path / "record")
    assert result.equal
    assert result.streams[0].actions >= 5


def test_a_renamed_delta_says_the_same() -> None:
    logprob = TokenLogprob(-1.0, ())
    timing = Timing("cpu0", False, 1.0, 2.0, 3.0, 4.0)
    delta = Delta("a", (1,), (logprob,), (logprob,), FinishReason.ERROR, 5, timing, "broken")
    assert delta.renamed("b") == replace(delta, request_id="b")
    default = Delta("")
    assert all(getattr(delta, f.name) != getattr(default, f.name) for f in fields(Delta))


def test_messages_survive_the_way() -> None:
    delta = Delta("r", (1, 2), (TokenLogprob(1, -0.5, ((1, -0.5),)),), finish=FinishReason.STOP)
    data = msg.frame(msg.Output(delta))
    assert int.from_bytes(data[: msg.HEAD_BYTES], "little") == len(data) - msg.HEAD_BYTES
    back = msg.decode_from_node(data[msg.HEAD_BYTES :])
    assert back == msg.Output(delta)
    welcome = msg.Welcome(b"p", FleetNode("n", "cpu", 1, 2))
    assert msg.decode_from_node(msg.frame(welcome)[msg.HEAD_BYTES :]) == welcome


async def test_a_request_that_comes_back_to_a_node_can_be_cancelled_there() -> None:
    """It was taken off the node and sent there again, in one piece of the stream."""
    node = PlayedNode("n1")
    async with PlayedFront(node) as front:
        [link] = [one.link for one in front.gateway._nodes.values()]
        job = front.job(count=100_000)
        link.submit(job, 0.0, None, ())
        await front.until(lambda: bool(node.engine.running))
        link.send(msg.Cancel(job.request.id))
        link.submit(job, 0.0, None, ())
        await front.until(lambda: len(node.engine.jobs) == 2 and len(node.engine.running) == 1)
        link.send(msg.Cancel(job.request.id))
        await front.until(lambda: not node.engine.running, 10.0)


async def test_a_fault_of_taking_a_message_is_logged_with_its_place(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the node said may be right, and the front be wrong."""

    def broken(link: object, state: object) -> None:
        raise ValueError("min() arg is an empty sequence")

    async with PlayedFront(PlayedNode("n1")) as front:
        monkeypatch.setattr(front.gateway, "node_reported", broken)
        await front.until(lambda: any(one.exc_info for one in caplog.records))
    assert "in broken" in caplog.text
