"""Never more weights and KV than fit, and nobody leaves who would be missed."""

from random import Random
from typing import Any

from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from c2cserve.core.actions import Fetch, Release
from c2cserve.core.machine import GpuShare, Slice
from c2cserve.core.model import ModelSpec
from c2cserve.core.request import Request, Slo
from c2cserve.policy.slice.batching import BY_HEADROOM, ActiveModel
from c2cserve.policy.slice.estimate import StepTime
from c2cserve.policy.slice.kv import KvArena
from c2cserve.policy.weights.weight_swapping import EASE_S, WeightSwapping

LINK = 10.0
"""Bytes per second; a slab is one byte, and so is a block."""


class World:
    def __init__(self, hbm_bytes: int, *, rotates: bool = True) -> None:
        slice_ = Slice(
            "s", "gpu", kv_bytes=hbm_bytes, slab_bytes=1, gpu=GpuShare("g", 1),
            hbm_bytes=hbm_bytes, link_bytes_per_s=LINK,
        )  # fmt: skip
        self.arena = KvArena(hbm_bytes, 1)
        self.swapping = WeightSwapping(self.arena, slice_, rotates=rotates)
        self.hbm_bytes = hbm_bytes
        self.models: dict[str, ActiveModel] = {}
        self.there: dict[str, int] = {}
        self.coming: dict[str, int] = {}

    def activate(self, name: str, size: int, **spec: Any) -> ActiveModel:
        model = ActiveModel(name, name, 1, StepTime(), BY_HEADROOM)
        self.models[name] = model
        self.arena.add_model(name, 1)
        self.swapping.activated(model, ModelSpec(name, size, 1, 1, 4096, **spec))
        return model

    def ask(self, model: ActiveModel, name: str, now: float, ttft_s: float = 2.0) -> None:
        model.add(Request(name, model.name, 20, 50, now, Slo(ttft_s, 0.1)), False)
        self.swapping.requested(model.name, now)

    def plan(self, now: float, *flying: str, drain_s: float = 0.0) -> list[Fetch | Release]:
        actions = self.swapping.plan(now, dict.fromkeys(flying, drain_s))
        self.carry_out(actions)
        return actions

    def carry_out(self, actions: list[Fetch | Release]) -> None:
        for action in actions:
            size = self.swapping._weights[action.model].size
            if isinstance(action, Fetch):
                assert action.model not in self.there
                assert action.model not in self.coming
                self.coming[action.model] = size
            else:
                del self.there[action.model]
            held = sum(self.there.values()) + sum(self.coming.values()) + self.arena.held_bytes
            assert held <= self.hbm_bytes

    def arrive(self, name: str, took_s: float = 1.0) -> None:
        self.there[name] = self.coming.pop(name)
        self.swapping.fetched(name, took_s)


@settings(max_examples=examples(300), deadline=None)
@given(st.integers(0, 10**9))
def test_weights_and_kv_never_take_more_than_there_is(seed: int) -> None:
    random = Random(seed)
    world = World(100, rotates=random.random() < 0.8)
    models = [world.activate(f"m{i}", random.randint(5, 60)) for i in range(5)]
    blocks: list[tuple[str, int]] = []
    now, number = 0.0, 0
    for _ in range(60):
        now += random.expovariate(1.0)
        model = random.choice(models)
        what = random.random()
        if what < 0.3:
            number += 1
            world.ask(model, f"r{number}", now, random.choice((0.5, 2.0, 30.0)))
        elif what < 0.5 and model.seqs:
            del model.seqs[random.choice(sorted(model.seqs))]
        elif what < 0.6 and (more := world.arena.allocate(model.key, random.randint(1, 9))):
            blocks += [(model.key, offset) for offset in more]
        elif what < 0.65 and model.seqs:
            world.carry_out(list(world.swapping.make_room(model, (), now)))
        elif what < 0.8 and blocks:
            key, offset = blocks.pop(random.randrange(len(blocks)))
            world.arena.release(key, [offset])
        elif world.coming:
            world.arrive(min(world.coming))
        flying = [one.name for one in models if random.random() < 0.2]
        before = dict(world.there)
        world.plan(now, *flying)
        for name in before.keys() - world.there.keys():
            assert world.swapping._rotates
            assert name not in flying, "a step is reading its weights"
        for one in models:
            leaves = one.name in world.swapping._draining
            assert not leaves or (one.name in world.there and flying)
            arrives = world.swapping._rotates and one.name in world.coming and bool(one.seqs)
            computes = (one.name in world.there and not leaves) or arrives
            assert world.swapping.computes(one.name) == computes


def test_who_is_far_ahead_leaves_and_is_back_when_the_next_token_is_due() -> None:
    world = World(100)
    ahead, urgent = world.activate("ahead", 60), world.activate("urgent", 60)
    world.ask(ahead, "r1", 0.0)
    world.swapping._weights["ahead"].gap_s = 1e3
    assert world.plan(0.0) == [Fetch("ahead")]
    world.arrive("ahead", 6.0)
    ahead.seqs["r1"].due_s = 30.0
    ahead.seqs["r1"].started, ahead.started = True, 1
    world.ask(urgent, "r2", 6.0)
    assert world.plan(6.0) == [Release("ahead"), Fetch("urgent")]
    world.arrive("urgent", 6.0)
    urgent.seqs["r2"].due_s = 90.0
    urgent.seqs["r2"].started, urgent.started = True, 1
    world.swapping._weights["urgent"].gap_s = 1e3
    assert world.plan(13.0) == [], "there is time"
    begin_s = world.swapping.wakeup
    assert begin_s is not None
    assert 23.0 < begin_s < 24.0, "six seconds of loading, and a margin"
    assert world.plan(begin_s) == [Release("urgent"), Fetch("ahead")]


def test_who_would_be_missed_stays_and_who_has_no_requests_goes_first() -> None:
    world = World(130)
    near, idle, new = (world.activate(name, 60) for name in ("near", "idle", "new"))
    for model in (near, idle):
        world.ask(model, f"of {model.name}", 0.0)
    world.plan(0.0)
    for name in ("idle", "near"):
        world.arrive(name, 6.0)
    near.seqs["of near"].due_s = 8.0
    idle.seqs.clear()
    world.ask(new, "n", 7.0)
    assert world.plan(7.0) == [Release("idle"), Fetch("new")]
    world.arrive("new", 6.0)
    new.seqs["n"].due_s = 14.0
    world.ask(idle, "again", 13.0)
    assert world.plan(13.0) == [], "nobody could be away for so long"


def test_of_models_without_requests_the_catalogue_says_who_stays() -> None:
    """As on slices without weights of their own (`PoolModel.value`)."""
    world = World(250)
    kept = {"pinned": {"pinned": True}, "prior": {"priority": 1}, "warm": {"keep_warm_s": 60.0}}
    names = [*kept, "plain"]
    for at, name in enumerate(names):
        model = world.activate(name, 60, **kept.get(name, {}))
        world.ask(model, name, float(at))
        world.plan(float(at))
        world.arrive(name, 0.1)
        model.seqs.clear()
    left: list[str] = []
    for number in range(4):
        new = world.activate(f"new{number}", 60, pinned=True, priority=2)
        world.ask(new, new.name, 10.0)
        release, _ = world.plan(10.0)
        assert isinstance(release, Release)
        left.append(release.model)
        world.arrive(new.name, 0.1)
    assert left == ["plain", "warm", "prior", "pinned"]


def leave_cached(world: World, model: ActiveModel, count: int) -> None:
    """Let blocks of ended requests stay in the arena, to be found by their hashes."""
    blocks = world.arena.allocate(model.key, count)
    assert blocks is not None
    for offset in blocks:
        world.arena.seal(model.key, offset, hash((model.name, offset)))
    world.arena.release(model.key, blocks)


def test_what_is_cached_of_ended_requests_is_room_for_weights() -> None:
    """It reaches far into the arena, above what is held. Else a model would stream beside it."""
    world = World(100)
    world.arena.weights_above = True
    first, second = world.activate("first", 30), world.activate("second", 60)
    world.ask(first, "r1", 0.0)
    world.plan(0.0)
    world.arrive("first", 3.0)
    leave_cached(world, first, 50)
    world.ask(second, "r2", 3.0)
    assert world.plan(3.0) == [Fetch("second")], "both fit beside what is held"
    assert world.arena.end_bytes <= 10


def test_little_is_cached_where_not_all_weights_fit() -> None:
    """New requests would come to lie above what is cached, and weights above these."""
    world = World(320)
    world.arena.weights_above = True
    one, other = world.activate("one", 100), world.activate("other", 60)
    leave_cached(world, one, 90)
    leave_cached(world, other, 60)
    assert world.arena.end_bytes == 150, "the weights of all fit beside half of the arena"
    world.activate("third", 300)
    assert world.arena.end_bytes <= 10
    for _ in range(40):
        held = world.arena.allocate(one.key, 8)
        assert held is not None
        assert max(held) < 10, "though others were cached meanwhile"
        leave_cached(world, other, 2)
        world.arena.release(one.key, held)
    world.swapping.ended(world.models["third"])
    leave_cached(world, other, 60)
    assert world.arena.end_bytes >= 60, "the weights of all fit again"


def busy_and_waiting() -> tuple[World, ActiveModel, ActiveModel]:
    """A model that computes far ahead of its client, and one that is due for which it must leave
    (first due at 2, and six seconds to load)."""
    world = World(100)
    ahead, urgent = world.activate("ahead", 60), world.activate("urgent", 60)
    world.ask(ahead, "r1", 0.0)
    world.plan(0.0)
    world.arrive("ahead", 6.0)
    world.swapping._weights["ahead"].gap_s = 1e3
    ahead.seqs["r1"].due_s = 50.0
    ahead.seqs["r1"].started, ahead.started = True, 1
    world.ask(urgent, "r2", 6.0)
    return world, ahead, urgent


def test_a_chosen_victim_gets_no_new_steps_until_it_is_released() -> None:
    world, *_ = busy_and_waiting()
    assert world.plan(6.0, "ahead") == [], "a step reads its weights"
    assert not world.swapping.computes("ahead")
    assert world.plan(6.01, "ahead") == []
    assert world.plan(6.02) == [Release("ahead"), Fetch("urgent")]


def test_a_victim_goes_on_when_the_reason_for_it_is_gone() -> None:
    world, ahead, urgent = busy_and_waiting()
    world.plan(6.0, "ahead")
    assert not world.swapping.computes("ahead")
    urgent.seqs.clear()
    assert world.plan(6.1, "ahead") == []
    assert world.swapping.computes("ahead"), "no model waits for its memory"
    world.ask(urgent, "r3", 6.2)
    world.plan(6.2, "ahead")
    assert not world.swapping.computes("ahead")
    world.ask(ahead, "r4", 6.3)
    assert world.plan(6.3, "ahead") == []
    assert world.swapping.computes("ahead"), "its new request is due too soon"


def test_time_alone_makes_no_victim_go_on() -> None:
    """It could be absent when it was chosen. While its steps end, its token comes nearer."""
    world, *_ = busy_and_waiting()
    for now in (6.0, 40.0, 49.0, 60.0):
        assert world.plan(now, "ahead") == []
        assert not world.swapping.computes("ahead")
    assert world.plan(60.1) == [Release("ahead"), Fetch("urgent")]


def test_a_load_begins_earlier_by_the_steps_that_end_before() -> None:
    world, _, urgent = busy_and_waiting()
    urgent.seqs["r2"].due_s = 30.0
    assert world.plan(7.0, "ahead", drain_s=1.5) == []
    assert world.swapping.wakeup == 30.0 - 6.0 - 0.25 - 1.5
    assert world.swapping.computes("ahead"), "there is time"
    assert world.plan(22.3, "ahead", drain_s=1.5) == []
    assert not world.swapping.computes("ahead")
    assert world.plan(22.4, "ahead") == []
    assert not world.swapping.computes("ahead"), "fewer steps are left, and the choice stands"


def test_loads_are_begun_early_enough_for_all_of_them() -> None:
    world = World(1000)
    for name, size in (("a", 10), ("b", 20), ("c", 30)):
        world.activate(name, size)
    assert world.swapping.latest_start_s([(10.0, "a"), (10.5, "b"), (50.0, "c")]) == 7.5
    assert world.swapping.latest_start_s([(10.0, "a"), (20.0, "b")]) == 9.0


def test_while_all_are_far_ahead_the_one_runs_that_makes_room_for_longest() -> None:
    world = World(1000)
    popular, rare = world.activate("popular", 60), world.activate("rare", 60)
    for model in (popular, rare):
        model.time.learn(1, 0, 0.02)
        model.seqs.clear()
    for now in range(10):
        world.ask(popular, f"p{now}", float(now))
    world.ask(rare, "r", 9.0)
    lines = [(10.0 + EASE_S, 1, "popular"), (11.0 + EASE_S, 2, "rare")]
    assert world.swapping.turn(lines, 9.5, False) == (False, "rare")
    assert world.swapping.turn(lines, 10.5, False) == (False, "popular"), "least headroom"
    assert World(10, rotates=False).swapping.favourite(["popular"], 0.0) is None


def test_a_deadlock_ends_where_models_without_requests_make_room_first() -> None:
    """The holder of the blocks is absent; of those there, the one that nothing asks for leaves."""
    world = World(100)
    models = {name: world.activate(name, 40) for name in ("holder", "idle", "asked")}
    for number, name in enumerate(("idle", "asked")):
        world.ask(models[name], f"r{number}", 0.0)
    world.plan(0.0)
    for name in ("idle", "asked"):
        world.arrive(name)
    del models["idle"].seqs["r0"]
    world.ask(models["holder"], "r2", 0.0)
    actions = world.swapping.break_deadlock()
    world.carry_out(actions)
    assert actions == [Release("idle"), Fetch("holder")]
