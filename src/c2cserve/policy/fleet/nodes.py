"""What the fleet's policy keeps of each node, and when it expects a first token there."""

from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from zlib import crc32

from c2cserve.core.fleet import FleetNode, NodeReport
from c2cserve.core.model import ModelSpec
from c2cserve.core.request import Request

LOAD_BYTES_PER_S = 1e9
"""How fast a node is believed to load weights until it has loaded some."""
PROMPT_TOKEN_S = 1e-4
"""What a prompt token is believed to cost until a node has answered."""
_LEARNING = 0.2
"""Weight of the newest sample."""
_WARM_S = 300.0
"""A model that was used within this time is not given up for a new one at no cost."""


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
    held: set[str] = field(default_factory=set[str])
    loading: dict[str, float] = field(default_factory=dict[str, float])
    """Model -> when its load is believed to have begun."""
    used_bytes: int = 0
    draining: bool = False
    reported: int = 0
    """Requests of all fronts, as of the last report."""
    own_reported: int = 0
    """Requests of this front, as of the last report."""
    queued_tokens: int = 0
    """Tokens of this front's prompts that have no first token yet."""
    sent: dict[str, _Sent] = field(default_factory=dict[str, "_Sent"])
    last_used_s: dict[str, float] = field(default_factory=dict[str, float])
    pinned: dict[str, int] = field(default_factory=dict[str, int])
    """Models that this front has pinned there -> their bytes."""
    warm_bytes: int = 0
    """Bytes of held models that were used lately."""
    token_s: float = PROMPT_TOKEN_S
    load_bytes_per_s: float = LOAD_BYTES_PER_S
    _samples: int = 0
    """First tokens that `token_s` was learned from."""

    @property
    def queued_s(self) -> float:
        """How long a slice takes for all that waits."""
        return self.queued_tokens * self.token_s

    @property
    def load(self) -> float:
        """Requests per slice: those of this front, and of others as of the last report."""
        others = max(0, self.reported - self.own_reported)
        return (len(self.sent) + others) / max(1, self.node.slices)

    def has(self, model: str) -> bool:
        """Whether the model is in its pool, or on its way there."""
        return model in self.held or model in self.loading

    def report(self, report: NodeReport, specs: Mapping[str, ModelSpec], now: float) -> None:
        """Take over what the node says. A load that it has not heard of yet stays."""
        self.held = set(report.held)
        asked = {m: since for m, since in self.loading.items() if now - since < 1.0}
        self._learn_loads(specs, now)
        self.loading = {
            model: self.loading.get(model, now)
            for model in (*report.loading, *asked) if model not in self.held
        }  # fmt: skip
        self.used_bytes, self.draining = report.used_bytes, report.draining
        self.reported, self.own_reported = report.requests, len(self.sent)
        self.last_used_s = {m: s for m, s in self.last_used_s.items() if now - s < _WARM_S}
        self.warm_bytes = sum(
            specs[model].weight_bytes for model in self.last_used_s
            if model in specs and self.has(model)
        )  # fmt: skip

    def _learn_loads(self, specs: Mapping[str, ModelSpec], now: float) -> None:
        for model, since_s in self.loading.items():
            if model in self.held and model in specs and now > since_s:
                rate = specs[model].weight_bytes / (now - since_s)
                self.load_bytes_per_s += _LEARNING * (rate - self.load_bytes_per_s)

    def hold(self, model: str, now: float) -> None:
        """Note that the model is to be loaded."""
        self.loading.setdefault(model, now)

    def may_pin(self, spec: ModelSpec) -> bool:
        """Whether the model fits beside the others that are pinned there."""
        others = sum(self.pinned.values()) - self.pinned.get(spec.id, 0)
        return not self.draining and others + spec.weight_bytes <= self.node.pool_bytes

    def load_s(self, spec: ModelSpec, now: float) -> float:
        """Return how long its weights are still believed to take to the pool."""
        if spec.id in self.held:
            return 0.0
        whole_s = spec.weight_bytes / max(1.0, self.load_bytes_per_s)
        return max(0.0, self.loading.get(spec.id, now) + whole_s - now)

    def first_token_s(self, request: Request, spec: ModelSpec, cached: int, now: float) -> float:
        """Return when its first token is expected if it is sent now, in seconds from now.

        Before it come what waits there and its weights, then the part of its prompt that is not
        cached."""
        wait_s = max(self.queued_s / max(1, self.node.slices), self.load_s(spec, now))
        return wait_s + (request.prompt_len - cached) * self.token_s

    def send(self, request: Request, spec: ModelSpec, cached: int, now: float) -> None:
        """Note that the request is there from now on."""
        computed = request.prompt_len - cached
        work_tokens = self.queued_tokens / max(1, self.node.slices) + computed
        self.sent[request.id] = _Sent(spec.id, now, computed, work_tokens, spec.id in self.held)
        self.queued_tokens += computed
        self.last_used_s[spec.id] = now
        if spec.id not in self.held:
            self.hold(spec.id, now)

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

    def left(self, request_id: str) -> None:
        one = self.sent.pop(request_id, None)
        if one is not None and not one.begun:
            self.queued_tokens -= one.computed

    def displacement_s(self, spec: ModelSpec, replace_s: float) -> float:
        """Return what a new model costs beside its load, for the models in use that make room.

        It is `replace_s` times the share of its bytes that finds no free or unused memory."""
        lacking = spec.weight_bytes - self.node.pool_bytes + min(self.used_bytes, self.warm_bytes)
        return 0.0 if lacking <= 0 else replace_s * lacking / spec.weight_bytes


class CachedPrefixes:
    """Where prefixes of prompts were computed last, by their chained hashes. The least recent are
    forgotten."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._nodes: dict[tuple[str, int], str] = {}

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
            self._nodes.pop((model, one), None)
            self._nodes[model, one] = node_id
        while len(self._nodes) > self._most:
            del self._nodes[next(iter(self._nodes))]
