"""One run of the server: pool, workers, controller and HTTP, from start to drain."""

import asyncio
import logging
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from c2cserve.catalog.file import Catalog
from c2cserve.catalog.roots import roots_of
from c2cserve.core.events import ClusterEvent, PoolState
from c2cserve.core.machine import Slice
from c2cserve.core.policy_names import OWN, PolicyName
from c2cserve.core.request import SamplingDefaults
from c2cserve.devices.plan import SliceWishes
from c2cserve.memory.pool import Listener, Pool
from c2cserve.policy.by_name import cluster_policy
from c2cserve.policy.cluster.admission import AdmissionSettings
from c2cserve.processes.collector import collect_rarely
from c2cserve.processes.instances import remove_dead_runs
from c2cserve.runtime.record import Record, both
from c2cserve.server.access.gate import Gate
from c2cserve.server.dashboard.live import TickTap
from c2cserve.server.settings import ServerSettings
from c2cserve.server.tls import Tls
from c2cserve.serving.controller.catalog_host import CatalogHost
from c2cserve.serving.controller.controller import Loop
from c2cserve.serving.controller.directory import BrokenModel
from c2cserve.serving.controller.fleet import Fleet, FleetSettings
from c2cserve.serving.controller.gateway import LiveGateway
from c2cserve.serving.controller.host import HostedModel
from c2cserve.serving.controller.workers import first_config
from c2cserve.serving.doors import Door, HttpDoor
from c2cserve.serving.key_secrecy import exposures
from c2cserve.serving.logs import LogFormat
from c2cserve.serving.run_signals import RunSignals, hang_ups_of
from c2cserve.serving.start_signals import StartSignals
from c2cserve.serving.startup import (
    check_pinned,
    fitting_policy,
    open_files,
    plan_machine,
    prepare_models,
)
from c2cserve.terminal.output import CliError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LiveSettings:
    """Everything a run depends on besides its catalogue, certificate and keys."""

    host: str
    port: int
    wishes: SliceWishes
    pool_bytes: int | None
    pool_dir: Path
    record: Path | None
    log_level: str
    log_format: LogFormat
    fleet: FleetSettings
    drain_timeout_s: float
    strict: bool
    admission: AdmissionSettings
    server: ServerSettings
    model_roots: Sequence[Path]
    """Directories under which added models may lie, besides the catalogue's own."""
    keys_file: Path | None
    usage_log: Path | None
    defaults: SamplingDefaults | None
    """Sampling defaults of all models; None: those of each checkpoint."""
    policy: PolicyName = OWN


class LiveServer:
    """One run, from the pool's lock to its removal."""

    def __init__(
        self, settings: LiveSettings, catalog: Catalog, tls: Tls | None, gate: Gate,
        signals: StartSignals,
    ) -> None:  # fmt: skip
        """`signals`: the handlers so far, which the server replaces when it can drain."""
        self._signals = signals
        self._settings = settings
        self._catalog = catalog
        self._tls = tls
        self._gate = gate
        self._instance = secrets.token_hex(4)
        self._gateway: LiveGateway | None = None
        self._policy: PolicyName = settings.policy

    async def run(self, listener: socket.socket) -> str | None:
        """Serve until drained. Return None, or why the server failed."""
        settings = self._settings
        for dead in remove_dead_runs(settings.pool_dir):
            log.warning("removed what the killed server %s left in shared memory", dead)
        plan = plan_machine(
            settings.wishes, settings.pool_dir, settings.pool_bytes, settings.policy
        )
        slices, budget = plan.slices, plan.pool_bytes
        self._policy = fitting_policy(settings.policy, slices)
        open_files(len(slices), settings.server.text.processes)
        pool = partial(
            make_pool, self._instance, settings.pool_dir, budget, nodes=plan.pool_nodes
        )  # fmt: skip
        kv_bytes = max(one.kv_bytes for one in slices)
        roots = roots_of(self._catalog, settings.model_roots)
        host = CatalogHost(
            self._catalog.base_dir, roots, pool, self._post, kv_bytes, settings.defaults,
            half_only=any(one.gpu is not None for one in slices),
        )  # fmt: skip
        if (defaults := settings.defaults) is not None:
            log.info("sampling defaults of all models: %s", str(defaults) or "none")
        try:
            models, broken = prepare_models(host, self._catalog, strict=settings.strict)
            check_pinned(models, budget)
            return await self._serve(listener, host, models, broken, slices)
        finally:
            host.close()

    def _post(self, event: ClusterEvent) -> None:
        assert self._gateway is not None
        self._gateway.post(event)

    async def _serve(
        self, listener: socket.socket, host: CatalogHost, models: list[HostedModel],
        broken: list[BrokenModel], slices: Sequence[Slice],
    ) -> str | None:  # fmt: skip
        settings = self._settings
        ended: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        tap = TickTap()
        gateway = self._gateway = LiveGateway(
            self._instance,
            _Loops(self._policy, settings.admission, settings.record, tap),
            self._make_fleet(slices),
            host,
            ended.set_result,
            settings.admission.entrance_burst_s,
            self._policy,
        )
        gateway.post(PoolState(host.budget_bytes))
        for model in models:
            gateway.add_hosted(model)
        for one in broken:
            gateway.add_broken(one)
        hang_ups = hang_ups_of(self._tls, self._gate, settings)
        RunSignals(gateway, self._signals, settings.drain_timeout_s, hang_ups).install()
        door = self._door(gateway, tap, slices, host)
        await door.open(listener)
        collect_rarely()
        gateway.start()
        log.info(
            "c2cserve %s on %s: %d models, %d failed, %d slices", self._instance,
            self._url(listener), len(models), len(broken), len(slices),
        )  # fmt: skip
        reason = await ended
        tap.closed = True
        await door.close()
        await asyncio.to_thread(gateway.join)
        return reason

    def _door(
        self, gateway: LiveGateway, tap: TickTap, slices: Sequence[Slice], host: CatalogHost
    ) -> Door:
        """Return what the outside world comes in by. A node of a cluster has another one."""
        settings = self._settings
        keys = bool(settings.keys_file or settings.server.api_keys)
        for text in exposures(settings.server, settings.host, keys=keys):
            log.warning("%s", text)
        return HttpDoor(gateway, settings.server, self._gate, self._tls, tap)

    def _url(self, listener: socket.socket) -> str:
        """Return where the server listens. The port is the listener's: port 0 asks for any."""
        host = self._settings.host
        shown = f"[{host}]" if ":" in host else host
        return f"{'https' if self._tls else 'http'}://{shown}:{listener.getsockname()[1]}"

    def _make_fleet(self, slices: Sequence[Slice]) -> Fleet:
        settings = self._settings
        record = None if settings.record is None else str(settings.record.resolve())
        configs = [
            first_config(one, settings.log_level, settings.log_format, record, self._policy)
            for one in slices
        ]
        fleet = Fleet(configs, settings.pool_dir / f"c2cserve.{self._instance}", settings.fleet)
        if settings.record is not None:
            remove_record(settings.record)
        return fleet


def remove_record(path: Path) -> None:
    """Remove the record of an earlier run. Raises CliError."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise CliError(f"--record {path}: {error.strerror}") from error


class _Loops:
    """Makes the controller's policy and its record for each of its loops.

    `tap` gets every tick too. Every loop gets a new policy and record: a policy that has failed
    leaves a stream that can be replayed."""

    def __init__(
        self, policy: PolicyName, admission: AdmissionSettings, path: Path | None, tap: TickTap
    ) -> None:
        self._policy = policy
        self._admission = admission
        self._path = path
        self._tap = tap
        self._record: Record | None = None

    def __call__(self, number: int) -> Loop:
        path = self._path
        policy = cluster_policy(self._policy, self._admission)
        self._tap.begin_loop()
        if path is None:
            return policy, self._tap
        if self._record is not None:
            self._record.close()
        stream = "controller" if number == 1 else f"controller/{number}"
        try:
            arguments = {"settings": self._admission, "policy": self._policy}
            self._record = Record(path, stream, "cluster", arguments)
        except OSError as error:
            if number == 1:
                raise CliError(f"--record {path}: {error.strerror}") from error
            log.error("%s: there is no record of %s: %s", path, stream, error.strerror)
            return policy, self._tap
        return policy, both(self._record, self._tap)


def make_pool(
    instance: str, directory: Path, budget: int, listener: Listener, *, nodes: Sequence[int] = ()
) -> Pool:
    """Return the run's pool. Raises CliError if there is no place for it."""
    try:
        return Pool(instance, directory, budget, listener, nodes=nodes)
    except OSError as error:
        raise CliError(f"--pool-dir {directory}: {error.strerror}", 2) from error
