"""Which lane of a slice a model's steps run in (ours).

    resident     models whose weights are in the slice's memory, as far as is known
    streaming    all others: what they read comes over a link

Of a model whose weights are kept as a whole, the slice's memory knows which it is
(`policy.weights.weight_swapping`). Of others, their last step shows it.

A step that streams takes as long as a hundred others. In one lane, all of these would wait for it.
In lanes of their own, each takes little from the other: a stream needs few SMs. Steps of a lane run
one after another. So at most one model streams at a time, and it has all of the link that C2CServe
(section 6.2) would divide among several.
"""

from collections.abc import Callable, Iterable, Sequence

from c2cserve.core.step import LANES, Lane, Step

STREAMED_BYTES = 64 << 20
"""A step that reads more over a link belongs in the streaming lane. A host's link brings so much in
about a millisecond."""


class Lanes:
    def __init__(self, count: int) -> None:
        """`count`: 1 or 2. Where there is one lane, all steps run in it."""
        self._names = LANES[:count]
        self.only: Lane | None = LANES[0] if count == 1 else None
        """The lane of all models, where there is one."""
        self._resident: set[str] = set()
        """Models whose last step found its weights in the slice's memory."""
        self.late_ran: dict[Lane, bool] = dict.fromkeys(self._names, False)
        """Whether a lane's last step was a late model's."""
        self.short: Lane | None = None
        """The lane in which a decode found no block when steps were last planned."""

    def in_order(self) -> Sequence[Lane]:
        """Return the lanes in the order in which their steps are planned.

        A lane that is short of memory goes first, and keeps the other one from going on. Requests
        with a step under way cannot be preempted for it.
        """
        if self.short is None:
            return self._names
        return (self.short, *(name for name in self._names if name != self.short))

    def stuck(self, in_flight: Iterable[Step], streams: Callable[[str], bool | None]) -> bool:
        """Return whether resident models cannot run, and no step in flight will change that.

        Steps of models that stream may go on for minutes beside a deadlock of the other lane, so
        they do not count. A lane that is short of memory does wait for them.
        """
        return self.short is None and all(
            step.lane != self._names[0] and streams(step.model) is not False for step in in_flight
        )

    def of(self, model: str, streams: bool | None = None) -> Lane:
        """Return the lane for the model's next step. `streams`: whether it reads its weights over a
        link. None: not known, as its last step did. Steps of an unknown model may stream."""
        if streams is None:
            streams = model not in self._resident
        return self._names[-1 if streams else 0]

    def landed(self, model: str, streamed_bytes: int) -> None:
        """Note that a step of the model has ended, which read so much over a link."""
        if streamed_bytes <= STREAMED_BYTES:
            self._resident.add(model)
        else:
            self._resident.discard(model)

    def forget(self) -> None:
        """Forget where weights are: a step has failed, and memory for weights may be built anew."""
        self._resident.clear()
