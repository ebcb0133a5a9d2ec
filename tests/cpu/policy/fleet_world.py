"""A fleet in virtual time: nodes are arithmetic, the policy is the one that a front runs."""

import heapq
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from c2cserve.core import events as ev
from c2cserve.core import fleet
from c2cserve.core.actions import Reject
from c2cserve.core.model import ModelSpec
from c2cserve.core.request import Request, Slo
from c2cserve.policy.cluster.admission import BURST_S, Standing
from c2cserve.policy.fleet.policy import FleetPolicy
from c2cserve.policy.uses import Uses

LOAD_BYTES_PER_S = 2e9
PROMPT_TOKEN_S = 5e-5
SLO = Slo(2.0, 0.1)


def spec(
    name: str, weight_bytes: int = 1_000_000_000, *, pinned: bool = False, slo: Slo = SLO
) -> ModelSpec:
    return ModelSpec(name, weight_bytes, 8, 1024, 4096, slo, pinned=pinned)


@dataclass(frozen=True)
class Kind:
    """What a node is: its name, what an hour costs, and what a prompt's token and a token take."""

    name: str = "cpu"
    cost: float = 0.0
    prompt_token_s: float = PROMPT_TOKEN_S
    token_s: float = 0.0
    """0: answers take what the world says, and nothing is announced."""


@dataclass
class _Node:
    node: fleet.FleetNode
    kind: Kind
    computed: set[str] = field(default_factory=set[str])
    """Models whose speed it has measured."""
    pool: dict[str, float] = field(default_factory=dict[str, float])
    """Model -> when it can compute."""
    uses: dict[str, Uses] = field(default_factory=dict[str, Uses])
    prompts_until_s: float = 0.0
    standing: Standing = field(default_factory=lambda: Standing(BURST_S))
    """Whether it is in an overload, as a server sees it."""
    running: set[str] = field(default_factory=set[str])


@dataclass(frozen=True)
class _Usable:
    """A request's model can compute now."""

    request: Request
    node: _Node


class FleetWorld:
    """`ticks_s`: what each decision took, in seconds of processor time."""

    def __init__(
        self, models: list[ModelSpec], nodes: int, pool: int, seed: int = 0,
        prompt_token_s: float = PROMPT_TOKEN_S, answer_s: float = 1.0, load_s: float = 0.0,
        refusing: bool = False,
    ) -> None:  # fmt: skip
        """`answer_s`: an answer after its first token. `load_s`: a load beside its bytes.
        `refusing`: nodes refuse requests in an overload, as servers do."""
        self._refusing = refusing
        self.declined = 0
        self._usual = Kind(prompt_token_s=prompt_token_s)
        self._answer_s, self._load_s = answer_s, load_s
        self._running: set[str] = set()
        self.policy = FleetPolicy()
        self.random = random.Random(seed)
        self.models = {one.id: one for one in models}
        self.nodes: dict[str, _Node] = {}
        self.requests: dict[str, Request] = {}
        self.sent: dict[str, list[str]] = {}
        self.begun_s: dict[str, float] = {}
        self.refused: dict[str, int] = {}
        self.ended: set[str] = set()
        self.hits = self.misses = self.loads = 0
        self.held: list[tuple[str, str]] = []
        self.ticks_s: list[float] = []
        self.stream: list[tuple[float, list[fleet.FleetEvent], list[fleet.FleetAction]]] = []
        self._heap: list[tuple[float, int, fleet.FleetEvent | _Usable | str]] = []
        self._number = 0
        self.now = 0.0
        self.tell(*(ev.ModelAdded(one) for one in models))
        for index in range(nodes):
            self.up(f"n{index}", pool)
        self.tell(*(fleet.NodeReport(name) for name in self.nodes))

    def up(self, name: str, pool: int, kind: Kind | None = None) -> None:
        kind = kind or self._usual
        node = fleet.FleetNode(name, kind.name, 4, pool, kind.cost)
        self.nodes[name] = _Node(node, kind)
        self.tell(fleet.NodeUp(node))

    def lose(self, name: str) -> None:
        lost = self.nodes.pop(name)
        self._running -= lost.running
        displaced = tuple(self.requests[one] for one in sorted(lost.running))
        self.tell(fleet.NodeLost(name, displaced))

    def arrive(
        self, name: str, model: str, tokens: int = 200, hashes: tuple[int, ...] = ()
    ) -> None:
        self.tell(ev.Arrived(self.requested(name, model, tokens, hashes)))

    def requested(
        self, name: str, model: str, tokens: int = 200, hashes: tuple[int, ...] = ()
    ) -> Request:
        slo = self.models[model].slo
        self.requests[name] = Request(name, model, tokens, 50, self.now, slo, hashes)
        return self.requests[name]

    @property
    def running(self) -> int:
        return len(self._running)

    def at(self, when_s: float, what: fleet.FleetEvent | _Usable | str) -> None:
        self._number += 1
        heapq.heappush(self._heap, (when_s, self._number, what))

    def run_until(self, until_s: float) -> None:
        while self._heap and self._heap[0][0] <= until_s:
            self.now, _, what = heapq.heappop(self._heap)
            if isinstance(what, _Usable):
                if what.request.id in what.node.running:
                    self._compute(what.request, what.node)
            elif not isinstance(what, str):
                self._happened(what)
            elif what in self.nodes:
                self._report(what)
        self.now = until_s

    def _happened(self, event: fleet.FleetEvent) -> None:
        match event:
            case ev.FirstToken(name):
                if name in self._running:
                    self.begun_s.setdefault(name, self.now - self.requests[name].arrival_s)
                    self.tell(event)
            case ev.Finished(name):
                if name in self._running:
                    self.ended.add(name)
                    self._running.discard(name)
                    self.nodes[self.sent[name][-1]].running.discard(name)
                    self.tell(event)
            case _:
                self.tell(event)

    def _report(self, name: str) -> None:
        node = self.nodes[name]
        usable = tuple(sorted(m for m, at in node.pool.items() if at <= self.now))
        loading = tuple(sorted(m for m, at in node.pool.items() if at > self.now))
        used = sum(self.models[m].weight_bytes for m in node.pool)
        speeds = tuple(
            fleet.Speed(one, node.kind.prompt_token_s, node.kind.token_s)
            for one in sorted(node.computed & node.pool.keys())
        )
        self.tell(fleet.NodeReport(name, usable, loading, used, len(node.running), speeds=speeds))

    def tell(self, *events: fleet.FleetEvent) -> list[fleet.FleetAction]:
        """Tell the policy, and let it decide as often as it wants to now."""
        said = [*self._tick(events)]
        while (at_s := self.policy.wakeup) is not None and at_s <= self.now:
            said += self._tick(())
        return said

    def _tick(self, events: Sequence[fleet.FleetEvent]) -> list[fleet.FleetAction]:
        begun = time.thread_time()
        for event in events:
            self.policy.apply(event)
        actions = list(self.policy.decide(self.now))
        self.ticks_s.append(time.thread_time() - begun)
        self.stream.append((self.now, list(events), actions))
        for action in actions:
            self._carry_out(action)
        return actions

    def _carry_out(self, action: fleet.FleetAction) -> None:
        match action:
            case fleet.SendTo(name, node_id):
                request, node = self.requests[name], self.nodes[node_id]
                uses = node.uses.setdefault(
                    request.model, Uses.of(self.models[request.model].weight_bytes)
                )
                uses.recall([self.now - one for one in action.used_ago_s])
                self._sent(request, node)
            case fleet.Hold(node_id, model):
                self.held.append((node_id, model))
                self._load(self.nodes[node_id], model)
            case Reject(name, status):
                self.refused[name] = status

    def _sent(self, request: Request, node: _Node) -> None:
        self.sent.setdefault(request.id, []).append(node.node.id)
        usable_s = node.pool.get(request.model)
        if usable_s is not None and usable_s <= self.now:
            self.hits += 1
        else:
            self.misses += 1
        node.running.add(request.id)
        self._running.add(request.id)
        usable_s = self._load(node, request.model)
        if usable_s <= self.now:
            self._compute(request, node)
        else:
            self.at(usable_s, _Usable(request, node))

    def _compute(self, request: Request, node: _Node) -> None:
        """Its prompt takes one of four slices, in the order of arrival."""
        prompt_s = request.prompt_len * node.kind.prompt_token_s
        begin_s = max(self.now, node.prompts_until_s)
        if self._refusing and self._refuses(request, node, begin_s + prompt_s):
            return
        node.prompts_until_s = begin_s + prompt_s / 4
        first_s = begin_s + prompt_s
        self.at(first_s, ev.FirstToken(request.id, first_s - request.arrival_s))
        answer_s = self._answer_s
        if node.kind.token_s:
            answer_s = request.max_new_tokens * node.kind.token_s
            node.computed.add(request.model)
        self.at(first_s + answer_s, ev.Finished(request.id, request.max_new_tokens))

    def _refuses(self, request: Request, node: _Node, first_s: float) -> bool:
        """Give the request back if it would be late in an overload."""
        waits = node.prompts_until_s > self.now
        overload = node.standing.note(waiting=waits, now=self.now)
        if waits:
            node.standing.press(self.now)
        if not overload or request.sent or first_s - request.arrival_s <= request.slo.ttft_s:
            return False
        self.declined += 1
        node.running.discard(request.id)
        self._running.discard(request.id)
        why = fleet.Declined(request, node.node.id, 429, "it would be late", 1.0)
        self.at(self.now, why)
        return True

    def _load(self, node: _Node, model: str) -> float:
        """Return when the model can compute there; those used least often make room."""
        spec = self.models[model]
        uses = node.uses.setdefault(model, Uses.of(spec.weight_bytes))
        if model not in node.pool:
            room = node.node.pool_bytes - spec.weight_bytes
            used = sum(self.models[m].weight_bytes for m in node.pool)
            busy = {self.requests[one].model for one in node.running}
            for victim in sorted(
                node.pool, key=lambda m: (m in busy, node.uses[m].per_s(self.now))
            ):
                if used <= room:
                    break
                del node.pool[victim]
                used -= self.models[victim].weight_bytes
            self.loads += 1
            node.pool[model] = self.now + self._load_s + spec.weight_bytes / LOAD_BYTES_PER_S
        uses.note(self.now)
        return node.pool[model]

    def grown(self, name: str, tokens: int) -> Request:
        """The request after so many more tokens."""
        old = self.requests[name]
        self.requests[name] = replace(
            old, prompt_len=old.prompt_len + tokens, max_new_tokens=old.max_new_tokens - tokens,
            sent=old.sent + tokens,
        )  # fmt: skip
        return self.requests[name]
