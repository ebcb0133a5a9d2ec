"""The messages between the controller and a worker: msgpack over one channel per worker.

They are tagged msgspec structs, decoded strictly. The payload types are those of `core`.
"""

import msgspec

from c2cserve.core.machine import Slice
from c2cserve.core.model import ModelSpec
from c2cserve.core.policy_names import OWN, PolicyName
from c2cserve.core.request import Delta, Job
from c2cserve.serving.logs import LogFormat


class WorkerConfig(msgspec.Struct, frozen=True):
    """The configuration that a worker gets at its start."""

    slice: Slice
    epoch: int
    """The number of this incarnation of the slice's worker, from 1."""
    status_path: str
    log_level: str
    log_format: LogFormat
    record_path: str | None = None
    policy: PolicyName = OWN


# ---- controller -> worker ---------------------------------------------------------------------


class Attach(msgspec.Struct, frozen=True, tag=True):
    """A model came into the pool: map its segment and build its small parts."""

    spec: ModelSpec
    segment: str
    config: dict[str, object]
    """The checkpoint's config.json."""
    dtype: str


class Detach(msgspec.Struct, frozen=True, tag=True):
    """The model leaves the pool: unmap it. It has no requests on this slice any more."""

    model: str


class Switch(msgspec.Struct, frozen=True, tag=True):
    """Activate or deactivate an attached model on this slice."""

    model: str
    active: bool
    keep: bool = False
    """`core.actions.Activate.keep`: its weights are loaded into the slice's memory as a whole."""


class Submit(msgspec.Struct, frozen=True, tag=True):
    job: Job


class Withdraw(msgspec.Struct, frozen=True, tag=True):
    request_id: str


class Recall(msgspec.Struct, frozen=True, tag=True):
    """Return the request (`Returned`) if it has no memory here yet. Otherwise keep it, and send
    nothing. If `running`, return it in any case, unless it ends first."""

    request_id: str
    running: bool = False


class Reset(msgspec.Struct, frozen=True, tag=True):
    """The controller's loop has started anew: withdraw all requests and deactivate all models.
    Attached models stay attached. Answer `ResetDone` when no step can sample for those requests any
    more. Messages behind this one wait until then."""

    number: int


class Quit(msgspec.Struct, frozen=True, tag=True):
    """Exit: no work is left."""


ToWorker = Attach | Detach | Switch | Submit | Withdraw | Recall | Reset | Quit

# ---- worker -> controller ---------------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, tag=True):
    epoch: int
    isa: str


class Output(msgspec.Struct, frozen=True, tag=True):
    """All tokens that one step sampled."""

    deltas: tuple[Delta, ...]


class Measured(msgspec.Struct, frozen=True, tag=True):
    """Recently measured step times of a model on this slice, for the controller's estimates."""

    model: str
    decode_step_s: float
    prefill_token_s: float


class Unusable(msgspec.Struct, frozen=True, tag=True):
    """This worker could not attach the model. `segment` is the one of `Attach`: since then the
    model may have been evicted, or loaded into another segment."""

    model: str
    segment: str
    reason: str


class Attached(msgspec.Struct, frozen=True, tag=True):
    """This worker has mapped the model's `segment` and can run it."""

    model: str
    segment: str


class Ready(msgspec.Struct, frozen=True, tag=True):
    """A model that is kept computes from now on (`core.events.Fetched`), out of the slice's memory.
    If its weights were refused a place there, it streams."""

    model: str
    took_s: float


class Failed(msgspec.Struct, frozen=True, tag=True):
    """`core.actions.GiveUp`: every request of the model fails on this slice."""

    model: str
    reason: str
    others_work: bool


class Recovered(msgspec.Struct, frozen=True, tag=True):
    """A model that was given up here works again."""

    model: str


class Returned(msgspec.Struct, frozen=True, tag=True):
    """The request has left this slice: place it again. All its tokens were sent before this."""

    request_id: str


class ResetDone(msgspec.Struct, frozen=True, tag=True):
    """The `Reset` of this number is done. Earlier messages about requests are void."""

    number: int


ToController = (
    Hello | Output | Measured | Unusable | Attached | Ready | Failed | Recovered | Returned
    | ResetDone
)  # fmt: skip

_encoder = msgspec.msgpack.Encoder()
_to_worker: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
_to_controller: msgspec.msgpack.Decoder[ToController] = msgspec.msgpack.Decoder(ToController)


def encode(message: ToWorker | ToController) -> bytes:
    return _encoder.encode(message)


def decode_to_worker(data: bytes) -> ToWorker:
    return _to_worker.decode(data)


def submitted_id(data: bytes) -> str | None:
    """Return the request's id if this looks like a `Submit`, although it does not decode."""
    try:
        loose = msgspec.msgpack.decode(data)
    except msgspec.MsgspecError:
        return None
    match loose:
        case {"type": "Submit", "job": {"request": {"id": str(request_id)}}}:
            return request_id
        case _:
            return None


def decode_to_controller(data: bytes) -> ToController:
    return _to_controller.decode(data)
