"""Everything policies can ask for."""

from typing import Literal

from c2cserve.core.step import Step
from c2cserve.core.value import value

# ---- controller -----------------------------------------------------------------------------


@value
class Dispatch:
    """Send the request to a slice on which its model is active."""

    request_id: str
    slice_id: str


@value
class Withdraw:
    """Take the request from its slice; its memory there is freed within one iteration."""

    request_id: str
    slice_id: str


@value
class Reject:
    """Refuse a request, as a rule before it has started. `status` is HTTP's. 429: it cannot meet
    its deadline, or the queue is full. 404: its model is being removed. 500: it kills its workers.
    503: draining, no slice, a model larger than the pool, or one that fails on every slice or
    failed to load."""

    request_id: str
    status: int
    reason: str
    retry_after_s: float = 1.0
    limit: str = ""
    """Which limit it met, of those that are counted: `queue_full`, `overload`, `patience`."""


@value
class Load:
    """Bring a model's weights into the pool."""

    model: str


@value
class Evict:
    """Drop a model's weights from the pool (never one in use)."""

    model: str


@value
class Activate:
    """Make the model an instance of the slice. Where its weights are loaded into the slice's memory
    first, what is dispatched meanwhile waits there for them (`events.InstanceReady`)."""

    model: str
    slice_id: str
    keep: bool = False
    """The slice loads its weights as a whole (`Fetch`), beside what computes there. Prompts use
    them as they arrive. It may drop them for others', and load them again. If false, steps read the
    weights where they lie."""


@value
class Deactivate:
    model: str
    slice_id: str


@value
class Recall:
    """Take the request from its slice to place it again, if it has no memory there yet. Then it
    comes back as `events.Recalled`, unless it ends first. Else it stays, and no event follows."""

    request_id: str
    slice_id: str
    unstarted: bool = True
    """Always true; records have it."""


@value
class Forget:
    """The model has drained: unload it everywhere and take it out of the catalogue."""

    model: str


@value
class Replace:
    """End the slice's process and start another one: nothing works on the slice any more. Its
    requests continue as after any loss (`events.SliceLost`)."""

    slice_id: str
    reason: str


@value
class Backlog:
    """How much waits in an overload, so that what would be refused on arrival can be refused before
    anything is done for it. Without throughput: there is no overload any more."""

    per_s: float = 0.0
    """Requests that are finished per second."""
    waiting: tuple[tuple[str, int], ...] = ()
    """Each tenant's requests that can still be in time."""
    models: tuple[str, ...] = ()
    """Versions that some of them wait for. Other models' requests may find places at once."""
    share: float = 0.5
    """The share of its TTFT target that a newcomer may be expected to wait for."""
    places: int = 0
    """How many requests the slices take."""


ClusterAction = (
    Dispatch | Withdraw | Reject | Load | Evict | Activate | Deactivate | Recall | Forget | Replace
    | Backlog
)  # fmt: skip
"""What the controller of a server carries out."""

# ---- controller, of published systems only --------------------------------------------------


@value
class ResizeKv:
    """Give the instance this much memory for KV (only where each has its own, sized in advance).
    In simulations it takes time, in which the instance computes nothing. A server's slices hand out
    one arena, so there it is done at once. Then comes `events.KvResized`."""

    model: str
    slice_id: str
    kv_bytes: int


@value
class Preempt:
    """Take the request from its slice, also if it runs. Its tokens stay and its KV goes. It comes
    back as `events.Recalled` unless it ends first."""

    request_id: str
    slice_id: str


BaselineClusterAction = ResizeKv | Preempt

# ---- slice ----------------------------------------------------------------------------------

Direction = Literal["copy", "out", "in"]
"""Where KV moves: to host memory while the request goes on, or because it leaves the slice; and
back."""


@value
class RunStep:
    """Run a step, or, with an `order`, several one after another. In `order`, 0 is `step` and the
    others number those in `then`. Each run takes the step's sequences one token further. Stop after
    the step in which a sequence ends. Stop at the end of the step under way when there is an event
    for the policy. (Only policies with a lookahead give an `order`.) All are decodes, of different
    models, with blocks for all tokens; each gets one `events.StepDone`, at the end of it all."""

    step: Step
    then: tuple[Step, ...] = ()
    order: tuple[int, ...] = ()


@value
class Drop:
    """Free what the executor holds for a request: withdrawn, or (`requeued`) to run again later,
    preempted or after a failed step. Then its tokens stay and only its block table goes."""

    request_id: str
    requeued: bool = False


@value
class Fail:
    """End the request with an error: its steps fail, also alone and on parts built anew."""

    request_id: str
    reason: str


@value
class Return:
    """Give the request back to the controller, with what it has drawn; nothing of it stays. Its
    model was given up, or the controller asked for it (`events.RecallAsked`)."""

    request_id: str


@value
class GiveUp:
    """Tell the controller that every request of the model fails here (`events.InstanceFailed`)."""

    model: str
    reason: str
    others_work: bool


@value
class Recover:
    """Tell the controller that a model which was given up works again."""

    model: str


@value
class Truncate:
    """The request cannot grow any more: the whole arena would not hold its next token. It ends here
    with what it has (finish reason length; an error if that is nothing)."""

    request_id: str


@value
class Move:
    """Copy KV of a request between the slice's arena and host memory: the blocks `first`,
    `first + 1` ... of its block table. All directions may be under way at once, one move of a
    request at a time; `events.MoveDone` follows, for an empty `blocks` too.

    `copy`: these blocks get a copy on the host, nothing else changes. `out`: these too, and all
    that follow hold nothing. The move clears the request's table. A block that is not among
    `blocks` may be written by its next owner at once. `in`: from the host's copies to these
    offsets; a `fresh` step that starts where the request was tells its new table. The host's copies
    go with the request, or with `Drop`.

    The copies of its first `shared` blocks are those of a cached prefix (`SavePrefix`). The request
    has none of its own of these, and `first` is never less but for `in`."""

    request_id: str
    direction: Direction
    first: int
    blocks: tuple[int, ...]
    kept: int = 0
    """`in`: so many of its first blocks keep their copies; the others' go when it is done."""
    kv_end_bytes: int | None = None
    """`in`: as `step.Step.kv_end_bytes`."""
    shared: int = 0
    ids: tuple[int, ...] = ()
    """`in`: what the shared blocks are called on the host."""


@value
class SavePrefix:
    """Copy blocks of a cached prefix from the slice's arena to host memory, beside what computes;
    then comes `events.PrefixMoved`. Nothing holds the blocks: what is copied of one that has been
    written to meanwhile is of no use, and gets an `actions.DropPrefix`."""

    move: int
    block_bytes: int
    ids: tuple[int, ...]
    """What the blocks are called on the host. None of them is there yet."""
    blocks: tuple[int, ...]
    """Offsets in the arena."""


@value
class BringPrefix:
    """Copy blocks back, to offsets that one request holds; then comes `events.PrefixMoved`. The
    host's copies stay."""

    move: int
    block_bytes: int
    ids: tuple[int, ...]
    blocks: tuple[int, ...]
    kv_end_bytes: int | None = None
    """The same as `step.Step.kv_end_bytes`."""


@value
class DropPrefix:
    """Free the host memory of blocks that were saved. No move of them is under way, and no request
    shares them (`Move.shared`)."""

    ids: tuple[int, ...]


@value
class Fetch:
    """Load the weights of an active model that is kept into the slice's memory, beside what
    computes; then comes `events.Fetched`. Its steps may be submitted at once: they use each layer
    when it has arrived, and are parked meanwhile (`events.StepParked`)."""

    model: str
    kv_end_bytes: int | None = None
    """KV that is written until the next step lies below it, as below `step.Step.kv_end_bytes`; the
    weights go above."""


@value
class Release:
    """Its weights are in the slice's memory no more: their place is free at once. A load under way
    ends, and no `events.Fetched` follows. Steps that wait for it fail."""

    model: str


SliceAction = (
    RunStep | Drop | Truncate | Fail | Return | GiveUp | Recover | Move | Fetch | Release
    | SavePrefix | BringPrefix | DropPrefix
)  # fmt: skip
"""What the slice of a server carries out."""

PrefixAction = SavePrefix | BringPrefix | DropPrefix
ExecutorAction = RunStep | Drop | Truncate | Fail | Return | Move | PrefixAction
"""Those that its executor carries out."""

# ---- slice, of published systems only -------------------------------------------------------


@value
class SetAlpha:
    """Hybrid GEMMs do this share of their columns output-stationary (0..1), from the model's next
    step on."""

    model: str
    alpha: float


BaselineSliceAction = SetAlpha

EngineAction = ExecutorAction | Fetch | Release | BaselineSliceAction
"""What a slice's engine carries out; its world answers the others."""

Action = ClusterAction | BaselineClusterAction | SliceAction | BaselineSliceAction
