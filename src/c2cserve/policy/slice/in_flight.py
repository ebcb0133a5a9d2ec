"""Steps of a slice between their launch and their end."""

from collections.abc import Iterable, Iterator
from math import inf
from typing import Protocol

from c2cserve.core.events import SeqOutcome, StepDone
from c2cserve.core.step import Lane, Step
from c2cserve.policy.slice.batching import ActiveModel, DecidedSteps, StepInFlight

_LEAD_S = 0.02
"""How long before the end of a step the next one is planned. It hides planning, launching, and the
message that the last step is done. But a request that arrives after it waits for one step more."""


class StepNumbers:
    """Numbers of a slice's steps, from 1."""

    def __init__(self) -> None:
        self._last = 0

    def take(self, count: int = 1) -> int:
        """Take so many numbers, and return the first."""
        first = self._last + 1
        self._last += count
        return first


class Lookahead(Protocol):
    """Decides several decode steps at once where single decisions would come to the same."""

    def decide(
        self, models: list[ActiveModel], step_ids: StepNumbers, now: float, late_ran: bool
    ) -> DecidedSteps | None: ...


class InFlight:
    def __init__(self) -> None:
        self._steps: dict[int, StepInFlight] = {}
        self.running = 0
        """Those that are not parked."""

    def __iter__(self) -> Iterator[StepInFlight]:
        return iter(self._steps.values())

    def __len__(self) -> int:
        return len(self._steps)

    def launched(self, steps: Iterable[StepInFlight]) -> None:
        for step in steps:
            self._steps[step.step.id] = step
            self.running += 1

    def landed(self, step_id: int) -> StepInFlight:
        step = self._steps[step_id]
        del self._steps[step_id]  # in compiled code `pop` takes several times as long
        self.running -= not step.parked
        return step

    def park(self, step_id: int) -> None:
        step = self._steps[step_id]
        self.running -= not step.parked
        step.parked = True

    def steps(self) -> list[Step]:
        return [one.step for one in self._steps.values()]

    def of(self, model: ActiveModel) -> list[StepInFlight]:
        return [step for step in self._steps.values() if step.model is model]

    def holds_up(self, model: ActiveModel, lane: Lane) -> bool:
        """Return whether a step in flight keeps the model from having one in the lane."""
        return any(
            step.model is model and (step.holds_up or step.step.lane != lane)
            for step in self._steps.values()
        )

    def parked(self, model: ActiveModel) -> bool:
        return any(step.parked and step.model is model for step in self._steps.values())

    def running_in(self, lane: Lane) -> int:
        """Return the number of the lane's steps that are not parked."""
        running = 0
        for step in self._steps.values():
            running += not step.parked and step.step.lane == lane
        return running

    def models(self) -> dict[str, float]:
        """Return the models with steps in flight, and in how many seconds these end at the latest,
        as far as is known. Steps of a lane run in the order of their launch."""
        ends_s: dict[str, float] = {}
        if not self._steps:
            return ends_s
        total_s: dict[Lane, float] = {}
        for one in self._steps.values():
            lane, name = one.step.lane, one.model.name
            total_s[lane] = total_s.get(lane, 0.0) + one.expected_s
            ends_s[name] = max(ends_s.get(name, 0.0), total_s[lane])
        return ends_s

    def next_plan_s(self, now: float, lane: Lane) -> float:
        """Return when to plan a lane's next step: at once if nothing runs there, else shortly
        before what runs ends. Requests that arrive until then can still join it. While step times
        are unknown, it is planned when the step has ended."""
        for first in self._steps.values():
            if not first.parked and first.step.lane == lane:
                if first.since_s is None:
                    first.since_s = now
                if not first.expected_s:
                    return inf
                return first.since_s + first.expected_s - _LEAD_S
        return now


def outcomes_of(step: Step, event: StepDone) -> list[SeqOutcome | None]:
    """Return the outcome of each sequence of a step that is done; None: it has none. They nearly
    always come in the step's order."""
    outcomes, at = event.outcomes, 0
    found: list[SeqOutcome | None] = []
    for part in step.seqs:
        if at < len(outcomes) and outcomes[at].request_id == part.request_id:
            found.append(outcomes[at])
            at += 1
        else:
            found.append(None)
    if at == len(outcomes):
        return found
    by_id = {outcome.request_id: outcome for outcome in outcomes}
    return [by_id.get(part.request_id) for part in step.seqs]
