"""What the thread of a live slice does for its steps, one thing at a time.

    thread  | others, launch 1 | others, launch 2 |          | others, launch 3 |
    GPU                        [ step 1 ......... ][ step 2 ................... ][ step 3 ....

A slice has one such thread for both of its lanes. It decides, builds batches and launches them, and
hands tokens on. With two steps in flight that is hidden as long as it takes less than the GPU does.

A decode step is launched as a whole. Of a step with prompts the GPU begins with the first kernel,
while the thread launches the others. It ends no sooner than the last one is launched:

    thread  | others, batch | launch, 13 ms ....... |      | others, batch | launch, 13 ms ....... |
    GPU     [ step 1 ........ ][ 5 ms of kernels .. ]                      [ 20 ms of kernels ......
"""

from dataclasses import dataclass, replace

from c2cserve.core.step import LANES, Lane, Step
from c2cserve.sim.world.tables import Points, interpolate


@dataclass(frozen=True, slots=True)
class HostTimes:
    """Mean seconds of the thread for a step, by the kinds of steps that a server counts."""

    prefill_batch_s: float
    """Building the batch of a step in which some sequence has several tokens,"""
    prefill_launch: Points
    """and launching its kernels: (new tokens, seconds). Few tokens take other kernels than many,
    and longer."""
    decode_s: float
    """Both, of any other step after one of the same model,"""
    switched_s: float
    """and after one of another model."""
    others_s: float
    """All else: decisions, outcomes, messages."""

    def launch_s(self, tokens: int) -> float:
        """Return the seconds of launching a step of prompts with so many new tokens."""
        return interpolate(self.prefill_launch, min(tokens, self.prefill_launch[-1][0]))

    def within(self, decode_s: float) -> "HostTimes":
        """Return these times where decode steps were measured to follow one another every
        `decode_s`: the thread took no longer for one. Counters say more if they include what
        happens once, as captures of graphs."""
        share = min(1.0, decode_s / (self.decode_s + self.others_s))
        return replace(
            self, decode_s=share * self.decode_s, switched_s=share * self.switched_s,
            others_s=share * self.others_s,
        )  # fmt: skip


class HostThread:
    def __init__(self, times: HostTimes) -> None:
        self._times = times
        self._free_s = 0.0
        """When it has done all that it was given."""
        self._last_models: dict[Lane, str] = {}
        self._launched: dict[int, tuple[Lane, float, float]] = {}
        """Steps that have not ended -> lane, and when their launch began and ended."""
        self._ended_s: dict[Lane, float] = dict.fromkeys(LANES, 0.0)
        """When the last step of each lane ended."""

    def launch(self, step: Step, now: float) -> float:
        """Launch a step that was decided now. Return when the GPU can begin with it."""
        times = self._times
        began_s = max(now, self._free_s) + times.others_s
        switched = self._last_models.get(step.lane, step.model) != step.model
        self._last_models[step.lane] = step.model
        if any(part.tokens > 1 for part in step.seqs):
            begins_s = began_s + times.prefill_batch_s
            self._free_s = begins_s + times.launch_s(sum(part.tokens for part in step.seqs))
        else:
            begins_s = began_s + (times.switched_s if switched else times.decode_s)
            self._free_s = begins_s
        self._launched[step.id] = step.lane, began_s, self._free_s
        return begins_s

    def launched_s(self, step_id: int) -> float:
        """Return when the last kernel of a step is launched. The step has not ended."""
        return self._launched[step_id][2]

    def ended(self, step_id: int, now: float) -> float:
        """Note the end of a step. Return its time as a live slice learns it: from its launch on, or
        from the end of the step before."""
        lane, launched_s, _ = self._launched.pop(step_id)
        took_s = now - max(launched_s, self._ended_s[lane])
        self._ended_s[lane] = now
        return took_s
