"""One iteration on a slice: which sequences of one model run, and where their KV lies."""

from typing import Literal

from c2cserve.core.value import value

Lane = Literal["resident", "streaming"]
"""Where on a slice a step runs. Steps of a lane run one after another; lanes run side by side. In
the streaming lane are steps whose weights come over a link. They take seconds where others take
milliseconds, and leave nearly all of the slice to these."""

LANES: tuple[Lane, ...] = ("resident", "streaming")
"""A slice has the first one, or both."""


@value
class SeqStep:
    """One sequence's share of a step.

    Tokens `[start, start + tokens)` of the sequence are computed; those before `start` are in the
    KV cache. `new_blocks` are byte offsets into the slice's arena, appended to the sequence's block
    table. `fresh` first clears that table, at the first step and at a restart. `new_blocks` then
    begins with any blocks reused from the prefix cache. `emits` is true when the step reaches the
    sequence's last token and so samples the next one. A step in flight may still be sampling that
    last token."""

    request_id: str
    start: int
    tokens: int
    new_blocks: tuple[int, ...]
    fresh: bool
    emits: bool


@value
class Step:
    id: int
    model: str
    seqs: tuple[SeqStep, ...]
    kv_end_bytes: int | None = None
    """All KV in the slice's arena lies below this offset, that of steps in flight too: what is
    beyond may hold weights meanwhile. None: it is not known."""
    lane: Lane = "resident"
    """All steps in flight of a model are in one lane."""

    @property
    def tokens(self) -> int:
        return sum(seq.tokens for seq in self.seqs)
