"""What hybrid GEMMs of a slice's steps used of link and HBM, for Algorithm 2 of C2CServe.

step of a model             bytes over links, bytes of HBM, seconds
divided by the rates        its shares of the slice's HBM and of the link
+ slices that compute now   the share of the link in use: `events.GemmsMeasured`
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from c2cserve.core.events import GemmsMeasured, SliceEvent, StepDone, StepFailed, StepParked
from c2cserve.core.model import ModelSpec
from c2cserve.core.request import BLOCK_TOKENS, Delta
from c2cserve.core.step import Step


class Report(Protocol):
    """Takes what the engine reports: `serving.worker.world.WorkerWorld.report`."""

    def __call__(self, event: SliceEvent | None, deltas: Sequence[Delta], /) -> None: ...


@dataclass(frozen=True, slots=True)
class SliceRates:
    """Bytes per second, as the profile has them."""

    host: float
    """Weights from host memory; slices of a GPU share it."""
    peer: float
    """Weights from another GPU's memory; 0 where none lends any."""
    hbm: float
    """The slice's share of HBM."""


class LinkUse:
    """Shares of a GPU's link that its slices use while they compute. Threads of one process note
    theirs, so each note is one operation on a dictionary."""

    def __init__(self) -> None:
        self._shares: dict[str, float] = {}

    def note(self, slice_id: str, share: float) -> float:
        """Note the share that a slice used in its last step. Return that of all slices, 0..1."""
        self._shares[slice_id] = share
        return min(1.0, sum(list(self._shares.values())))

    def rests(self, slice_id: str) -> None:
        """Note that a slice has no step in flight."""
        self._shares.pop(slice_id, None)


@dataclass(slots=True)
class _Begun:
    model: str
    kv_bytes: int
    parked: bool = False


class HybridSteps:
    """Adds `GemmsMeasured` to the reports of steps that are done.

    A step that was parked is left out: it waited for its weights most of the time.
    """

    def __init__(self, slice_id: str, rates: SliceRates, link: LinkUse, report: Report) -> None:
        self._slice_id, self._rates = slice_id, rates
        self._link, self._report = link, report
        self._kv_token_bytes: dict[str, int] = {}
        self._begun: dict[int, _Begun] = {}

    def attached(self, spec: ModelSpec) -> None:
        self._kv_token_bytes[spec.id] = spec.kv_block_bytes // BLOCK_TOKENS

    def begin(self, step: Step) -> None:
        """Note a step that is about to be submitted. Attention reads the KV of all tokens before
        it, and writes its own."""
        tokens = sum(part.start + 2 * part.tokens for part in step.seqs)
        kv_bytes = tokens * self._kv_token_bytes.get(step.model, 0)
        self._begun[step.id] = _Begun(step.model, kv_bytes)

    def rests(self) -> None:
        """Note that no step is in flight."""
        self._link.rests(self._slice_id)

    def report(self, event: SliceEvent | None, deltas: Sequence[Delta]) -> None:
        """Report what the executor does, and what was measured of it."""
        self._report(event, deltas)
        match event:
            case StepParked(step_id):
                self._begun[step_id].parked = True
            case StepFailed(step_id):
                del self._begun[step_id]
            case StepDone():
                begun = self._begun.pop(event.step_id)
                if event.times and event.compute_s > 0.0 and not begun.parked:
                    self._report(self._measured(begun, event), ())
            case _:
                pass

    def _measured(self, begun: _Begun, done: StepDone) -> GemmsMeasured:
        rates = self._rates
        link_s = (done.streamed_bytes - done.peer_bytes) / rates.host
        link_s += done.peer_bytes / rates.peer if done.peer_bytes else 0.0
        hbm_s = (done.hbm_bytes + begun.kv_bytes) / rates.hbm
        share = self._link.note(self._slice_id, min(1.0, link_s / done.compute_s))
        hbm = min(1.0, hbm_s / done.compute_s)
        return GemmsMeasured(begun.model, done.compute_s, hbm, share)
