"""A slice's policy that a test drives by hand."""

from collections.abc import Sequence

from slice_cases import small_slice, spec

from c2cserve.core.actions import RunStep, SliceAction
from c2cserve.core.events import Activated, SeqOutcome, SliceEvent, StepDone, StepFailed
from c2cserve.core.step import Step
from c2cserve.policy.slice.policy import SlicePolicy

REASON = "RuntimeError: no"


class Hand:
    """A slice whose steps end when the test says so."""

    def __init__(self, *specs: str, slabs: int = 16, max_in_flight: int = 1, **more: int) -> None:
        self.policy = SlicePolicy(small_slice(slabs, **more), max_in_flight)
        self.now = 0.0
        self.tell(*(Activated(spec(name)) for name in specs or ("m",)))

    def tell(self, *events: SliceEvent) -> Sequence[SliceAction]:
        for event in events:
            self.policy.apply(event)
        return self.policy.decide(self.now)

    def step(self, *events: SliceEvent) -> Step:
        """The one step that these events lead to."""
        [action] = self.tell(*events)
        assert isinstance(action, RunStep)
        return action.step

    def done(self, step: Step, took_s: float = 0.01, finished: Sequence[str] = ()) -> StepDone:
        outcomes = [
            SeqOutcome(part.request_id, 1, part.request_id in finished)
            for part in step.seqs if part.emits
        ]  # fmt: skip
        return StepDone(step.id, tuple(outcomes), took_s)


def names(step: Step) -> list[str]:
    return [part.request_id for part in step.seqs]


def failed(step: Step) -> StepFailed:
    return StepFailed(step.id, REASON)
