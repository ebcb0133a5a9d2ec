"""Output is handed out in portions, and one tenant's is not behind all of another's."""

import asyncio
import time

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


async def test_another_tenant_s_token_is_in_the_first_portion() -> None:
    delivery, own = FairDelivery(asyncio.get_running_loop()), OutputStream()
    flood = [OutputStream() for _ in range(4 * FairDelivery.PORTION)]
    batch: list[Output] = [("flood", one, delta(0)) for one in flood]
    delivery.add([*batch, ("own", own, delta(1))], time.monotonic())
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
    delivery.add([("", one, delta(0)) for one in streams], time.monotonic() + 60)
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
    delivery.add([("", one, delta(0)) for one in streams], time.monotonic() - 1.0)
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
                items.append((key[0], streams[key], delta(number)))
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
    stream.put(Delta("r", (0,), scores[:1], (scores[3],), cached_tokens=16, timing=timing))
    stream.put(Delta("r", (1,), scores[1:2]))
    assert await stream.get() == Delta(
        "r", (0, 1), scores[:2], (scores[3],), cached_tokens=16, timing=timing
    )
    stream.put(Delta("r", (2,), scores[2:3]))
    stream.put(Delta("r", (3,), scores[3:], finish=FinishReason.STOP))
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
    stream.put(delta(0))
    stream.put(last)
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
        delivery.add([("", stream, item)], time.monotonic())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert [one.tokens for one in await client] == [(0,), (1, 2, 3, 4)]


async def test_what_a_paced_client_waits_for_comes_without_further_tokens() -> None:
    stream = OutputStream(pace_s=0.02)
    client = asyncio.create_task(taken(stream, 1.0))
    for item in (FIRST, delta(1), delta(2)):
        await asyncio.sleep(0)
        stream.put(item, paced=True)
    assert [one.tokens for one in await client] == [(0,), (1, 2)]


async def test_slow_tokens_do_not_wait_for_others() -> None:
    stream = OutputStream(pace_s=0.02)
    for item in (FIRST, delta(1), delta(2)):
        client = asyncio.ensure_future(stream.get())
        await asyncio.sleep(0.03)
        stream.put(item, paced=True)
        await asyncio.sleep(0)
        assert client.done()


async def test_without_an_overload_each_token_comes_at_once() -> None:
    delivery, stream = FairDelivery(asyncio.get_running_loop()), OutputStream(pace_s=60.0)
    client = asyncio.create_task(taken(stream, 0.1))
    await asyncio.sleep(0)
    for item in (FIRST, delta(1), delta(2)):
        delivery.add([("", stream, item)], time.monotonic())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert [one.tokens for one in await client] == [(0,), (1,), (2,)]
