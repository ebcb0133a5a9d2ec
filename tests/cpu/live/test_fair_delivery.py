"""Output is handed out in portions, and one tenant's is not behind all of another's."""

import asyncio
import threading
import time
from functools import partial

import hypothesis.strategies as st
import pytest
from hypothesis import given

from c2cserve.core.request import Delta, FinishReason, Timing, TokenLogprob
from c2cserve.runtime.gateway import Refused
from c2cserve.serving.controller.output_stream import FairDelivery, Output, OutputStream


def delta(number: int) -> Delta:
    return Delta("r", tokens=(number,))


def output_of(item: Delta | Refused) -> Delta:
    assert isinstance(item, Delta)
    return item


def added(stream: OutputStream, *items: Delta | Refused) -> OutputStream:
    for item in items:
        stream.add(item)
    return stream


def give(stream: OutputStream, item: Delta | Refused, *, paced: bool = False) -> None:
    if stream.add(item):
        stream.deliver(paced=paced)


async def test_another_tenant_s_token_is_in_the_first_portion() -> None:
    delivery, own = FairDelivery(asyncio.get_running_loop()), OutputStream()
    flood = [OutputStream() for _ in range(4 * FairDelivery.PORTION)]
    batch: list[Output] = [("flood", added(one, delta(0))) for one in flood]
    delivery.add([*batch, ("own", added(own, delta(1)))], time.monotonic())
    async with asyncio.timeout(0):
        assert await own.get() == delta(1)


async def test_a_turn_of_the_loop_wakes_a_portion_at_most() -> None:
    delivery = FairDelivery(asyncio.get_running_loop())
    streams = [OutputStream() for _ in range(3 * FairDelivery.PORTION + 1)]
    woken: list[int] = []

    async def take(number: int) -> None:
        await streams[number].get()
        woken.append(number)

    tasks = [asyncio.create_task(take(number)) for number in range(len(streams))]
    await asyncio.sleep(0)
    delivery.add([("", added(one, delta(0))) for one in streams], time.monotonic() + 60)
    counts: list[int] = []
    while len(woken) < len(streams):
        before = len(woken)
        await asyncio.sleep(0)
        counts.append(len(woken) - before)
    assert max(counts) == FairDelivery.PORTION
    assert woken == sorted(woken)
    await asyncio.gather(*tasks)


async def test_what_has_waited_is_handed_out_at_once() -> None:
    """A busy loop has some 20 turns a second: with a portion in each, a backlog would only grow."""
    delivery = FairDelivery(asyncio.get_running_loop())
    streams = [OutputStream() for _ in range(9 * FairDelivery.PORTION)]
    delivery.add([("", added(one, delta(0))) for one in streams], time.monotonic() - 1.0)
    async with asyncio.timeout(0):
        assert [await one.get() for one in streams] == [delta(0)] * len(streams)


@given(st.lists(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 3)), max_size=60)))
def test_each_request_gets_all_in_order(batches: list[list[tuple[str, int]]]) -> None:
    async def run() -> None:
        delivery = FairDelivery(asyncio.get_running_loop())
        streams = {(tenant, n): OutputStream() for tenant in "ab" for n in range(4)}
        wanted: dict[tuple[str, int], list[int]] = {key: [] for key in streams}
        number = 0
        for batch in batches:
            items: list[Output] = []
            for key in batch:
                wanted[key].append(number)
                if streams[key].add(delta(number)):
                    items.append((key[0], streams[key]))
                number += 1
            delivery.add(items, time.monotonic())
        for key, numbers in wanted.items():
            tokens: tuple[int, ...] = ()
            while len(tokens) < len(numbers):
                tokens += output_of(await streams[key].get()).tokens
            assert tokens == tuple(numbers)

    asyncio.run(run())


async def test_what_a_late_client_has_not_taken_is_one_delta() -> None:
    stream, timing = OutputStream(), Timing("gpu0", False, 0.0, 0.0, 0.0, 0.0)
    scores = tuple(TokenLogprob(token, -1.0) for token in range(4))
    give(stream, Delta("r", (0,), scores[:1], (scores[3],), cached_tokens=16, timing=timing))
    give(stream, Delta("r", (1,), scores[1:2]))
    assert await stream.get() == Delta(
        "r", (0, 1), scores[:2], (scores[3],), cached_tokens=16, timing=timing
    )
    give(stream, Delta("r", (2,), scores[2:3]))
    give(stream, Delta("r", (3,), scores[3:], finish=FinishReason.STOP))
    assert await stream.get() == Delta("r", (2, 3), scores[2:], finish=FinishReason.STOP)


@pytest.mark.parametrize(
    "last",
    [
        Refused(503, "gone"),
        Delta("r", finish=FinishReason.ERROR, error="gone"),
        Delta("r", finish=FinishReason.STOP),
        Delta("r", (7,), timing=Timing("gpu1", False, 0.0, 0.0, 0.0, 0.0)),
    ],
    ids=["refusal", "error", "stop without a token", "another slice's"],
)
async def test_what_changes_how_tokens_are_told_stays_alone(last: Delta | Refused) -> None:
    stream = OutputStream()
    give(stream, delta(0))
    give(stream, last)
    assert [await stream.get(), await stream.get()] == [delta(0), last]


FIRST = Delta("r", (0,), timing=Timing("gpu0", False, 0.0, 0.0, 0.0, 0.0))


async def taken(stream: OutputStream, within_s: float) -> list[Delta]:
    """What a client that always waits is given within a time."""
    given: list[Delta] = []
    try:
        async with asyncio.timeout(within_s):
            while True:
                given.append(output_of(await stream.get()))
    except TimeoutError:
        return given


async def test_a_paced_client_gets_tokens_together_but_its_first_and_last_at_once() -> None:
    delivery, stream = FairDelivery(asyncio.get_running_loop()), OutputStream(pace_s=60.0)
    delivery.paced = True
    client = asyncio.create_task(taken(stream, 0.1))
    await asyncio.sleep(0)
    for item in (FIRST, delta(1), delta(2), delta(3), Delta("r", (4,), finish=FinishReason.LENGTH)):
        if stream.add(item):
            delivery.add([("", stream)], time.monotonic())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert [one.tokens for one in await client] == [(0,), (1, 2, 3, 4)]


async def test_what_a_paced_client_waits_for_comes_without_further_tokens() -> None:
    stream = OutputStream(pace_s=0.02)
    client = asyncio.create_task(taken(stream, 1.0))
    for item in (FIRST, delta(1), delta(2)):
        await asyncio.sleep(0)
        give(stream, item, paced=True)
    assert [one.tokens for one in await client] == [(0,), (1, 2)]


async def test_slow_tokens_do_not_wait_for_others() -> None:
    stream = OutputStream(pace_s=0.02)
    for item in (FIRST, delta(1), delta(2)):
        client = asyncio.ensure_future(stream.get())
        await asyncio.sleep(0.03)
        give(stream, item, paced=True)
        await asyncio.sleep(0)
        assert client.done()


async def test_without_an_overload_each_token_comes_at_once() -> None:
    delivery, stream = FairDelivery(asyncio.get_running_loop()), OutputStream(pace_s=60.0)
    client = asyncio.create_task(taken(stream, 0.1))
    await asyncio.sleep(0)
    for item in (FIRST, delta(1), delta(2)):
        if stream.add(item):
            delivery.add([("", stream)], time.monotonic())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert [one.tokens for one in await client] == [(0,), (1,), (2,)]


async def test_tokens_of_a_client_that_waits_take_none_of_the_loop_s_time() -> None:
    stream = OutputStream(pace_s=0.05)
    client = asyncio.create_task(taken(stream, 0.5))
    notified: list[bool] = []
    for item in (FIRST, delta(1), delta(2), delta(3)):
        await asyncio.sleep(0)
        notified.append(stream.add(item))
        if notified[-1]:
            stream.deliver(paced=True)
    last = Delta("r", (4,), finish=FinishReason.LENGTH)
    await asyncio.sleep(0.1)
    assert stream.add(last)
    stream.deliver(paced=True)
    assert [one.tokens for one in await client] == [(0,), (1, 2, 3), (4,)]
    assert notified == [True, True, False, False]


def test_a_thread_adds_while_the_loop_takes() -> None:
    """No token is lost or out of order, whatever the two threads do at a time."""
    count = 20_000

    async def run() -> tuple[int, ...]:
        loop, stream = asyncio.get_running_loop(), OutputStream(pace_s=0.0005)

        def controller() -> None:
            for number in range(count):
                if stream.add(delta(number)):
                    loop.call_soon_threadsafe(partial(stream.deliver, paced=number % 3 > 0))

        thread = threading.Thread(target=controller)
        thread.start()
        got: list[int] = []
        async with asyncio.timeout(60):
            while len(got) < count:
                got.extend(output_of(await stream.get()).tokens)
        thread.join()
        return tuple(got)

    assert asyncio.run(run()) == tuple(range(count))
