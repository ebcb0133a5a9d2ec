"""What the policy of a fleet is told, and what it decides: which node holds what, and serves whom.

A *node* is one machine's server: a pool, a controller and its slices. A *front* answers clients and
sends each request to a node. Models go by their catalogue ids, since nodes number their versions
each for itself.
"""

from c2cserve.core.actions import Reject
from c2cserve.core.events import (
    Arrived,
    Cancelled,
    Finished,
    FirstToken,
    ModelAdded,
    ModelRemoving,
    Progressed,
)
from c2cserve.core.request import Request
from c2cserve.core.value import value


@value
class FleetNode:
    """One incarnation of a node: a server that starts again is another one."""

    id: str
    kind: str
    """What computes there, for example `cpu avx512`. Two nodes of one kind compute the same
    tokens."""
    slices: int
    pool_bytes: int
    cost: float = 0.0
    """What an hour of it costs, in any unit that all nodes share."""

    @property
    def price(self) -> float:
        """Return what an hour of one slice costs."""
        return self.cost / max(1, self.slices)


@value
class Speed:
    """How fast a node computes a model, as it measured last."""

    model: str
    prompt_token_s: float
    token_s: float
    """The time of a decode step."""


@value
class NodeUp:
    node: FleetNode


@value
class NodeReport:
    """What a node said of itself last."""

    node_id: str
    held: tuple[str, ...] = ()
    """Models in its pool that can compute."""
    loading: tuple[str, ...] = ()
    used_bytes: int = 0
    """Bytes of its pool that are taken, those of loads under way too."""
    requests: int = 0
    """Requests of all fronts, running or waiting."""
    draining: bool = False
    speeds: tuple[Speed, ...] = ()
    """How fast it computes the models that it has computed."""


@value
class NodeLost:
    """A node ended, hung or was cut off. `displaced`: its requests, as of the last token received;
    they continue elsewhere."""

    node_id: str
    displaced: tuple[Request, ...] = ()


@value
class Declined:
    """A node did not take the request, or gave it back. It may be sent to another."""

    request: Request
    node_id: str
    status: int
    reason: str
    retry_after_s: float


@value
class Resumed:
    """A request that the front has already. A policy is told of it that takes the place of another
    one. `node_id`: where it is; empty while it waits. `begun`: its client has a token. `deaths`:
    nodes lost with it since it last made progress."""

    request: Request
    node_id: str
    begun: bool
    deaths: int


FleetEvent = (
    Arrived | Cancelled | FirstToken | Progressed | Finished | ModelAdded | ModelRemoving | NodeUp
    | NodeReport | NodeLost | Declined | Resumed
)  # fmt: skip


@value
class SendTo:
    """Send a request to a node, from its prompt and the tokens that its client has. `source`: a
    node with its model, if that is to be loaded; empty: there is none. `used_ago_s`: when the model
    was used last on any node, if this node has not had it: so it knows how rare the model is."""

    request_id: str
    node_id: str
    source: str = ""
    used_ago_s: tuple[float, ...] = ()


@value
class Hold:
    """Load a model into a node's pool before a request asks for it there. `source`: a node that
    has it; empty: there is none. `pinned`: it stays there."""

    node_id: str
    model: str
    source: str = ""
    pinned: bool = False


FleetAction = SendTo | Hold | Reject
