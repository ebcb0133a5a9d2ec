"""Alpha finds the balance of link and HBM whatever the contention does, and then stays."""

from dataclasses import dataclass
from itertools import pairwise

from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from c2cserve.policy.baselines.c2cserve.alpha import (
    VARIANTS,
    AlphaControl,
    AlphaSettings,
    GemmSample,
)

STEPS = 400
"""Samples within which alpha has to have settled: at most 32 steps of 1/32, and their settling."""


@dataclass(frozen=True)
class Plant:
    """A hybrid GEMM as section 3.2.1 describes it: what grows and falls with alpha, in seconds of
    the link and of HBM when nobody else is there."""

    link_s: float
    rereads_s: float
    hbm_s: float
    partials_s: float
    compute_s: float

    def run(self, alpha: float, contention: float) -> GemmSample:
        """`contention`: how many share the link."""
        link_s = (self.link_s + alpha * self.rereads_s) * contention
        hbm_s = self.hbm_s + (1 - alpha) * self.partials_s
        took_s = max(link_s, hbm_s, self.compute_s)
        return GemmSample(took_s, hbm_s / took_s, link_s / took_s)

    def best_s(self, contention: float) -> float:
        return min(self.run(i / 4096, contention).latency_s for i in range(4097))


seconds = st.floats(0.01, 10.0)
plants = st.builds(Plant, seconds, seconds, seconds, seconds, seconds)
contentions = st.lists(st.floats(1.0, 7.0), min_size=1, max_size=5)
budgets = st.sampled_from([0.0, 0.1, 1.0, 100.0])


@settings(max_examples=examples(150), deadline=None)
@given(plants, contentions, budgets)
def test_converges_after_every_step_of_contention(
    plant: Plant, steps: list[float], budget_s: float
) -> None:
    control = AlphaControl()
    for contention in steps:
        path = [
            control.sample(plant.run(control.alpha, contention), budget_s) for _ in range(STEPS)
        ]
        settled = path[-STEPS // 8 :]
        assert max(settled) - min(settled) <= 1 / VARIANTS, "it oscillates"
        took_s = plant.run(control.alpha, contention).latency_s
        assert took_s <= plant.best_s(contention) / (1 - AlphaSettings().tau) * 1.02


@settings(max_examples=examples(150), deadline=None)
@given(plants, contentions, budgets)
def test_turns_get_rare_and_small(plant: Plant, steps: list[float], budget_s: float) -> None:
    """After a step of contention alpha goes one way, then swings with halving amplitude."""
    control = AlphaControl()
    for contention in steps:
        path = [control.alpha]
        for _ in range(STEPS):
            path.append(control.sample(plant.run(control.alpha, contention), budget_s))
        moves = [b - a for a, b in pairwise(path) if a != b]
        turns = [abs(b) for a, b in pairwise(moves) if a * b < 0]
        assert all(later <= sooner for sooner, later in pairwise(turns))
        assert sum(turn > 1 / VARIANTS for turn in turns) <= 3


@given(
    st.floats(0, 1), st.floats(0, 1),
    st.lists(st.tuples(st.floats(0, 2), st.floats(0, 1), st.floats(0, 1)), max_size=60),
)  # fmt: skip
def test_steps_are_bounded_and_follow_the_imbalance(
    link: float, hbm: float, noise: list[tuple[float, float, float]]
) -> None:
    control, config = AlphaControl(), AlphaSettings()
    for latency_s, a, b in noise:
        before = control.alpha
        after = control.sample(GemmSample(latency_s, a, b), 1.0)
        assert 0.0 <= after <= 1.0
        assert abs(after - before) <= config.fast
        assert abs(control.variant - after) <= 0.5 / VARIANTS
    before = control.alpha
    for _ in range(40):
        control.sample(GemmSample(0.5, hbm, link), 1.0)
    if link - hbm > 2 * config.tau:
        assert control.alpha < before or control.alpha == 0.0
    if hbm - link > 2 * config.tau:
        assert control.alpha > before or control.alpha == 1.0


def test_noise_within_the_dead_band_moves_nothing() -> None:
    control = AlphaControl()
    for i in range(100):
        control.sample(GemmSample(1.0, 0.5 + 0.04 * (-1) ** i, 0.5), 0.1)
    assert control.alpha == 0.0


def test_a_late_gemm_is_moved_faster() -> None:
    late, punctual = AlphaControl(), AlphaControl()
    for _ in range(30):
        late.sample(GemmSample(2.0, 1.0, 0.2), 1.0)
        punctual.sample(GemmSample(0.5, 1.0, 0.2), 1.0)
    assert late.alpha > punctual.alpha > 0.0
