"""Nodes without engines, behind the real port; and a front before them, without HTTP and Ray."""

import asyncio
import socket
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from c2cserve.cluster.link import NodeAddress
from c2cserve.cluster.messages import Source
from c2cserve.cluster.port import NodePort
from c2cserve.core.fleet import FleetNode
from c2cserve.core.model import ModelSpec, ModelState, ModelStatus
from c2cserve.core.request import Delta, FinishReason, Job, Request, Sampling, Slo, Timing
from c2cserve.policy.fleet.placement import FleetSettings
from c2cserve.policy.fleet.policy import FleetPolicy
from c2cserve.runtime.gateway import ModelFiles, Refused, SliceStatus, Snapshot
from c2cserve.runtime.ports import Recorder, no_record
from c2cserve.server.access.keyring import Keyring
from c2cserve.serving.controller.host import HostedModel
from c2cserve.serving.front.gateway import FleetGateway
from c2cserve.serving.front.key_limits import KeyLimits
from c2cserve.serving.front.loop import Loop
from c2cserve.serving.front.models import FrontModels

SECRET = b"secret" * 5
MODELS = ("a", "b")


def next_token(tokens: Sequence[int]) -> int:
    """The played model: a token follows from all before it, wherever it is sampled."""
    return (sum(tokens) * 31 + len(tokens)) % 50_000


def answer(prompt: Sequence[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


@dataclass
class PlayedEngine:
    """A node's gateway: each job samples `next_token`, a token every `step_s`."""

    name: str
    step_s: float = 0.001
    jobs: list[Job] = field(default_factory=list[Job])
    running: set[str] = field(default_factory=set[str])
    held: list[str] = field(default_factory=list[str])
    refusal: Refused | None = None
    gives_up_after: int | None = None
    """Tokens after which jobs end with `Refused`, as when a drain takes too long."""
    draining: bool = False
    slice_state: str = "up"
    catalogue: dict[str, dict[str, object]] = field(
        default_factory=lambda: {name: dict[str, object]() for name in MODELS}
    )
    reloaded: list[str] = field(default_factory=list[str])
    held_models: tuple[str, ...] = MODELS
    """Models in its pool."""
    used: dict[str, tuple[float, ...]] = field(default_factory=dict[str, tuple[float, ...]])
    """What it was told of uses elsewhere."""
    token_s: float = 0.0
    """What it says that a token takes; 0: nothing."""

    def resolve(self, name: str) -> ModelFiles | None:
        if name not in self.catalogue:
            return None
        return ModelFiles(name, "", 4096, 50_000, (), 1.0, 0.1, 0, version=f"{name}#2")

    async def submit(self, jobs: Sequence[Job]) -> AsyncGenerator[Delta, None]:
        (job,) = jobs  # as a port submits them
        self.jobs.append(job)
        if self.refusal is not None:
            raise self.refusal
        tokens, request = list(job.tokens), job.request
        self.running.add(request.id)
        try:
            for number in range(request.max_new_tokens):
                await asyncio.sleep(self.step_s)
                if number == self.gives_up_after:
                    raise Refused(503, "running requests were cut")
                tokens.append(next_token(tokens))
                last = number == request.max_new_tokens - 1
                yield Delta(
                    request.id, (tokens[-1],), finish=FinishReason.LENGTH if last else None,
                    timing=Timing("cpu0", False, 0.0, 0.0, 0.0, 0.0) if number == 0 else None,
                )  # fmt: skip
        finally:
            self.running.discard(request.id)

    def hold(self, name: str, *, pinned: bool) -> None:
        self.held.append(name)

    def note_uses(self, name: str, times_s: tuple[float, ...]) -> None:
        self.used[name] = times_s

    def snapshot(self) -> Snapshot:
        models = tuple(
            ModelStatus(one, (), ModelState.READY, 4096, 100, 100, False, 0, token_s=self.token_s)
            for one in self.held_models
        )
        return Snapshot(
            self.name, 0.0, self.draining, (self._slice(),), models, 200, 1000, len(self.running),
            0, counters={"steps": 1.0},
        )  # fmt: skip

    def _slice(self) -> SliceStatus:
        return SliceStatus(
            id="cpu0", kind="cpu", state=self.slice_state, pid=1, cpus=(), restarts=0,
            active_models=(), last_model="", kv_total_bytes=0, busy_share=0.0, heartbeat_age_s=0.0,
        )  # fmt: skip

    def cancel(self, request_id: str) -> None: ...

    def overload(self, *_: Any) -> Refused | None: ...

    may_refuse = False
    ready = healthy = True

    def models(self) -> Sequence[ModelStatus]:
        return self.snapshot().models

    async def add_model(self, entry: dict[str, object]) -> ModelStatus:
        if self.refusal is not None:
            raise self.refusal
        self.catalogue[str(entry["id"])] = entry
        return self.models()[0]

    async def remove_model(self, name: str) -> None:
        del self.catalogue[name]

    async def reload_model(self, name: str) -> ModelStatus:
        self.reloaded.append(name)
        return self.models()[0]


class PlayedWeights:
    """What a node is told of other pools."""

    port = 7

    def __init__(self) -> None:
        self.pool_changes = 0
        self.sources: list[Source] = []
        self.counters = {"fetched_models": 1.0}

    def note(self, source: Source) -> None:
        self.sources.append(source)


class PlayedNode:
    def __init__(self, name: str, cost: float = 0.0, **more: Any) -> None:
        self.name, self.cost = name, cost
        self.engine = PlayedEngine(name, **more)
        self.port: NodePort | None = None
        self.weights = PlayedWeights()
        self.address = NodeAddress("127.0.0.1", 0, SECRET)

    async def start(self, secret: bytes = SECRET) -> "PlayedNode":
        listener = socket.create_server(("127.0.0.1", 0))
        self.address = NodeAddress("127.0.0.1", listener.getsockname()[1], secret)
        node = FleetNode(f"{self.name}.1", "cpu", 1, 1000, self.cost)
        self.weights = PlayedWeights()
        self.port = NodePort(self.engine, node, SECRET, "/nowhere/c2cserve", self.weights)
        await self.port.listen(listener)
        return self

    async def stop(self) -> None:
        assert self.port is not None
        await self.port.close()


def prepare(entry: dict[str, object]) -> HostedModel:
    if entry.get("path") == "bad":
        raise Refused(400, "no checkpoint")
    return replace(hosted(str(entry["id"])), entry=entry)


def hosted(name: str) -> HostedModel:
    spec = ModelSpec(name, 100, 1, 1, 4096)
    files = ModelFiles(name, "", 4096, 50_000, (), 1.0, 0.1, 0)
    return HostedModel(spec, files, (f"{name}-alias",), {}, "float32", {})


class PlayedFront:
    """A front and its nodes, in this event loop."""

    def __init__(
        self, *nodes: PlayedNode, timeout_s: float = 5.0, settings: FleetSettings | None = None,
        record: Recorder[Any, Any] = no_record, name: str = "front",
        keyring: Keyring | None = None,
    ) -> None:  # fmt: skip
        self.nodes = list(nodes)
        self.ended: list[str | None] = []
        models = FrontModels([hosted(one) for one in MODELS], [])
        self.policies: list[FleetPolicy] = []
        """Those that its loops have had."""

        self.records: list[Recorder[Any, Any]] = [record]
        """Those that the next loops have."""

        def loop(number: int) -> Loop:
            self.policies.append(FleetPolicy(settings or FleetSettings()))
            return self.policies[-1], self.records.pop(0) if self.records else no_record

        self.gateway = FleetGateway(
            name, models, loop, self.ended.append, timeout_s,
            KeyLimits(name, keyring or Keyring((), from_file=False)), prepare,
        )  # fmt: skip
        self._number = 0

    async def __aenter__(self) -> "PlayedFront":
        self.gateway.start()
        for node in self.nodes:
            if node.port is None:
                await node.start()
        self.gateway.members({node.name: node.address for node in self.nodes})
        await self.until(lambda: nodes_up(self) == len(self.nodes))
        return self

    async def __aexit__(self, *_: object) -> None:
        if not self.ended:
            self.gateway.abort("the test is over")
        for node in self.nodes:
            await node.stop()

    async def until(self, check: Callable[[], bool], timeout_s: float = 60.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not check():
                await asyncio.sleep(0.005)

    def job(self, model: str = "a", count: int = 40) -> Job:
        self._number += 1
        tokens = tuple(range(self._number, self._number + 20))
        now = asyncio.get_running_loop().time()
        request = Request(f"r{self._number}", model, len(tokens), count, now, Slo(30.0, 1.0))
        return Job(request, tokens, Sampling(seed=1))

    async def run(self, job: Job, begun: asyncio.Event | None = None) -> list[int]:
        tokens: list[int] = []
        async for delta in self.gateway.submit([job]):
            tokens += delta.tokens
            if begun is not None and len(tokens) >= 5:
                begun.set()
        return tokens

    def on(self, job: Job) -> list[str]:
        """The nodes that the job was sent to."""
        id_ = job.request.id
        return [
            n.name
            for n in self.nodes
            if any(one.request.id.startswith(f"{id_}.") for one in n.engine.jobs)
        ]


def counters(front: PlayedFront) -> Mapping[str, float]:
    return front.gateway.snapshot().counters


def nodes_up(front: PlayedFront) -> int:
    return list(front.gateway.snapshot().nodes.values()).count("up")
