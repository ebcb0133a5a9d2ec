"""Limits of keys hold over all fronts, but for what is let in between two messages."""

import time
from datetime import UTC, datetime

import pytest
from played_nodes import PlayedFront, PlayedNode, nodes_up

from c2cserve.cluster import link, messages, port
from c2cserve.server.access.keyfile import KeyRecord
from c2cserve.server.access.keyring import Keyring
from c2cserve.server.access.quota import KeyLimits as Limits
from c2cserve.server.access.quota import Quota
from c2cserve.serving.front.key_limits import KeyLimits


def keyring(**limits: int) -> Keyring:
    ring = Keyring((), from_file=True)
    ring.replace([record(**limits)])
    return ring


def record(**limits: int) -> KeyRecord:
    return KeyRecord(
        id="0" * 12, name="one", salt="0" * 32, sha256="0" * 64, created=datetime.now(UTC),
        limits=Limits(**limits),
    )  # fmt: skip


def quota(ring: Keyring) -> Quota:
    [key] = ring.present()
    return key.quota


class Fronts:
    """Fronts in virtual time that tell each other everything, twice."""

    def __init__(self, count: int, **limits: int) -> None:
        self.rings = [keyring(**limits) for _ in range(count)]
        self.limits = [KeyLimits(f"f{i}", ring) for i, ring in enumerate(self.rings)]
        self.now = time.monotonic()

    def tell(self) -> None:
        for one in self.limits:
            if (use := one.news()) is not None:
                for other in self.limits * 2:
                    other.take(use, self.now)


@pytest.mark.parametrize("burst", [1, 1000])
def test_rates_hold_over_all_fronts(burst: int) -> None:
    """Three fronts are asked for so many requests four times a second, for two minutes. What came
    too much before they heard of each other is a debt, so that there is no more over all."""
    fronts, let_in = Fronts(3, requests_per_minute=60), 0
    for _ in range(4 * 120):
        fronts.now += 0.25
        for ring in fronts.rings:
            for _ in range(burst):
                if quota(ring).arrive(fronts.now) is not None:
                    break
                quota(ring).leave(1)
                let_in += 1
        fronts.tell()
    assert 60 + 120 - 3 <= let_in <= 60 + 120 + 3


def test_places_hold_over_all_fronts_and_a_dead_front_frees_them() -> None:
    fronts = Fronts(2, concurrency=3)
    first, second = (quota(ring) for ring in fronts.rings)
    for _ in range(2):
        assert first.arrive(0.0) is None
    fronts.tell()
    assert second.arrive(0.0) is None
    assert second.arrive(0.0) is not None
    fronts.limits[1].forget_silent(fronts.now + 10.0)
    assert second.arrive(10.0) is None
    first.leave(2)
    fronts.tell()
    assert second.running_elsewhere == 0


def test_a_limit_counts_from_when_the_key_got_it() -> None:
    fronts = Fronts(2)
    for _ in range(1000):
        assert quota(fronts.rings[0]).arrive(fronts.now) is None
        quota(fronts.rings[0]).leave(1)
    fronts.tell()
    for ring in fronts.rings:
        ring.replace([record(requests_per_minute=60)])
    assert quota(fronts.rings[0]).arrive(fronts.now) is None
    fronts.tell()
    assert quota(fronts.rings[1]).rates(fronts.now)["requests"].remaining == 59


def test_a_key_that_comes_back_begins_at_nothing() -> None:
    fronts = Fronts(2, requests_per_minute=60)
    first, second = fronts.rings
    for _ in range(2):
        for _ in range(20):
            assert quota(first).arrive(fronts.now) is None
            quota(first).leave(1)
        fronts.tell()
        assert quota(second).rates(fronts.now)["requests"].remaining == 40
        for ring in fronts.rings:
            ring.replace([])
            ring.replace([record(requests_per_minute=60)])


def test_tokens_that_are_given_back_are_given_back_everywhere() -> None:
    fronts = Fronts(2, tokens_per_minute=100)
    first, second = (quota(ring) for ring in fronts.rings)
    now = fronts.now
    first.charge(80, now)
    fronts.tell()
    assert second.admit(0, 1, 50, now) is not None
    first.give_back(60, now)
    fronts.tell()
    assert second.admit(0, 1, 50, now) is None


async def test_fronts_tell_each_other_by_way_of_nodes() -> None:
    nodes = [PlayedNode(f"n{i}") for i in range(3)]
    rings = [keyring(concurrency=3) for _ in range(2)]
    async with PlayedFront(*nodes, name="f0", keyring=rings[0]) as front:
        other = PlayedFront(*nodes, name="f1", keyring=rings[1])
        async with other:
            assert quota(rings[0]).arrive(0.0) is None
            await front.until(lambda: quota(rings[1]).running_elsewhere == 1)
            quota(rings[0]).leave(1)
            await front.until(lambda: quota(rings[1]).running_elsewhere == 0)


@pytest.mark.parametrize("old", ["front", "node"])
async def test_neighbouring_versions_talk(old: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node or a front of version 1 gets no message that it cannot read."""
    assert (messages.OLDEST_VERSION, messages.VERSION) == (1, 2)

    class Old:
        """The module's names, as version 1 had them."""

        VERSION = 1

        def __getattr__(self, name: str) -> object:
            return getattr(messages, name)

    monkeypatch.setattr(link if old == "front" else port, "msg", Old())
    ring = keyring(concurrency=3)
    async with PlayedFront(PlayedNode("n0"), keyring=ring) as front:
        assert quota(ring).arrive(0.0) is None
        sent: list[bool] = []
        [node] = front.gateway._nodes.values()
        sent.append(node.link.tell_use(messages.KeyUse("f", 1, {})))
        assert sent == [False]
        job = front.job()
        assert len(await front.run(job)) == 40
        assert nodes_up(front) == 1
