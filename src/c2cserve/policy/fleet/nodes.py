"""What the fleet's policy keeps of each node, and when it expects a first token there."""

from collections import OrderedDict
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from zlib import crc32

from c2cserve.core.fleet import FleetNode, NodeReport, Speed
from c2cserve.core.model import ModelSpec
from c2cserve.core.request import Request, Slo
from c2cserve.policy.fleet.load_time import LoadTime
from c2cserve.policy.fleet.speeds import PROMPT_TOKEN_S, Speeds
from c2cserve.policy.uses import Uses, note_use

_LEARNING = 0.2
"""Weight of the newest sample."""
_RECENT_S = 300.0
"""Models that were sent requests within this time come back when their last node is lost."""


def rank(model: str, node_id: str) -> int:
    """Return the node's place in the model's own order of nodes, the lowest first. All fronts
    agree on it, and the loss of a node moves its models only (rendezvous hashing)."""
    return crc32(f"{model}/{node_id}".encode())


@dataclass(slots=True)
class _Sent:
    """A request that is on a node."""

    model: str
    sent_s: float
    computed: int
    """Prompt tokens that were believed not to be cached."""
    work_tokens: float
    """Prompt tokens that one slice computes before its first token: its own, and its part of those
    that waited."""
    held: bool
    """The node had its model: its first token did not wait for a load."""
    begun: bool = False


@dataclass(slots=True, eq=False)
class NodeBook:
    """One node, as a front sees it."""

    node: FleetNode
    loads: LoadTime = field(default_factory=LoadTime)
    """The same for all nodes of its kind."""
    speeds: Speeds = field(default_factory=Speeds)
    """The same for all nodes of its kind and price."""
    announced: dict[str, Speed] = field(default_factory=dict[str, Speed])
    """Model -> what the node said last."""
    held: set[str] = field(default_factory=set[str])
    loading: dict[str, float] = field(default_factory=dict[str, float])
    """Model -> when its load is believed to have begun."""
    used_bytes: int = 0
    draining: bool = False
    reported_s: float = float("-inf")
    """When it reported last."""
    reported: int = 0
    """Requests of all fronts, as of the last report."""
    own_reported: int = 0
    """Requests of this front, as of the last report."""
    queued_tokens: int = 0
    """Tokens of this front's prompts that have no first token yet."""
    sent: dict[str, _Sent] = field(default_factory=dict[str, "_Sent"])
    uses: dict[str, Uses] = field(default_factory=dict[str, Uses])
    """Uses there of models that were sent requests lately."""
    pinned: dict[str, int] = field(default_factory=dict[str, int])
    """Models that this front has pinned there -> their bytes."""
    _victims: list[str] | None = None
    """Models that may leave its pool, the rarest first. None: to be found anew."""
    token_s: float = PROMPT_TOKEN_S
    """What a prompt token cost there lately."""
    _samples: int = 0
    """First tokens that `token_s` was learned from."""

    @property
    def prompt_token_s(self) -> float:
        """What a prompt token is believed to cost there. Until it has answered, it is like others
        of its kind. Else it would seem fast for as long as all that it has waits for a load."""
        return self.token_s if self._samples else self.speeds.prompt_token_s

    @property
    def queued_s(self) -> float:
        """How long a slice takes for all that waits."""
        return self.queued_tokens * self.prompt_token_s

    @property
    def load(self) -> float:
        """Requests per slice: those of this front, and of others as of the last report."""
        others = max(0, self.reported - self.own_reported)
        return (len(self.sent) + others) / max(1, self.node.slices)

    def has(self, model: str) -> bool:
        """Whether the model is in its pool, or on its way there."""
        return model in self.held or model in self.loading

    def models(self) -> set[str]:
        """Return the models that it has or loads."""
        return self.held | self.loading.keys()

    def victims(self, now: float) -> Sequence[str]:
        """Return the models that may leave its pool, in the order in which they will: as the node
        itself sees it, by their use there."""
        if self._victims is None:
            busy = {one.model for one in self.sent.values()}
            rates = {
                model: self.uses[model].per_s(now) if model in self.uses else 0.0
                for model in self.held if model not in busy and model not in self.pinned
            }  # fmt: skip
            self._victims = sorted(rates, key=lambda model: (rates[model], model))
        return self._victims

    def report(self, report: NodeReport, specs: Mapping[str, ModelSpec], now: float) -> None:
        """Take over what the node says. A load that it has not heard of yet stays."""
        self._victims = None
        self.held = set(report.held)
        asked = {m: since for m, since in self.loading.items() if now - since < 1.0}
        self._learn_loads(specs, now)
        self.reported_s = now
        self.loading = {
            model: self.loading.get(model, now)
            for model in (*report.loading, *asked) if model not in self.held
        }  # fmt: skip
        unseen = self.loading.keys() - {*report.loading}
        self.used_bytes = report.used_bytes + sum(
            specs[model].weight_bytes for model in unseen if model in specs
        )
        self.draining = report.draining
        for speed in report.speeds:
            if speed.model in specs and self.announced.get(speed.model) != speed:
                self.announced[speed.model] = speed
                self.speeds.note(speed, specs[speed.model], now)
        self.reported, self.own_reported = report.requests, len(self.sent)
        for model in [m for m, one in self.uses.items() if now - one.times_s[-1] >= _RECENT_S]:
            del self.uses[model]

    def _learn_loads(self, specs: Mapping[str, ModelSpec], now: float) -> None:
        """A load that has ended did so since the report before: in the middle, on average."""
        for model, since_s in self.loading.items():
            if model in self.held and model in specs:
                ended_s = (max(since_s, self.reported_s) + now) / 2.0
                self.loads.learn(specs[model], ended_s - since_s)

    def may_pin(self, spec: ModelSpec) -> bool:
        """Whether the model fits beside the others that are pinned there."""
        others = sum(self.pinned.values()) - self.pinned.get(spec.id, 0)
        return not self.draining and others + spec.weight_bytes <= self.node.pool_bytes

    def load_s(self, spec: ModelSpec, now: float) -> float:
        """Return how long its weights are still believed to take to the pool."""
        if spec.id in self.held:
            return 0.0
        return max(0.0, self.loading.get(spec.id, now) + self.loads.of(spec) - now)

    def newcomer_s(self, spec: ModelSpec) -> float:
        """Return how long a model that it does not have takes there, beside what that displaces."""
        wait_s = self.queued_s / max(1, self.node.slices) + len(self.sent) * self.prompt_token_s
        return wait_s + self.loads.of(spec)

    def first_token_s(self, request: Request, spec: ModelSpec, cached: int, now: float) -> float:
        """Return when its first token is expected if it is sent now, in seconds from now.

        Before it come what waits there and its weights, then the part of its prompt that is not
        cached."""
        wait_s = max(self.queued_s / max(1, self.node.slices), self.load_s(spec, now))
        prompt_token_s, _ = self.speeds.of(spec, now)
        return wait_s + (request.prompt_len - cached) * max(self.prompt_token_s, prompt_token_s)

    def suits(self, spec: ModelSpec, slo: Slo, tokens: float, now: float) -> bool:
        """Whether it meets these targets for a prompt of so many tokens, once it has the model."""
        prompt_token_s, token_s = self.speeds.of(spec, now)
        wait_s = self.queued_s / max(1, self.node.slices)
        first_s = wait_s + tokens * max(self.prompt_token_s, prompt_token_s)
        return first_s <= slo.ttft_s and token_s <= slo.tpot_s

    def recall(self, spec: ModelSpec, times_s: Sequence[float]) -> None:
        """Note what the node will be told of a model that it does not have."""
        self.uses.setdefault(spec.id, Uses.of(spec.weight_bytes)).recall(times_s)

    def send(self, request: Request, spec: ModelSpec, cached: int, now: float) -> None:
        """Note that the request is there from now on."""
        computed = request.prompt_len - cached
        work_tokens = self.queued_tokens / max(1, self.node.slices) + computed
        self.sent[request.id] = _Sent(spec.id, now, computed, work_tokens, spec.id in self.held)
        self.queued_tokens += computed
        note_use(self.uses, spec, now)

    def take_over(self, request: Request, model: str, *, begun: bool) -> None:
        """Note a request that was there before: the last report counts it already. When it was sent
        is not known, so nothing is learned from its first token."""
        computed = 0 if begun else request.prompt_len
        self.sent[request.id] = _Sent(
            model, request.arrival_s, computed, 0.0, held=False, begun=begun
        )
        self.own_reported += 1
        self.queued_tokens += computed

    def begun(self, request_id: str, now: float) -> None:
        """Note a request's first token."""
        one = self.sent.get(request_id)
        if one is None or one.begun:
            return
        one.begun = True
        self.queued_tokens -= one.computed
        if one.held and one.work_tokens > 0:
            self._samples += 1
            sample_s = max(0.0, now - one.sent_s) / one.work_tokens
            self.token_s += max(_LEARNING, 1.0 / self._samples) * (sample_s - self.token_s)
            self.speeds.learn(sample_s)

    def left(self, request_id: str) -> None:
        one = self.sent.pop(request_id, None)
        if one is not None and not one.begun:
            self.queued_tokens -= one.computed


class CachedPrefixes:
    """Where prefixes of prompts were computed last, by their chained hashes. The least recent are
    forgotten."""

    def __init__(self, most: int) -> None:
        self._most = most
        # Finding a dict's first key takes as long as there were deleted ones before it.
        self._nodes: OrderedDict[tuple[str, int], str] = OrderedDict()

    def find(self, request: Request, model: str, up: Container[str]) -> tuple[str, int]:
        """Return the node in `up` that has computed most of the prompt's blocks, and how many of
        them; an empty name if none has."""
        hashes = request.prefix_hashes
        for index in range(len(hashes) - 1, -1, -1):
            node = self._nodes.get((model, hashes[index]))
            if node is not None and node in up:
                return node, index + 1
        return "", 0

    def note(self, request: Request, model: str, node_id: str) -> None:
        for one in request.prefix_hashes:
            self._nodes[model, one] = node_id
            self._nodes.move_to_end((model, one))
        while len(self._nodes) > self._most:
            self._nodes.popitem(last=False)
