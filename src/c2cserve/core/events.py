"""Everything policies are told. Events are also the record and the wire format.

Two loops run the same waist: the controller's (`policy.cluster`), and each slice's in `policy`.
"""

from c2cserve.core.actions import Direction
from c2cserve.core.machine import Slice
from c2cserve.core.model import ModelSpec
from c2cserve.core.request import Request
from c2cserve.core.value import value

# ---- controller -----------------------------------------------------------------------------


@value
class Arrived:
    request: Request


@value
class Cancelled:
    """The client went away, or a stop string ended the output: the request ends now."""

    request_id: str


@value
class FirstToken:
    request_id: str
    ttft_s: float


PROGRESS_TOKENS = 8
"""A request that has sampled so many tokens on a slice is not what kills workers. (One whose
decodes kill them samples a first token every time.)"""


@value
class Progressed:
    """A request that was placed again has drawn `PROGRESS_TOKENS` tokens since, the last of them
    `after_s` seconds after its arrival."""

    request_id: str
    after_s: float


@value
class Finished:
    """A request left its slice: all its tokens are drawn, or it failed there."""

    request_id: str
    output_len: int
    failed: bool = False


@value
class SliceUp:
    slice: Slice


@value
class SliceLost:
    """A worker died or hung. `displaced` are its requests with lengths as of the last token
    received, to be placed again; no token is lost or repeated."""

    slice_id: str
    displaced: tuple[Request, ...]


@value
class ModelAdded:
    """A catalogue entry, checked and ready to load.

    `replaces`: the version that this one is to take the place of. It is loaded as if a request
    waited for it, and the other one stays in the pool meanwhile. `in_pool`: its load has begun
    already, at the word of the policy before this one."""

    spec: ModelSpec
    replaces: str = ""
    in_pool: bool = False


@value
class ModelWanted:
    """The model is to be loaded as if a request waited for it (`core.fleet.Hold`). `pinned`: it
    stays in the pool from then on."""

    model: str
    pinned: bool = False


@value
class ModelUsed:
    """The model was used on other nodes at these times, before it comes here."""

    model: str
    times_s: tuple[float, ...]


@value
class ModelUsable:
    """Enough of the weights is in the pool for a first step to start (later layers may follow)."""

    model: str


@value
class ModelLoaded:
    model: str
    bytes: int
    took_s: float


@value
class ModelFailed:
    model: str
    reason: str


@value
class ModelRemoving:
    """An operator asked for removal: drain, then `actions.Forget`."""

    model: str


@value
class PoolState:
    """Budget of the host weight pool, sent at the start and when it changes."""

    budget_bytes: int


@value
class StepTimes:
    """What a slice measured lately for a model: seconds for one decode step, and per prefill
    token. Feeds `policy.slice.estimate`."""

    slice_id: str
    model: str
    decode_step_s: float
    prefill_token_s: float


@value
class Profiled:
    """Step times measured before serving, for policies to believe in: the same on each of these
    slices for each of these models."""

    slices: tuple[str, ...]
    models: tuple[str, ...]
    prefill: tuple[tuple[int, float], ...]
    """(Prompt tokens, seconds)."""
    decode: tuple[tuple[int, int, float], ...]
    """(Mean tokens per sequence, sequences, seconds of a step)."""


@value
class InstanceLoading:
    """The slice has begun to load the instance's weights. `InstanceReady` is when it has ended."""

    model: str
    slice_id: str


@value
class InstanceReady:
    """The instance computes from now on: its weights are in the slice's memory after a load of
    `took_s`, or stream after all. It comes again after each load."""

    model: str
    slice_id: str
    took_s: float


@value
class KvResized:
    """An `actions.ResizeKv` is done: the instance has this much memory for KV now."""

    model: str
    slice_id: str
    kv_bytes: int


@value
class TokensSent:
    """How many tokens clients have of each request that runs. Only SLINFER's controller is told,
    before each decision: it relays every token."""

    requests: tuple[tuple[str, int], ...]
    """(Request, tokens from before a resume too)."""


@value
class Recalled:
    """An `actions.Recall` is done: the request is on no slice any more, to be placed again.
    `request` has its lengths as of the last token its client has got."""

    request: Request


@value
class InstanceFailed:
    """`actions.GiveUp` of a slice: every request of the model fails there, also alone.
    `others_work`: another model has worked on the slice since the first of these failures."""

    slice_id: str
    model: str
    reason: str
    others_work: bool


@value
class InstanceRecovered:
    """`actions.Recover` of a slice: a model that was given up there works again."""

    slice_id: str
    model: str


@value
class Returned:
    """`actions.Return` of a slice: the request is on no slice any more, to be placed again.
    `request` has its lengths as of the last token its client has got."""

    request: Request


@value
class Draining:
    """The server is going down: refuse what is new, finish what is there."""


RequestEvent = FirstToken | Progressed | Finished | Cancelled
"""What happens to a request after it arrived."""

ClusterEvent = (
    Arrived | Cancelled | FirstToken | Progressed | Finished | SliceUp | SliceLost | ModelAdded
    | ModelUsable | ModelLoaded | ModelFailed | ModelRemoving | PoolState | StepTimes | Profiled
    | InstanceLoading | InstanceReady | KvResized | TokensSent | Recalled | InstanceFailed
    | InstanceRecovered | Returned | ModelWanted | ModelUsed | Draining
)  # fmt: skip

InstanceEvent = StepTimes | Profiled | InstanceLoading | InstanceReady | KvResized | TokensSent
"""What instances on slices report of themselves."""

# ---- slice ----------------------------------------------------------------------------------


@value
class Activated:
    """The controller gave this slice a model. (No weights move: the segment is mapped.)"""

    spec: ModelSpec
    keep: bool = False
    """It computes while all of its weights are in the slice's memory (`actions.Fetch`), or once
    they were refused a place there (`Fetched`). Prompts use them as they arrive."""


@value
class Fetched:
    """An `actions.Fetch` is done: the model's weights are all here."""

    model: str
    took_s: float
    refused: bool = False
    """They are not here: there was no place for them above the KV, or KV has taken one of their
    places since. Steps read them where they lie."""


@value
class Deactivated:
    """The model's cached KV may go at once; its requests are already finished or withdrawn."""

    model: str


@value
class Submitted:
    request: Request
    chained: bool = False
    """Its tokens are sampled where its next step reads them. That step may be planned, and started,
    before their ids are known to the host."""


@value
class Withdrawn:
    request_id: str


@value
class RecallAsked:
    """The controller wants the request back if it has not started here (`actions.Return`)."""

    request_id: str
    running: bool = False
    """Also if it has started: its tokens stay and its KV goes (`actions.Preempt`)."""


@value
class SeqOutcome:
    """`drawn` tokens were sampled for the request; `finished`: it draws no more. `failed`: it
    cannot go on (its KV is dropped)."""

    request_id: str
    drawn: int
    finished: bool
    failed: bool = False


@value
class StepDone:
    """The step ended. A request's steps end in the order of their launch, parked ones too: each
    reads the KV that those before it write. Steps of different lanes end in any order."""

    step_id: int
    outcomes: tuple[SeqOutcome, ...]
    compute_s: float
    """Seconds of all times that it ran, without time parked."""
    times: int = 1
    """How often it ran (`actions.RunStep`); 0 if others stopped before its first turn."""
    streamed_bytes: int = 0
    """Bytes of weights that it read over a link; 0 also where the slice does not know."""
    peer_bytes: int = 0
    """The part of `streamed_bytes` that came from another GPU's memory."""
    hbm_bytes: int = 0
    """Bytes of HBM that its hybrid GEMMs read and wrote; 0 for GEMMs of other kinds."""


@value
class StepFailed:
    """The step ended with an exception that the slice survives. Its requests have drawn nothing in
    it, and what steps in flight draw for them is not delivered until they begin anew (a `fresh`
    step). Everything that runs after this event runs on parts that were built anew."""

    step_id: int
    reason: str


@value
class StepParked:
    """The step waits for weights that are still loading, into the pool or into the slice's memory;
    the slice is free for other models.
    Its `StepDone` comes later."""

    step_id: int


@value
class MoveDone:
    """An `actions.Move` of the request has arrived; also when the request ended meanwhile."""

    request_id: str
    direction: Direction


@value
class PrefixMoved:
    """An `actions.SavePrefix` or `actions.BringPrefix` is over, after `took_s` seconds."""

    move: int
    took_s: float


@value
class GemmsMeasured:
    """The hybrid GEMMs of a model's last step: the seconds they took, and the shares of bandwidth
    in use meanwhile, 0..1. The link's share is that of all slices on it."""

    model: str
    latency_s: float
    hbm_utilization: float
    link_utilization: float


@value
class ChunkCost:
    """Prompt tokens in one step, and what the machine's profile says of the step's GEMMs."""

    tokens: int
    step_s: float
    hbm_s: float
    """The part of it for which HBM would be busy, if nothing else took time."""


@value
class ChunksProfiled:
    """The sizes of chunks of a model on this slice, by the machine's profile. A model that comes
    again has new ones."""

    model: str
    chunks: tuple[ChunkCost, ...]


SliceEvent = (
    Activated | Deactivated | Submitted | Withdrawn | RecallAsked | StepDone | StepFailed
    | StepParked | MoveDone | PrefixMoved | GemmsMeasured | ChunksProfiled | Fetched
)  # fmt: skip

Event = ClusterEvent | SliceEvent
