"""Output is handed out in portions, and one tenant's is not behind all of another's."""

import asyncio
import time

import hypothesis.strategies as st
from hypothesis import given

from c2cserve.core.request import Delta
from c2cserve.serving.controller.output_stream import FairDelivery, Output, OutputStream


def delta(number: int) -> Delta:
    return Delta("r", tokens=(number,))


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
            assert [(await streams[key].get()) for _ in numbers] == [delta(n) for n in numbers]

    asyncio.run(run())
