"""A node's port: fronts hand in jobs and get their output.

Behind it is the same gateway that the HTTP server of a single machine talks to.
"""

import asyncio
import itertools
import logging
import secrets
import socket
import time
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from c2cserve.cluster import messages as msg
from c2cserve.cluster.node_changes import NodeChanges
from c2cserve.cluster.peer import Peer
from c2cserve.core.fleet import FleetNode
from c2cserve.core.model import ModelState, ModelStatus
from c2cserve.core.request import Job
from c2cserve.runtime.gateway import Gateway, Refused

log = logging.getLogger(__name__)

_REPORT_S = 0.5
_CHANGED_S = 0.05
"""A change of the pool waits so long for its report. Fronts send requests by what pools hold."""
_FRONT_TIMEOUT_S = 10.0
"""A front that is silent for longer is gone, and its jobs are cancelled. Nothing waits for that, so
it is longer than a front's own patience."""


class NodeGateway(Gateway, Protocol):
    """What a node's port needs beside the HTTP server's needs."""

    def hold(self, name: str, *, pinned: bool) -> None:
        """Load a model as if a request waited for it, and keep it if it is `pinned`. A name that is
        not there is ignored."""
        ...

    def note_uses(self, name: str, times_s: tuple[float, ...]) -> None:
        """Note when a model was used on other nodes, by `time.monotonic`."""
        ...


class NodeWeights(Protocol):
    """Weights from other nodes, and to them."""

    @property
    def port(self) -> int:
        """Where other nodes get weights; 0: nowhere."""
        ...

    def note(self, source: msg.Source) -> None:
        """Remember where the next load of a model finds its weights."""
        ...

    @property
    def pool_changes(self) -> int:
        """Loads that were begun and evictions, so far."""
        ...

    @property
    def counters(self) -> Mapping[str, float]: ...


class NodePort:
    def __init__(
        self, gateway: NodeGateway, node: FleetNode, secret: bytes, tables: str,
        weights: NodeWeights,
    ) -> None:  # fmt: skip
        """`tables`: the beginning of the paths of vocabularies, beside the run's segments."""
        self.weights = weights
        self.changes = NodeChanges(gateway)
        self.gateway = gateway
        self.node = node
        self.secret = secret
        self.tables = tables
        self.fronts: set[_Front] = set()
        self.numbers = itertools.count(1)
        """Numbers of jobs."""
        self._server: asyncio.Server | None = None
        self._reporting: asyncio.TimerHandle | None = None
        self._reported_s = float("-inf")
        self._reported_changes = 0

    async def listen(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Front(self), sock=listener)
        self._report()

    def _report(self) -> None:
        now, changes = time.monotonic(), self.weights.pool_changes
        if now - self._reported_s >= _REPORT_S or changes != self._reported_changes:
            self._reported_s, self._reported_changes = now, changes
            if self.fronts:
                report = self.report()
                for front in list(self.fronts):
                    front.send(report)
        self._reporting = asyncio.get_running_loop().call_later(_CHANGED_S, self._report)

    def report(self) -> msg.Report:
        """Return the state, without models that are neither in the pool nor asked for."""
        state = self.gateway.snapshot()
        models = tuple(one for one in state.models if _noteworthy(one))
        return msg.Report(
            replace(state, models=models, counters={**state.counters, **self.weights.counters})
        )

    async def close(self) -> None:
        if self._reporting is not None:
            self._reporting.cancel()
        if self._server is not None:
            self._server.close()
        for front in list(self.fronts):
            front.end("the node ends", flush=True)


def _noteworthy(model: ModelStatus) -> bool:
    return model.state is not ModelState.COLD or model.running + model.waiting > 0


class _Front(Peer):
    """A front's connection."""

    def __init__(self, port: NodePort) -> None:
        super().__init__(_FRONT_TIMEOUT_S)
        self._port = port
        self._nonce = secrets.token_bytes(msg.NONCE_BYTES)
        self._tables: dict[str, str] = {}
        """The front's path of a vocabulary -> the node's."""
        self._jobs: dict[str, asyncio.Task[None]] = {}
        self.version = 0
        """The version of the protocol that the front speaks."""

    def opened(self) -> None:
        self.send(msg.Greeting(msg.OLDEST_VERSION, msg.VERSION, self._nonce))

    def received(self, data: bytes) -> None:
        message = msg.decode_to_node(data)
        if not self.trusted:
            self._let_in(message)
            return
        match message:
            case msg.Submit(job, age_s, source, used_ago_s):
                if source is not None:
                    self._port.weights.note(source)
                if used_ago_s:
                    now = time.monotonic()
                    times_s = tuple(now - one for one in used_ago_s)
                    self._port.gateway.note_uses(job.request.model, times_s)
                task = asyncio.get_running_loop().create_task(self._run(job, age_s))
                self._jobs[job.request.id] = task
                task.add_done_callback(lambda done: self._ended(job.request.id, done))
            case msg.Cancel(request_id):
                if (task := self._jobs.get(request_id)) is not None:
                    task.cancel()
            case msg.Table(path, table):
                self._tables[path] = self._store(path, table)
            case msg.HoldModel(model, source, pinned):
                if source is not None:
                    self._port.weights.note(source)
                self._port.gateway.hold(model, pinned=pinned)
            case msg.KeyUse():
                self._hand_on(message)
            case msg.Changes(models):
                if new := self._port.changes.take(models, self.send):
                    self._hand_on(msg.Changes(new))
            case msg.Beat():
                pass
            case _:
                raise ValueError(f"{type(message).__name__} at this time")

    def _hand_on(self, message: msg.KeyUse | msg.Changes) -> None:
        """Hand a message on to the other fronts that know it."""
        for front in self._port.fronts - {self}:
            if front.version >= msg.FRONTS_TALK_VERSION:
                front.send(message)

    def _let_in(self, message: msg.ToNode) -> None:
        if isinstance(message, msg.Beat):
            return
        if not isinstance(message, msg.Enter):
            raise ValueError(f"{type(message).__name__} before Enter")
        right = msg.proof(self._port.secret, "front", self._nonce)
        if not msg.same(message.proof, right):
            raise ValueError("a front without this cluster's secret")
        self.trusted, self.version = True, message.version
        own = msg.proof(self._port.secret, "node", message.nonce)
        self.send(msg.Welcome(own, self._port.node, self._port.weights.port))
        self._port.fronts.add(self)
        changes = self._port.changes.changes.last
        if changes and self.version >= msg.FRONTS_TALK_VERSION:
            self.send(msg.Changes(changes))
        self.send(self._port.report())

    def _store(self, path: str, data: bytes) -> str:
        """Keep a vocabulary beside the segments; it is named by its contents."""
        digest = path.rsplit(".", 2)[-2]
        if not digest.isalnum():
            raise ValueError(f"{path!r} is no vocabulary's path")
        own = Path(f"{self._port.tables}.{digest}.tokens")
        if not own.exists():
            partial = Path(f"{own}.{secrets.token_hex(4)}")
            partial.write_bytes(data)
            partial.rename(own)
        return str(own)

    async def _run(self, job: Job, age_s: float) -> None:
        request_id = job.request.id
        try:
            async with aclosing(self._port.gateway.submit([self._own(job, age_s)])) as deltas:
                async for delta in deltas:
                    self.send(msg.Output(delta.renamed(request_id)))
        except Refused as refused:
            self.send(
                msg.Decline(request_id, refused.status, refused.reason, refused.retry_after_s)
            )
        except Exception as error:
            # One request's failure is never another's: its front may send it elsewhere.
            log.exception("request %s failed at the node's port", request_id)
            self.send(msg.Decline(request_id, 500, f"{type(error).__name__}: {error}", None))

    def _ended(self, request_id: str, task: "asyncio.Task[None]") -> None:
        # A request that was cancelled may have come again before its first task was over.
        if self._jobs.get(request_id) is task:
            del self._jobs[request_id]

    def _own(self, job: Job, age_s: float) -> Job:
        """Return the job with this node's clock, version of the model, and paths. Raises
        `Refused`.

        Its id is this node's too. After a cut, a front may send a request again while the
        connection that it came by before is still believed to live. When that one is given up, it
        must not cancel the new job."""
        request = job.request
        files = self._port.gateway.resolve(request.model)
        if files is None:
            raise Refused(404, f"the model {request.model!r} does not exist")
        own = replace(
            request, id=f"{request.id}.{next(self._port.numbers)}", model=files.key,
            arrival_s=time.monotonic() - age_s,
        )  # fmt: skip
        sampling = job.sampling
        if sampling.grammar is not None:
            tokens = self._tables[sampling.grammar.tokens]
            sampling = replace(sampling, grammar=replace(sampling.grammar, tokens=tokens))
        return replace(job, request=own, sampling=sampling)

    def closed(self, reason: str) -> None:
        self._port.fronts.discard(self)
        if self._jobs or not self.trusted:
            log.info("a front has left (%s), with %d requests", reason, len(self._jobs))
        for task in list(self._jobs.values()):
            task.cancel()
