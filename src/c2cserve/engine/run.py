"""A step between its submission and its outcome."""

from collections.abc import Generator
from dataclasses import dataclass, field

from torch import Tensor

from c2cserve.core.events import SeqOutcome
from c2cserve.core.request import Delta
from c2cserve.core.step import SeqStep, Step
from c2cserve.engine.moved import NOTHING_MOVED, MovedBytes
from c2cserve.engine.sequences import Sequence
from c2cserve.engine.step_costs import StepKind
from c2cserve.kernels.ops import Sample

Work = Generator[list[int], None, Sample]
"""A step from building its batch to the launch of sampling. It yields when weights are missing: the
groups that the pool lacks, none if layers have not arrived where steps read them."""


@dataclass(slots=True)
class Run:
    """A step under way."""

    step: Step
    kind: StepKind
    picked_s: float
    switched: bool
    parts: list[SeqStep] = field(default_factory=list[SeqStep])
    """The parts of requests that are still here when it starts."""
    seqs: list[Sequence] = field(default_factory=list[Sequence])
    sampled: list[Sequence] = field(default_factory=list[Sequence])
    """The sequences that get a token, in the order of the rows."""
    scored: list[tuple[SeqStep, Sequence, Tensor]] = field(
        default_factory=list[tuple[SeqStep, Sequence, Tensor]]
    )
    """The parts whose prompt tokens' log-probabilities are wanted, and their logits."""
    sample: Sample | None = None
    compute_s: float = 0.0
    moved: MovedBytes = NOTHING_MOVED
    """What its launches move."""
    launched_s: float = 0.0
    """The time when the launch of its last part began."""
    parked_since_s: float | None = None
    awaits_pool: bool = False
    """While it is parked: what it waits for is being loaded into the pool."""
    layers_there: int | None = None
    """The layers that had arrived when it looked last; None: no load was under way."""
    failed: str = ""
    """The reason why it was not launched or collected; it samples nothing then."""
    outcomes: list[SeqOutcome] = field(default_factory=list[SeqOutcome])
    deltas: list[Delta] = field(default_factory=list[Delta])

    def fail(self, reason: str) -> None:
        """Note that it samples nothing. Its requests begin anew."""
        self.failed = reason
        for seq in self.seqs:
            seq.lost = True

    def note_start(self, now: float) -> None:
        """Note when its requests started, for those that had not."""
        for seq in self.seqs:
            if seq.clock.started_s is None:
                seq.clock.started_s = self.picked_s
                seq.clock.switched = self.switched
                seq.clock.switch_s = now - self.picked_s


def pick_rows(run: Run, logits: Tensor) -> Tensor:
    """Return the rows of a step's logits [rows, V] that are sampled. Note for whom, and the rows
    that score prompts."""
    rows: list[int] = []
    row = 0
    for part, seq in zip(run.parts, run.seqs, strict=True):
        if seq.scores_prompt(part):
            run.scored.append((part, seq, logits[row : row + part.tokens]))
            row += part.tokens
        elif part.emits:
            row += 1
        if part.emits:
            run.sampled.append(seq)
            rows.append(row - 1)
    return logits if len(rows) == logits.shape[0] else logits[rows]


def emitting(run: Run) -> list[Sequence]:
    """Return the sequences that a step samples a token for, once its parts are taken."""
    return [seq for part, seq in zip(run.parts, run.seqs, strict=True) if part.emits]
