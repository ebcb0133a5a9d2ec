"""One run of a front: its nodes, by Ray, and HTTP, from start to drain."""

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import sys
from asyncio.subprocess import PIPE, Process
from functools import partial

import msgspec

from c2cserve.catalog.file import Catalog
from c2cserve.catalog.roots import roots_of
from c2cserve.cluster.membership import MemberOrder
from c2cserve.core.events import ClusterEvent
from c2cserve.policy.fleet.placement import FleetSettings
from c2cserve.policy.fleet.policy import FleetPolicy
from c2cserve.processes.collector import collect_rarely
from c2cserve.processes.instances import remove_dead_runs
from c2cserve.runtime.ports import no_record
from c2cserve.runtime.record import Record
from c2cserve.server.access.gate import Gate
from c2cserve.server.dashboard.live import TickTap
from c2cserve.server.tls import Tls
from c2cserve.serving.controller.catalog_host import CatalogHost
from c2cserve.serving.doors import HttpDoor
from c2cserve.serving.front.catalogue import Prepare
from c2cserve.serving.front.following import follow
from c2cserve.serving.front.gateway import FleetGateway
from c2cserve.serving.front.key_limits import KeyLimits
from c2cserve.serving.front.loop import Loop
from c2cserve.serving.front.models import FrontModels
from c2cserve.serving.key_secrecy import exposures
from c2cserve.serving.live_server import LiveSettings, make_pool, remove_record
from c2cserve.serving.node.spec import node_spec
from c2cserve.serving.run_signals import RunSignals, hang_ups_of
from c2cserve.serving.start_signals import StartSignals
from c2cserve.serving.startup import prepare_models
from c2cserve.terminal.output import CliError

log = logging.getLogger(__name__)

_ANY_BYTES = 1 << 62
"""A front loads no weights, so it has no bound of its own for a model."""
_REJOIN_S, _REJOIN_MOST_S = 1.0, 10.0
"""How long a front waits before it looks for Ray again: twice as long each time, up to the most."""
_END_S = 10.0
"""A membership process ends itself within this time, or is killed."""
NO_CLUSTER = 3
"""The status of a membership process that finds no cluster."""


class FrontServer:
    """`cluster`: the address of Ray's head, `auto`, or `local`."""

    def __init__(
        self, cluster: str, node_timeout_s: float, settings: LiveSettings, catalog: Catalog,
        tls: Tls | None, gate: Gate, signals: StartSignals,
    ) -> None:  # fmt: skip
        self._cluster = cluster
        self._node_timeout_s = node_timeout_s
        self._settings = settings
        self._catalog = catalog
        self._tls = tls
        self._gate = gate
        self._signals = signals
        self._instance = secrets.token_hex(4)
        self._record: Record | None = None

    async def run(self, listener: socket.socket) -> str | None:
        """Serve until drained. Return None, or why the front failed."""
        settings = self._settings
        for dead in remove_dead_runs(settings.pool_dir):
            log.warning("removed what the killed server %s left in shared memory", dead)
        # The pool of a front stays empty: it is where vocabularies lie, and goes with the run.
        pool = partial(make_pool, self._instance, settings.pool_dir, _ANY_BYTES)
        roots = roots_of(self._catalog, settings.model_roots)
        host = CatalogHost(
            self._catalog.base_dir, roots, pool, _no_event, _ANY_BYTES, settings.defaults
        )
        try:
            hosted, broken = prepare_models(host, self._catalog, strict=settings.strict)
            return await self._serve(listener, FrontModels(hosted, broken), host.prepare)
        finally:
            host.close()

    async def _serve(
        self, listener: socket.socket, models: FrontModels, prepare: Prepare
    ) -> str | None:
        settings = self._settings
        ended: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        gateway = FleetGateway(
            self._instance, models, self._loop, ended.set_result, self._node_timeout_s,
            KeyLimits(self._instance, self._gate.keyring), prepare,
        )  # fmt: skip
        hang_ups = hang_ups_of(self._tls, self._gate, settings)
        RunSignals(gateway, self._signals, settings.drain_timeout_s, hang_ups).install()
        keys = bool(settings.keys_file or settings.server.api_keys)
        for text in exposures(settings.server, settings.host, keys=keys):
            log.warning("%s", text)
        tap = TickTap()
        door = HttpDoor(gateway, settings.server, self._gate, self._tls, tap)
        await door.open(listener)
        collect_rarely()
        gateway.start()
        joining = asyncio.create_task(self._join(gateway))
        port = listener.getsockname()[1]
        log.info("front %s on %s:%d, cluster %s", self._instance, settings.host, port,
                 self._cluster)  # fmt: skip
        reason = await ended
        joining.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await joining
        tap.closed = True
        await door.close()
        return reason

    def _loop(self, number: int) -> Loop:
        """Return the policy and the record of the front's loop. Each has a stream of its own."""
        settings, path = FleetSettings(), self._settings.record
        policy = FleetPolicy(settings)
        if path is None:
            return policy, no_record
        if number == 1:
            remove_record(path)
        if self._record is not None:
            self._record.close()
        stream = "front" if number == 1 else f"front/{number}"
        try:
            self._record = Record(path, stream, "fleet", {"settings": settings})
        except OSError as error:
            if number == 1:
                raise CliError(f"--record {path}: {error.strerror}") from error
            log.error("%s: there is no record of %s: %s", path, stream, error.strerror)
            return policy, no_record
        return policy, self._record

    # ---- membership -----------------------------------------------------------------------------

    async def _join(self, gateway: FleetGateway) -> None:
        """Follow who is in the cluster. Without its head, the front goes on with the nodes it
        has."""
        joined, delay_s = False, _REJOIN_S
        while True:
            try:
                process = await self._start_members()
            except OSError as error:  # no processes or descriptors are left: that is not for ever
                log.error("the membership process cannot be started now: %s", error)
                await asyncio.sleep(delay_s)
                delay_s = min(_REJOIN_MOST_S, 2.0 * delay_s)
                continue
            try:
                assert process.stdout is not None
                heard = await follow(process.stdout, gateway.members)
                joined, delay_s = joined or heard, _REJOIN_S if heard else delay_s
                status = await process.wait()
            except (msgspec.MsgspecError, ValueError) as error:
                log.error("what the membership process says cannot be read: %s", error)
                status = await _end(process)
            finally:
                await _end(process)
            if status == NO_CLUSTER and not joined:
                gateway.abort(f"there is no cluster at {self._cluster!r}: see the log")
                return
            log.error("Ray does not answer (status %d): serving goes on with known nodes", status)
            await asyncio.sleep(delay_s)
            delay_s = min(_REJOIN_MOST_S, 2.0 * delay_s)

    async def _start_members(self) -> Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "c2cserve.cli.main", "members",
            stdin=PIPE, stdout=PIPE, limit=1 << 26,
        )  # fmt: skip
        assert process.stdin is not None
        spec = msgspec.Raw(node_spec(self._settings, self._catalog))
        process.stdin.write(msgspec.json.encode(MemberOrder(self._cluster, os.getpid(), spec)))
        process.stdin.close()
        return process


async def _end(process: Process) -> int:
    """End the membership process and return its status. With `local` Ray's processes are its
    children: killed at once, it would leave those that were just being started."""
    if process.returncode is None:
        process.terminate()
        try:
            return await asyncio.wait_for(process.wait(), _END_S)
        except TimeoutError:
            process.kill()
    return await process.wait()


def _no_event(event: ClusterEvent) -> None:
    """A front's pool has no events."""
