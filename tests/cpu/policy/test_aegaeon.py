"""Aegaeon's turns: quotas by the formula, groups of prompts, and no model waits for ever."""

from dataclasses import replace
from itertools import pairwise

import pytest
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from slice_cases import request, small_slice, spec

from c2cserve.core.actions import Fetch, Release, RunStep
from c2cserve.core.events import Activated, Fetched, SeqOutcome, StepDone, Submitted
from c2cserve.core.machine import GpuShare, Slice
from c2cserve.core.step import Step
from c2cserve.policy.baselines.aegaeon.turns import GROUP_MOST, Q_MAX_S, quotas
from c2cserve.policy.baselines.compose import live_slice_policy

paces = st.lists(st.tuples(st.floats(0.02, 0.5), st.floats(0.001, 0.2)), min_size=1, max_size=12)


@given(paces, st.floats(0.01, 20.0))
def test_turns_are_as_published(drawn: list[tuple[float, float]], switch_s: float) -> None:
    turns = quotas(drawn, switch_s)
    ratios = [step_s / tpot_s for tpot_s, step_s in drawn]
    alpha = max(switch_s * max(ratios) / Q_MAX_S + sum(ratios), 0.5)
    for turn, ratio in zip(turns, ratios, strict=True):
        assert turn == pytest.approx(switch_s * ratio / (alpha - sum(ratios)))
        assert 0.0 < turn <= Q_MAX_S * 1.000001
    # In alpha times the round's seconds, clients read what all turns have computed.
    round_s = switch_s + sum(turns)
    for turn, (tpot_s, step_s) in zip(turns, drawn, strict=True):
        assert turn / step_s * tpot_s == pytest.approx(round_s / alpha, rel=1e-6)


def test_a_turn_is_one_step_where_a_switch_costs_nothing_or_speeds_are_unknown() -> None:
    assert quotas([(0.1, 0.01), (0.2, 0.01)], 0.0) == [0.0, 0.0]
    assert quotas([(0.1, 0.0)], 1.0) == [0.0]


class Driven:
    """A slice on virtual time. Each step takes 10 ms, a load half a second."""

    def __init__(self, slice_: Slice, *names: str, keep: bool = False) -> None:
        self.policy = live_slice_policy("aegaeon", slice_, 1)
        self.now, self.loads = 0.0, 0
        self.ran: list[str] = []
        self.left: dict[str, int] = {}
        for name in names:
            self.policy.apply(Activated(spec(name), keep))

    def submit(self, *ids: tuple[str, str]) -> None:
        for name, model in ids:
            self.left[name] = 200
            self.policy.apply(Submitted(request(name, model, new=200, at=self.now)))

    def run(self, most: int) -> list[str]:
        """Return the models of so many steps; fewer if there is nothing left."""
        self.ran = []
        idle = 0
        while len(self.ran) < most and idle < 50:
            actions = self.policy.decide(self.now)
            steps = [one.step for one in actions if isinstance(one, RunStep)]
            idle = 0 if steps else idle + 1
            self.now += 0.01
            for action in actions:
                if isinstance(action, Fetch):
                    self.loads += 1
                    self.policy.apply(Fetched(action.model, 0.5))
                elif isinstance(action, Release):
                    assert not any(step.model == action.model for step in steps)
            for step in steps:
                self._done(step)
        return self.ran

    def _done(self, step: Step) -> None:
        self.ran.append(step.model)
        outcomes: list[SeqOutcome] = []
        for part in step.seqs:
            if part.emits:
                self.left[part.request_id] -= 1
                ended = not self.left[part.request_id]
                outcomes.append(SeqOutcome(part.request_id, 1, ended))
        self.policy.apply(StepDone(step.id, tuple(outcomes), 0.01))


def test_prompts_go_first_in_groups_and_decodes_take_turns() -> None:
    driven = Driven(small_slice(64), "a", "b")
    driven.submit(("a0", "a"), ("b0", "b"), ("b1", "b"))
    assert driven.run(3) == ["a", "b", "b"]
    turns = driven.run(8)
    assert turns.count("a") == turns.count("b") == 4, "one step each"
    driven.submit(("a1", "a"))
    assert driven.run(1) == ["a"]


def test_a_group_is_bounded_so_that_other_prompts_do_not_wait() -> None:
    driven = Driven(small_slice(256, max_batch=32), "a", "b")
    driven.submit(*((f"a{i}", "a") for i in range(GROUP_MOST + 4)))
    driven.now += 0.001
    driven.submit(("b0", "b"))
    order = driven.run(GROUP_MOST + 6)
    assert order[:GROUP_MOST] == ["a"] * GROUP_MOST
    assert "b" in order


def gpu_slice(models: int) -> Slice:
    """Room for the weights of so many models."""
    weights = spec("a").weight_bytes
    small = small_slice(64)
    return replace(
        small, kind="gpu", gpu=GpuShare("g", 100), link_bytes_per_s=2.0 * weights,
        hbm_bytes=small.kv_bytes + models * weights,
    )  # fmt: skip


def test_where_a_switch_costs_time_turns_are_long() -> None:
    """Two models with room for one: loads are few beside steps."""
    driven = Driven(gpu_slice(1), "a", "b", keep=True)
    driven.submit(("a0", "a"), ("b0", "b"))
    order = driven.run(400)
    switches = sum(one != other for one, other in pairwise(order))
    assert {"a", "b"} == set(order)
    assert 2 <= switches <= 40
    assert driven.loads <= switches + 2


@settings(max_examples=examples(30), deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 30)), min_size=1, max_size=25),
       st.integers(1, 3), st.booleans())  # fmt: skip
def test_every_request_gets_tokens(drawn: list[tuple[str, int]], room: int, gpu: bool) -> None:
    slice_ = gpu_slice(room) if gpu else small_slice(64)
    driven = Driven(slice_, "a", "b", "c", keep=gpu)
    for number, (model, steps) in enumerate(drawn):
        driven.submit((f"{model}{number}", model))
        driven.run(steps)
    driven.run(100_000)
    assert not any(driven.left.values())
