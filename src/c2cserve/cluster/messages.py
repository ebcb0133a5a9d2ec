"""The messages between a front and a node: frames of MessagePack over TCP.

node  ── Greeting ─▶ front        versions, and a nonce
front ── Enter ────▶ node         the version it speaks, a proof that it has the secret
node  ── Welcome ──▶ front        the other proof, and what the node is
then Submit, Cancel, Table, HoldModel one way; Output, Decline, Report the other; and
Applied, which answers Changes; KeyUse, Changes, Beat both ways
"""

import hashlib
import hmac
from typing import Any

import msgspec

from c2cserve.core.fleet import FleetNode
from c2cserve.core.request import Delta, Job
from c2cserve.runtime.gateway import Snapshot

VERSION = 2
OLDEST_VERSION = 1
"""The versions that this program speaks. A change that older programs cannot read adds one; the one
before stays readable, so that neighbouring versions talk. Version 2 has `KeyUse`,
`Changes` and `Applied`, which a peer of version 1 is not sent."""
FRONTS_TALK_VERSION = 2

HEAD_BYTES = 4
STRANGER_BYTES_MAX = 1 << 12
"""The largest frame of a peer that has not proved that it has the secret."""
FRAME_BYTES_MAX = 1 << 28
NONCE_BYTES = 16


class Greeting(msgspec.Struct, tag=True):
    oldest: int
    newest: int
    nonce: bytes


class Enter(msgspec.Struct, tag=True):
    version: int
    nonce: bytes
    proof: bytes


class Welcome(msgspec.Struct, tag=True):
    proof: bytes
    node: FleetNode
    weights_port: int = 0
    """Where other nodes get its weights; 0: it sends none."""


class Beat(msgspec.Struct, tag=True):
    """A sign of life; every message is one."""


class Source(msgspec.Struct):
    """Where a node gets a model's weights (`cluster.weights`). `sealed`: the key, which only the
    receiver can open."""

    host: str
    port: int
    model: str
    serial: bytes
    sealed: bytes


class Submit(msgspec.Struct, tag=True):
    """Run a job. Its times are the front's; `age_s`: how long ago it arrived there. `source`: of
    its model, if the node is not known to have it. `used_ago_s`: `core.fleet.SendTo`."""

    job: Job
    age_s: float
    source: Source | None = None
    used_ago_s: tuple[float, ...] = ()


class Cancel(msgspec.Struct, tag=True):
    request_id: str


class Table(msgspec.Struct, tag=True):
    """The contents of a vocabulary's file, before the first job whose grammar names it. `path` is
    the front's."""

    path: str
    data: bytes


class HoldModel(msgspec.Struct, tag=True):
    model: str
    source: Source | None = None
    pinned: bool = False
    """It stays in the pool from then on."""


class KeyUse(msgspec.Struct, tag=True):
    """What a front let in of each key since its last such message, by the key's id: requests,
    tokens, and choices that run now. A node hands it on to its other fronts as it is. It may come
    twice: `number` grows by one each time."""

    front: str
    number: int
    keys: dict[str, tuple[int, int, int]]


class ModelChange(msgspec.Struct):
    """The last change of a model in the catalogue. `entry`: its keys as in the file; None: it was
    removed. `reload`: its files are to be read again."""

    number: int
    front: str
    entry: dict[str, Any] | None
    reload: bool = False


class Changes(msgspec.Struct, tag=True):
    """Changes of the catalogue by catalogue id (`cluster.catalogue`)."""

    models: dict[str, ModelChange]


class Applied(msgspec.Struct, tag=True):
    """A node has made a change, or refuses it: 200, or the status and reason of the refusal."""

    model: str
    number: int
    front: str
    status: int
    reason: str


class Output(msgspec.Struct, tag=True):
    delta: Delta


class Decline(msgspec.Struct, tag=True):
    """A job was refused, or is given back unfinished."""

    request_id: str
    status: int
    reason: str
    retry_after_s: float | None


class Report(msgspec.Struct, tag=True):
    """The node's state. Of its models only those in its pool or with requests."""

    state: Snapshot


ToNode = Enter | Beat | Submit | Cancel | Table | HoldModel | KeyUse | Changes
FromNode = Greeting | Welcome | Beat | Output | Decline | Report | KeyUse | Changes | Applied

_encoder = msgspec.msgpack.Encoder()
decode_to_node = msgspec.msgpack.Decoder(ToNode).decode
decode_from_node = msgspec.msgpack.Decoder(FromNode).decode


def frame(message: ToNode | FromNode) -> bytes:
    data = _encoder.encode(message)
    return len(data).to_bytes(HEAD_BYTES, "little") + data


def proof(secret: bytes, role: str, nonce: bytes) -> bytes:
    """Return what shows that the sender has the secret. `role`: so that no peer's own proof can be
    sent back to it."""
    return hmac.digest(secret, role.encode() + b"/" + nonce, hashlib.sha256)


def same(one: bytes, other: bytes) -> bool:
    return hmac.compare_digest(one, other)
