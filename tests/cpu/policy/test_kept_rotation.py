"""Rotation of KV on a slice that swaps weights: weights that are needed are no room for KV."""

from collections.abc import Sequence

from slice_cases import request

from c2cserve.core.actions import Fetch, Move, Release, RunStep, SliceAction
from c2cserve.core.events import Activated, Fetched, MoveDone, SeqOutcome, StepDone, Submitted
from c2cserve.core.machine import GpuShare, Slice
from c2cserve.core.model import ModelSpec
from c2cserve.policy.slice.policy import SlicePolicy

SLAB = 4096
SLICE = Slice(
    "s", "gpu", kv_bytes=100 * SLAB, slab_bytes=SLAB, max_batch=8, max_step_tokens=1024,
    gpu=GpuShare("g", 1), hbm_bytes=100 * SLAB, link="l", link_bytes_per_s=1e9,
    host_kv_bytes=1 << 30,
)  # fmt: skip


class Rotating:
    """A slice whose loads, moves and steps are over at once. A block takes a slab."""

    def __init__(self, **weights: int) -> None:
        """`weights`: slabs of each model."""
        self.policy = SlicePolicy(SLICE)
        self.actions: list[SliceAction] = []
        for name, slabs in weights.items():
            self.policy.apply(Activated(ModelSpec(name, slabs * SLAB, 1, SLAB, 1 << 14), keep=True))

    def ask(self, name: str, model: str, blocks: int, now: float) -> None:
        """A request whose prompt nearly fills so many blocks."""
        self.policy.apply(Submitted(request(name, model, prompt=16 * blocks - 8, new=500, at=now)))

    def run(self, now: float, ticks: int = 1) -> Sequence[SliceAction]:
        found: list[SliceAction] = []
        for i in range(ticks):
            for action in self.policy.decide(now + 1e-3 * i):
                found.append(action)
                match action:
                    case Fetch(model):
                        self.policy.apply(Fetched(model, 0.01))
                    case RunStep(step):
                        tokens = [part.request_id for part in step.seqs if part.emits]
                        outcomes = tuple(SeqOutcome(name, 1, finished=False) for name in tokens)
                        self.policy.apply(StepDone(step.id, outcomes, 0.001))
                    case Move(name, direction=direction):
                        self.policy.apply(MoveDone(name, direction))
                    case _:
                        pass
        return found


def paused(actions: Sequence[SliceAction]) -> list[str]:
    return [one.request_id for one in actions if isinstance(one, Move) and one.direction == "out"]


def test_kv_makes_room_for_kv_where_weights_have_the_rest() -> None:
    slice_ = Rotating(m=60)
    slice_.ask("first", "m", 30, 0.0)
    slice_.run(0.0, 2)
    slice_.ask("second", "m", 20, 0.1)
    actions = slice_.run(9.0, 2)
    assert paused(actions) == ["first"]
    assert not any(isinstance(one, Release) for one in actions)


def test_kv_does_not_come_in_before_its_weights() -> None:
    slice_ = Rotating(m=60, absent=60)
    slice_.ask("first", "m", 30, 0.0)
    slice_.run(0.0, 3)
    slice_.ask("second", "absent", 20, 0.1)
    for action in slice_.policy.decide(0.6):
        assert not isinstance(action, Fetch), "the model that is there is not far ahead"
        assert not isinstance(action, Move) or action.direction == "copy", "nothing would start"


def test_weights_without_requests_make_room_before_kv_does() -> None:
    slice_ = Rotating(m=30, idle=40)
    slice_.ask("i", "idle", 1, 0.0)
    [*_, step] = slice_.run(0.0, 2)
    assert isinstance(step, RunStep)
    slice_.policy.apply(Fetched("idle", 0.01))
    slice_.policy._leave(slice_.policy._seqs["i"])  # pyright: ignore
    slice_.ask("first", "m", 20, 0.1)
    slice_.run(0.1, 3)
    slice_.ask("second", "m", 30, 0.2)
    actions = slice_.run(9.0, 2)
    assert Release("idle") in actions
    assert paused(actions) == []
    steps = [action.step for action in actions if isinstance(action, RunStep)]
    assert "second" in {part.request_id for step in steps for part in step.seqs}
