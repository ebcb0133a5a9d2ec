"""Alpha of a live slice: what its steps moved goes to the policy, and what that sets changes them.

Here steps take as long as a hybrid GEMM whose link and HBM times are known.
"""

from dataclasses import dataclass, field
from pathlib import Path

import pytest
from example_counts import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st

from c2cserve.core.actions import BaselineSliceAction, RunStep, SetAlpha
from c2cserve.core.events import (
    Activated,
    ChunkCost,
    ChunksProfiled,
    GemmsMeasured,
    SeqOutcome,
    SliceEvent,
    StepDone,
    StepFailed,
    StepParked,
    Submitted,
)
from c2cserve.core.machine import GpuShare, Slice
from c2cserve.core.model import ModelSpec
from c2cserve.core.request import Request, Slo
from c2cserve.core.step import SeqStep, Step
from c2cserve.policy.baselines.c2cserve.alpha import AlphaSettings
from c2cserve.policy.by_name import hybrid_alpha, slice_policy
from c2cserve.policy.slice.policy import SlicePolicy
from c2cserve.runtime.record import Record
from c2cserve.runtime.replay import RecordLines, replay
from c2cserve.serving.worker.hybrid_steps import HybridSteps, LinkUse, SliceRates

NAME = "c2cserve-published"
RATES = SliceRates(host=50e9, peer=400e9, hbm=2000e9)
MODEL = ModelSpec("m", 1 << 30, 4, 16 * 1024, 1 << 20)
SLICE = Slice(
    "gpu0.0", "green", (0,), kv_bytes=1 << 30, slab_bytes=1 << 20, max_batch=8,
    max_step_tokens=2048, gpu=GpuShare("GPU-0", 132), hbm_bytes=1 << 30, link="pcie0",
    link_bytes_per_s=50e9,
)  # fmt: skip


@dataclass
class Plant:
    """Seconds of a step on its own link and HBM at full rate."""

    link_s: float
    rereads_s: float
    hbm_s: float
    partials_s: float

    def moved_s(self, alpha: float) -> tuple[float, float]:
        return self.link_s + alpha * self.rereads_s, self.hbm_s + (1 - alpha) * self.partials_s

    def took_s(self, alpha: float, neighbours: float) -> float:
        """Return a step's time while neighbours take a share of the link."""
        link_s, hbm_s = self.moved_s(alpha)
        return max(link_s / (1.0 - neighbours), hbm_s)


@dataclass
class LiveSlice:
    """A slice's loop with a plant for an engine: one model, one endless request."""

    plant: Plant
    neighbours: float = 0.0
    record: Record | None = None
    name: str = NAME
    alpha: float = 0.0
    set: list[float] = field(default_factory=list[float])
    measured: list[GemmsMeasured] = field(default_factory=list[GemmsMeasured])
    steps: list[Step] = field(default_factory=list[Step])

    def __post_init__(self) -> None:
        self.now = 0.0
        self.alpha = hybrid_alpha(self.name) or 0.0
        self.policy: SlicePolicy[BaselineSliceAction] = slice_policy(self.name, SLICE, 1)
        link = LinkUse()
        link.note("gpu0.1", self.neighbours)
        self.meter = HybridSteps("gpu0.0", RATES, link, self._report)
        self.meter.attached(MODEL)
        request = Request("r", "m", 1, 1 << 19, 0.0, Slo(1.0, 0.1))
        self.events: list[SliceEvent] = [Activated(MODEL), Submitted(request)]

    def _report(self, event: SliceEvent | None, deltas: object) -> None:
        if event is not None:
            self.events.append(event)
        if isinstance(event, GemmsMeasured):
            self.measured.append(event)

    def tick(self) -> None:
        events, self.events = self.events, []
        for event in events:
            self.policy.apply(event)
        actions = list(self.policy.decide(self.now))
        if self.record is not None:
            self.record(self.now, events, actions)
        for action in actions:
            if isinstance(action, SetAlpha):
                self.alpha = action.alpha
                self.set.append(action.alpha)
            elif isinstance(action, RunStep):
                self._run(action.step)

    def _run(self, step: Step) -> None:
        self.steps.append(step)
        self.meter.begin(step)
        took_s = self.plant.took_s(self.alpha, self.neighbours)
        link_s, hbm_s = self.plant.moved_s(self.alpha)
        self.now += took_s
        outcomes = tuple(SeqOutcome(part.request_id, 1, False) for part in step.seqs if part.emits)
        done = StepDone(
            step.id, outcomes, took_s, 1, round(link_s * RATES.peer), round(link_s * RATES.peer),
            round(hbm_s * RATES.hbm),
        )  # fmt: skip
        self.meter.report(done, ())


seconds = st.floats(0.02, 2.0)
plants = st.builds(Plant, seconds, seconds, seconds, seconds)


@settings(max_examples=examples(60), deadline=None)
@example(Plant(0.25, 0.25, 1.0, 1.0), 0.7)
@given(plants, st.sampled_from([0.0, 0.3, 0.7]))
def test_alpha_finds_the_balance_of_link_and_hbm(plant: Plant, neighbours: float) -> None:
    """The dead band is one of the whole link's use. It is a larger part of what neighbours leave:
    a step waits for HBM while `1 - (neighbours + link_s / took_s) < tau`."""
    slice_ = LiveSlice(plant, neighbours)
    for _ in range(400):
        slice_.tick()
    best_s = min(plant.took_s(i / 256, neighbours) for i in range(257))
    took_s = plant.took_s(slice_.alpha, neighbours)
    assert took_s <= 1.05 * best_s / (1 - AlphaSettings().tau / (1 - neighbours))
    for one in slice_.measured:
        assert 0.0 <= one.hbm_utilization <= 1.0
        assert neighbours <= one.link_utilization <= 1.0


@pytest.mark.parametrize(("name", "alpha"), [("0", 0.0), ("0.5", 0.5), ("1", 1.0)])
def test_a_fixed_alpha_stays(name: str, alpha: float) -> None:
    slice_ = LiveSlice(Plant(0.01, 0.01, 0.1, 0.5), name=f"c2cserve-alpha-{name}")
    for _ in range(60):
        slice_.tick()
    assert (slice_.alpha, slice_.set) == (alpha, [])
    assert slice_.measured


def test_observations_and_alpha_are_recorded_and_replay(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    arguments = {"slice": SLICE, "max_in_flight": 1, "policy": NAME}
    record = Record(path, "gpu0.0/1", "slice", arguments)
    slice_ = LiveSlice(Plant(0.01, 0.02, 0.1, 0.5), record=record)
    slice_.events.insert(1, ChunksProfiled("m", (ChunkCost(16, 0.1, 0.05),)))
    for _ in range(100):
        slice_.tick()
    record.close()
    assert slice_.set
    lines = [line for _, line in RecordLines(path)]
    events = {kind for line in lines for kind, _ in line.get("events", ())}
    assert {"ChunksProfiled", "GemmsMeasured", "StepDone"} <= events
    assert any(kind == "SetAlpha" for line in lines for kind, _ in line.get("actions", ()))
    assert replay(path).equal


def test_our_own_policy_sets_no_alpha() -> None:
    slice_ = LiveSlice(Plant(0.01, 0.01, 0.1, 0.5), name="c2cserve")
    slice_.events[0] = Activated(MODEL, False)
    for _ in range(60):
        slice_.tick()
    assert slice_.set == []


# ---- what is measured ---------------------------------------------------------------------------


def a_step(number: int = 1, start: int = 100, tokens: int = 1) -> Step:
    return Step(number, "m", (SeqStep("r", start, tokens, (), fresh=False, emits=True),))


def meter(link: LinkUse | None = None) -> tuple[HybridSteps, list[SliceEvent]]:
    found: list[SliceEvent] = []

    def report(event: SliceEvent | None, _deltas: object) -> None:
        assert event is not None
        found.append(event)

    made = HybridSteps("s", RATES, link or LinkUse(), report)
    made.attached(MODEL)
    return made, found


def test_bytes_over_their_rates_and_the_time_are_shares() -> None:
    """1 GB of host and 4 GB of a peer's memory, and 20 GB of HBM, in 0.1 s."""
    made, found = meter()
    made.begin(a_step())
    made.report(StepDone(1, (), 0.1, 1, 5 * 10**9, 4 * 10**9, 20 * 10**9), ())
    [done, measured] = found
    assert isinstance(done, StepDone)
    assert isinstance(measured, GemmsMeasured)
    assert (measured.model, measured.latency_s) == ("m", 0.1)
    assert measured.link_utilization == pytest.approx((1 / 50 + 4 / 400) / 0.1)
    kv = (100 + 2) * MODEL.kv_block_bytes // 16
    assert measured.hbm_utilization == pytest.approx((20e9 + kv) / 2000e9 / 0.1)


def test_a_neighbour_counts_while_it_computes() -> None:
    link = LinkUse()
    assert link.note("other", 0.4) == 0.4
    made, found = meter(link)
    for number in (1, 2, 3):
        made.begin(a_step(number))
        made.report(StepDone(number, (), 1.0, 1, 25 * 10**9), ())
        if number == 2:
            link.rests("other")
    shares = [one.link_utilization for one in found if isinstance(one, GemmsMeasured)]
    assert shares == pytest.approx([0.9, 0.9, 0.5])
    made.rests()
    assert link.note("other", 0.1) == pytest.approx(0.1)


def test_steps_that_failed_waited_or_did_not_run_are_left_out() -> None:
    made, found = meter()
    for number in (1, 2, 3):
        made.begin(a_step(number))
    made.report(StepFailed(1, "no"), ())
    made.report(StepParked(2), ())
    made.report(StepDone(2, (), 1.0), ())
    made.report(StepDone(3, (), 0.0, 0), ())
    assert not any(isinstance(one, GemmsMeasured) for one in found)
    assert len(found) == 4
