"""Where the time of a slice's steps goes, by kind of step.

    host   batch | launch |       another step's      | wait | completion
    GPU              [  compute ....................... ]

Times of the host are those of the slice's thread. On a CPU slice the launch is the computation.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from c2cserve.core.step import Step

StepKind = Literal["prefill", "decode", "switched"]
"""`prefill`: a step in which some sequence has several tokens. `switched`: another step, of another
model than the step before in its lane. `decode`: all others."""

KINDS: tuple[StepKind, ...] = ("prefill", "decode", "switched")


def kind_of(step: Step, *, switched: bool) -> StepKind:
    if any(part.tokens > 1 for part in step.seqs):
        return "prefill"
    return "switched" if switched else "decode"


def zeros() -> dict[StepKind, float]:
    return dict.fromkeys(KINDS, 0.0)


class StepTimer(Protocol):
    """Measures for how long steps of one lane occupy what computes them."""

    def begin(self, kind: StepKind) -> None:
        """Note that a step, or a part of one, is about to be launched."""
        ...

    def end(self) -> None:
        """Note that it is launched. A part that failed has no end, and is not measured."""
        ...

    def read(self) -> Mapping[StepKind, float]:
        """Return the seconds of all steps that are known to be over. Does not wait."""
        ...


class InlineTimer:
    """A `StepTimer` where a step is over when it is launched."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._kind: StepKind = "decode"
        self._began_s = 0.0
        self._seconds = zeros()

    def begin(self, kind: StepKind) -> None:
        self._kind, self._began_s = kind, self._clock()

    def end(self) -> None:
        self._seconds[self._kind] += self._clock() - self._began_s

    def read(self) -> Mapping[StepKind, float]:
        return self._seconds


@dataclass(slots=True)
class StepCosts:
    """Steps since the start, and the seconds that the slice's thread spent on them."""

    steps: dict[StepKind, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    batch_s: dict[StepKind, float] = field(default_factory=zeros)
    """Building batches, and enqueuing their way to the device."""
    launch_s: dict[StepKind, float] = field(default_factory=zeros)
    completion_s: dict[StepKind, float] = field(default_factory=zeros)
    """Reading samples, and reporting tokens and outcomes."""
    wait_s: float = 0.0
    """Waiting for the end of a step whose tokens were needed on the host."""

    @property
    def collected_s(self) -> float:
        """Seconds for outcomes. They may lie within the preparation of another step."""
        return self.wait_s + sum(self.completion_s.values())
