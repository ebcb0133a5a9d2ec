"""One run of the server: pool, workers, controller and HTTP, from start to drain."""

import asyncio
import contextlib
import logging
import secrets
import signal
import socket
from collections.abc import Awaitable, Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import uvicorn

from c2cserve.catalog.file import Catalog
from c2cserve.catalog.roots import roots_of
from c2cserve.core.events import ClusterEvent, PoolState
from c2cserve.core.machine import Slice
from c2cserve.core.request import SamplingDefaults
from c2cserve.devices.plan import SliceWishes
from c2cserve.memory.pool import Listener, Pool, remove_dead_runs
from c2cserve.policy.cluster.admission import AdmissionSettings
from c2cserve.policy.cluster.policy import ClusterPolicy
from c2cserve.runtime.record import Record, both
from c2cserve.server.access.gate import Gate
from c2cserve.server.dashboard.live import TickTap
from c2cserve.server.http import http_config
from c2cserve.server.settings import ServerSettings
from c2cserve.server.tls import Tls
from c2cserve.serving.controller.catalog_host import CatalogHost
from c2cserve.serving.controller.controller import Loop
from c2cserve.serving.controller.directory import BrokenModel
from c2cserve.serving.controller.fleet import Fleet, FleetSettings
from c2cserve.serving.controller.gateway import LiveGateway
from c2cserve.serving.controller.host import HostedModel
from c2cserve.serving.controller.workers import first_config
from c2cserve.serving.key_secrecy import exposures
from c2cserve.serving.logs import LogFormat
from c2cserve.serving.start_signals import StartSignals
from c2cserve.serving.startup import (
    check_open_files,
    check_pinned,
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
        self._hang_ups: list[Callable[[], Awaitable[None]]] = []
        """What SIGHUP asks for. If there is nothing, SIGHUP drains the server (StartSignals)."""
        if tls is not None:
            self._hang_ups.append(tls.hang_up)
        if settings.keys_file or settings.usage_log:
            self._hang_ups.append(gate.hang_up)
        self._hanging_up: set[asyncio.Future[None]] = set()
        self._instance = secrets.token_hex(4)
        self._gateway: LiveGateway | None = None

    async def run(self, listener: socket.socket) -> str | None:
        """Serve until drained. Return None, or why the server failed."""
        settings = self._settings
        for dead in remove_dead_runs(settings.pool_dir):
            log.warning("removed what the killed server %s left in shared memory", dead)
        slices, budget = plan_machine(settings.wishes, settings.pool_dir, settings.pool_bytes)
        check_open_files(len(slices), settings.server.text.processes)
        make_pool = partial(_make_pool, self._instance, settings.pool_dir, budget)
        kv_bytes = max(one.kv_bytes for one in slices)
        roots = roots_of(self._catalog, settings.model_roots)
        host = CatalogHost(
            self._catalog.base_dir, roots, make_pool, self._post, kv_bytes, settings.defaults,
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
            _Loops(settings.admission, settings.record, tap),
            self._make_fleet(slices),
            host,
            ended.set_result,
            settings.admission.burst_s,
        )
        gateway.post(PoolState(host.budget_bytes))
        for model in models:
            gateway.add_hosted(model)
        for one in broken:
            gateway.add_broken(one)
        self._handle_signals()
        http = _HttpServer(
            http_config(gateway, settings.server, self._gate, tls=self._tls, tap=tap)
        )
        serving = asyncio.create_task(http.serve([listener]))
        gateway.start()
        log.info(
            "c2cserve %s on %s: %d models, %d failed, %d slices", self._instance,
            self._url(listener), len(models), len(broken), len(slices),
        )  # fmt: skip
        keys = bool(settings.keys_file or settings.server.api_keys)
        for text in exposures(settings.server, settings.host, keys=keys):
            log.warning("%s", text)
        reason = await ended
        tap.closed = True
        http.should_exit = True
        await serving
        await asyncio.to_thread(gateway.join)
        return reason

    def _url(self, listener: socket.socket) -> str:
        """Return where the server listens. The port is the listener's: port 0 asks for any."""
        host = self._settings.host
        shown = f"[{host}]" if ":" in host else host
        return f"{'https' if self._tls else 'http'}://{shown}:{listener.getsockname()[1]}"

    def _make_fleet(self, slices: Sequence[Slice]) -> Fleet:
        settings = self._settings
        record = None if settings.record is None else str(settings.record.resolve())
        configs = [
            first_config(one, settings.log_level, settings.log_format, record) for one in slices
        ]
        fleet = Fleet(configs, settings.pool_dir / f"c2cserve.{self._instance}", settings.fleet)
        if settings.record is not None:
            settings.record.unlink(missing_ok=True)
        return fleet

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._drain)
        if self._hang_ups or self._signals.ends_by_hang_up:
            loop.add_signal_handler(signal.SIGHUP, self._hang_up)
        if self._signals.hung_up:
            self._hang_up()

    def _drain(self) -> None:
        """First signal: finish what is there. Second, or out of time: end."""
        assert self._gateway is not None
        if self._gateway.draining:
            self._gateway.abort("stopped by a second signal; running requests were cut")
            return
        log.info("draining")
        self._gateway.drain()
        timeout_s = self._settings.drain_timeout_s
        reason = f"drain took more than {timeout_s:g} s; running requests were cut"
        asyncio.get_running_loop().call_later(timeout_s, self._gateway.abort, reason)

    def _hang_up(self) -> None:
        """Read again what SIGHUP asks for. A terminal that closes sends it more than once: it is
        never the second signal of `_drain`."""
        assert self._gateway is not None
        if not self._hang_ups and not self._gateway.draining:
            self._drain()
        for handle in self._hang_ups:
            task = asyncio.ensure_future(handle())
            self._hanging_up.add(task)
            task.add_done_callback(self._hanging_up.discard)


class _Loops:
    """Makes the controller's policy and its record for each of its loops.

    `tap` gets every tick too. Every loop gets a new policy and record: a policy that has failed
    leaves a stream that can be replayed."""

    def __init__(self, admission: AdmissionSettings, path: Path | None, tap: TickTap) -> None:
        self._admission = admission
        self._path = path
        self._tap = tap
        self._record: Record | None = None

    def __call__(self, number: int) -> Loop:
        path = self._path
        policy = ClusterPolicy(self._admission)
        self._tap.begin_loop()
        if path is None:
            return policy, self._tap
        if self._record is not None:
            self._record.close()
        stream = "controller" if number == 1 else f"controller/{number}"
        try:
            self._record = Record(path, stream, "cluster", {"settings": self._admission})
        except OSError as error:
            if number == 1:
                raise CliError(f"--record {path}: {error.strerror}") from error
            log.error("%s: there is no record of %s: %s", path, stream, error.strerror)
            return policy, self._tap
        return policy, both(self._record, self._tap)


class _HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers, which would stop listening instead of draining."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


def _make_pool(instance: str, directory: Path, budget: int, listener: Listener) -> Pool:
    try:
        return Pool(instance, directory, budget, listener)
    except OSError as error:
        raise CliError(f"--pool-dir {directory}: {error.strerror}", 2) from error
