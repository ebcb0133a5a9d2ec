"""`c2cserve serve`: catalogue, pool, workers, controller and HTTP server, joined."""

import asyncio
import contextlib
import logging
import secrets
import signal
import socket
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import uvicorn
import uvloop

from c2cserve.catalog.entry import CatalogError
from c2cserve.catalog.file import Catalog, load_catalog
from c2cserve.catalog.roots import roots_of
from c2cserve.cli import serve_options as opt
from c2cserve.cli.access_options import AccessOptions, read_tls
from c2cserve.cli.keys import open_gate
from c2cserve.core.events import ClusterEvent, PoolState
from c2cserve.core.machine import Gpu, ProfileChoice, Slice
from c2cserve.devices.discover import discover
from c2cserve.devices.gpus import GpuProblem
from c2cserve.devices.plan import ANY_GPUS, NO_GPUS, SliceWishes, plan_all
from c2cserve.devices.slices import SlicePlanError, plan_pool_bytes
from c2cserve.engine.gpu.requirements import CPUS_INSTEAD, obstacles, usable_gpus
from c2cserve.memory.pool import Listener, Pool, remove_dead_runs
from c2cserve.policy.cluster.admission import BURST_S, AdmissionSettings
from c2cserve.policy.cluster.policy import ClusterPolicy
from c2cserve.runtime.gateway import Refused
from c2cserve.runtime.record import Record, no_record
from c2cserve.server.access.gate import Gate
from c2cserve.server.connections import connections_within, raise_file_limit
from c2cserve.server.http import http_config
from c2cserve.server.settings import (
    ConnectionLimits,
    RequestLimits,
    ServerSettings,
    TextSettings,
)
from c2cserve.server.tls import Tls, TlsError
from c2cserve.serving.controller.catalog_host import CatalogHost
from c2cserve.serving.controller.controller import Loop
from c2cserve.serving.controller.directory import BrokenModel
from c2cserve.serving.controller.fleet import Fleet, FleetSettings
from c2cserve.serving.controller.gateway import LiveGateway
from c2cserve.serving.controller.host import HostedModel
from c2cserve.serving.controller.workers import first_config
from c2cserve.serving.key_secrecy import choose_admin_key, exposures, hide_keys
from c2cserve.serving.logs import LogFormat, setup_logging
from c2cserve.terminal.option_groups import grouped
from c2cserve.terminal.output import CliError, CliErrors

log = logging.getLogger(__name__)

# The defaults of the options, where they are explained.
FLEET, REQUESTS, CONNECTIONS, TEXT, SERVER = (
    FleetSettings(), RequestLimits(), ConnectionLimits(), TextSettings(), ServerSettings(),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Options:
    """All of the command line."""

    catalog: Path
    host: str
    port: int
    wishes: SliceWishes
    pool_bytes: int | None
    pool_dir: Path
    record: Path | None
    log_level: str
    log_format: LogFormat
    access: AccessOptions
    fleet: FleetSettings
    drain_timeout_s: float
    strict: bool
    admission: AdmissionSettings
    server: ServerSettings


@grouped
def serve(
    catalog: opt.CatalogPath,
    access: AccessOptions,
    host: opt.Host = "127.0.0.1",
    port: opt.Port = 8000,
    slices: opt.Slices = None,
    threads: opt.Threads = None,
    kv_bytes: opt.KvBytes = None,
    gpu_slices: opt.GpuSlices = ANY_GPUS,
    gpu_kv_bytes: opt.GpuKvBytes = None,
    gpu_profile: opt.GpuProfile = "measured",
    gpu_peer_bytes: opt.GpuPeerBytes = 0,
    host_kv_bytes: opt.HostKvBytes = 0,
    pool_bytes: opt.PoolBytes = None,
    pool_dir: opt.PoolDir = Path("/dev/shm"),
    record: opt.RecordFile = None,
    log_level: opt.LogLevel = "info",
    log_format: opt.LogFormatOption = "text",
    hang_timeout: opt.HangTimeout = FLEET.beat_timeout_s,
    stall_timeout: opt.StallTimeout = FLEET.stall_timeout_s,
    drain_timeout: opt.DrainTimeout = 60.0,
    strict: opt.Strict = False,
    max_waiting: opt.MaxWaiting = 1024,
    patience: opt.Patience = 20.0,
    burst: opt.Burst = BURST_S,
    api_key: opt.ApiKeys = None,
    admin_key: opt.AdminKey = "",
    max_choices: opt.MaxChoices = REQUESTS.choices,
    max_messages: opt.MaxMessages = REQUESTS.messages,
    max_stops: opt.MaxStops = REQUESTS.stops,
    max_logit_bias: opt.MaxLogitBias = REQUESTS.logit_bias,
    max_prompt_chars: opt.MaxPromptChars = REQUESTS.prompt_chars,
    max_prompt_tokens: opt.MaxPromptTokens = REQUESTS.prompt_tokens,
    max_body_bytes: opt.MaxBodyBytes = SERVER.body_bytes_max,
    max_header_bytes: opt.MaxHeaderBytes = CONNECTIONS.header_bytes,
    max_headers: opt.MaxHeaders = CONNECTIONS.headers,
    max_connections: opt.MaxConnections = CONNECTIONS.connections,
    head_timeout: opt.HeadTimeout = CONNECTIONS.head_timeout_s,
    body_timeout: opt.BodyTimeout = CONNECTIONS.body_timeout_s,
    idle_timeout: opt.IdleTimeout = CONNECTIONS.idle_timeout_s,
    send_timeout: opt.SendTimeout = CONNECTIONS.send_timeout_s,
    text_processes: opt.TextProcesses = TEXT.processes,
    text_timeout: opt.TextTimeout = TEXT.timeout_s,
) -> None:
    """Serve a catalogue of models over HTTP."""
    server = ServerSettings(
        opt.split_keys(api_key), choose_admin_key(admin_key, access.admin_key_file),
        max_body_bytes,
        requests=RequestLimits(
            max_choices, max_messages, max_stops, max_logit_bias, max_prompt_chars,
            max_prompt_tokens,
        ),
        connections=ConnectionLimits(
            connections_within(max_connections, raise_file_limit()), max_header_bytes, max_headers,
            head_timeout, body_timeout, idle_timeout, send_timeout,
        ),
        text=TextSettings(text_processes, text_timeout), access=access.settings(host),
    )  # fmt: skip
    wishes = SliceWishes(
        slices, threads, kv_bytes, gpu_slices, gpu_kv_bytes, gpu_profile, gpu_peer_bytes,
        host_kv_bytes,
    )  # fmt: skip
    admission = AdmissionSettings(max_waiting=max_waiting, patience=patience, burst_s=burst)
    options = Options(
        catalog, host, port, wishes, pool_bytes, pool_dir, record, log_level, log_format,
        access, FleetSettings(beat_timeout_s=hang_timeout, stall_timeout_s=stall_timeout),
        drain_timeout, strict, admission, server,
    )  # fmt: skip
    _serve(options)


def _serve(options: Options) -> None:
    try:
        setup_logging("server", options.log_level, options.log_format)
        catalog = load_catalog(options.catalog, with_files=False)
        tls = read_tls(options.access)
    except (CatalogError, TlsError, ValueError) as error:
        raise CliError(str(error), 2) from error
    hide_keys()
    gate = open_gate(options.server.api_keys, options.access.keys, options.access.usage_log)
    with _listen(options) as listener:
        reason = uvloop.run(_Server(options, catalog, tls, gate).run(listener))
    if reason is not None:
        raise CliError(reason)


@contextlib.contextmanager
def _listen(options: Options) -> Generator[socket.socket]:
    """Take the port before anything expensive is done."""
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    # The protocol is named because event loops switch Nagle's delay off only where it is.
    with socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((options.host, options.port))
        except OSError as error:
            where = f"{options.host}:{options.port}"
            raise CliError(
                f"cannot listen on {where}: {error.strerror}; choose another with --port"
            ) from error
        yield listener


class _Server:
    """One run, from the pool's lock to its removal."""

    def __init__(self, options: Options, catalog: Catalog, tls: Tls | None, gate: Gate) -> None:
        self._options = options
        self._catalog = catalog
        self._tls = tls
        self._gate = gate
        self._hang_ups = [] if tls is None else [tls.hang_up]
        if options.access.keys or options.access.usage_log:
            self._hang_ups.append(gate.hang_up)
        """What SIGHUP asks for. Without any, it ends the server, as it does other programs."""
        self._hanging_up: set[asyncio.Task[None]] = set()
        self._instance = secrets.token_hex(4)
        self._gateway: LiveGateway | None = None

    async def run(self, listener: socket.socket) -> str | None:
        """Until drained (None) or failed (why)."""
        options = self._options
        for dead in remove_dead_runs(options.pool_dir):
            log.warning("removed what the killed server %s left in shared memory", dead)
        slices, budget = self._plan()
        make_pool = partial(_make_pool, self._instance, options.pool_dir, budget)
        kv_bytes = max(one.kv_bytes for one in slices)
        roots = roots_of(self._catalog, options.access.model_root or ())
        host = CatalogHost(self._catalog.base_dir, roots, make_pool, self._post, kv_bytes)
        try:
            models, broken = _prepare_all(host, self._catalog, strict=options.strict)
            _check_pinned(models, budget)
            return await self._serve(listener, host, models, broken, slices)
        finally:
            host.close()

    def _plan(self) -> tuple[Sequence[Slice], int]:
        options = self._options
        if not options.pool_dir.is_dir():
            raise CliError(f"--pool-dir {options.pool_dir}: no such directory", 2)
        machine = discover(shm=options.pool_dir)
        wishes = options.wishes
        if wishes.gpu_slices != NO_GPUS:
            gpus = _gpus(wishes.gpu_profile, lent=wishes.gpu_peer_bytes > 0)
            machine = replace(machine, gpus=gpus)
        try:
            slices = plan_all(machine, wishes)
        except SlicePlanError as error:
            raise CliError(str(error), 2) from error
        budget = options.pool_bytes
        if budget is None:
            paused = sum(one.host_kv_bytes for one in slices)
            budget = min(plan_pool_bytes(machine), machine.memory_available_bytes - paused)
        return slices, budget

    def _post(self, event: ClusterEvent) -> None:
        assert self._gateway is not None
        self._gateway.post(event)

    async def _serve(
        self, listener: socket.socket, host: CatalogHost, models: list[HostedModel],
        broken: list[BrokenModel], slices: Sequence[Slice],
    ) -> str | None:  # fmt: skip
        options = self._options
        loop = asyncio.get_running_loop()
        record = None if options.record is None else str(options.record.resolve())
        configs = [
            first_config(one, options.log_level, options.log_format, record) for one in slices
        ]
        prefix = options.pool_dir / f"c2cserve.{self._instance}"
        fleet = Fleet(configs, prefix, options.fleet)
        if options.record is not None:
            options.record.unlink(missing_ok=True)
        ended: asyncio.Future[str | None] = loop.create_future()
        gateway = self._gateway = LiveGateway(
            self._instance,
            _Loops(options),
            fleet,
            host,
            ended.set_result,
            options.admission.burst_s,
        )
        gateway.post(PoolState(host.budget_bytes))
        for model in models:
            gateway.add_hosted(model)
        for one in broken:
            gateway.add_broken(one)
        http = _HttpServer(http_config(gateway, options.server, self._gate, tls=self._tls))
        serving = asyncio.create_task(http.serve([listener]))
        gateway.start()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._drain)
        if self._hang_ups:
            loop.add_signal_handler(signal.SIGHUP, self._hang_up)
        log.info(
            "c2cserve %s on %s://%s:%d: %d models, %d failed, %d slices", self._instance,
            "https" if self._tls else "http", options.host, options.port, len(models), len(broken),
            len(slices),
        )  # fmt: skip
        keys = bool(options.access.keys or options.server.api_keys)
        for text in exposures(options.server, options.host, keys=keys):
            log.warning("%s", text)
        reason = await ended
        http.should_exit = True
        await serving
        await asyncio.to_thread(gateway.join)
        return reason

    def _drain(self) -> None:
        """First signal: finish what is there. Second, or out of time: end."""
        assert self._gateway is not None
        if self._gateway.draining:
            self._gateway.abort("stopped by a second signal; running requests were cut")
            return
        log.info("draining")
        self._gateway.drain()
        timeout_s = self._options.drain_timeout_s
        reason = f"drain took more than {timeout_s:g} s; running requests were cut"
        asyncio.get_running_loop().call_later(timeout_s, self._gateway.abort, reason)

    def _hang_up(self) -> None:
        for handle in self._hang_ups:
            task = asyncio.create_task(handle())
            self._hanging_up.add(task)
            task.add_done_callback(self._hanging_up.discard)


class _Loops:
    """Makes the controller's policy and its record, anew for each of its loops: a policy that has
    broken leaves a stream behind that can be replayed."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._record: Record | None = None

    def __call__(self, number: int) -> Loop:
        admission, path = self._options.admission, self._options.record
        policy = ClusterPolicy(admission)
        if path is None:
            return policy, no_record
        if self._record is not None:
            self._record.close()
        stream = "controller" if number == 1 else f"controller/{number}"
        try:
            self._record = Record(path, stream, "cluster", {"settings": admission})
        except OSError as error:
            if number == 1:
                raise CliError(f"--record {path}: {error.strerror}") from error
            log.error("%s: there is no record of %s: %s", path, stream, error.strerror)
            return policy, no_record
        return policy, self._record


class _HttpServer(uvicorn.Server):
    """Signals are ours: uvicorn would stop listening at once instead of draining."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


def _gpus(profile: ProfileChoice, *, lent: bool = False) -> tuple[Gpu, ...]:
    try:
        gpus = usable_gpus()
    except GpuProblem as problem:
        raise CliError(f"the GPU driver fails: {problem}; {CPUS_INSTEAD}") from problem
    for obstacle in obstacles(gpus, profile, lent=lent) if gpus else ():
        raise CliError(f"{obstacle.text}: {obstacle.fix}; or {CPUS_INSTEAD}")
    return gpus


def _make_pool(instance: str, directory: Path, budget: int, listener: Listener) -> Pool:
    return Pool(instance, directory, budget, listener)


def _prepare_all(
    host: CatalogHost, catalog: Catalog, *, strict: bool
) -> tuple[list[HostedModel], list[BrokenModel]]:
    """The catalogue's models, and those whose checkpoints cannot be served. Raises CliError with a
    line for each of these if there is nothing else, or if `strict`."""
    models: list[HostedModel] = []
    broken: list[BrokenModel] = []
    for entry, raw in zip(catalog.entries, catalog.raw, strict=True):
        try:
            models.append(host.prepare(dict(raw)))
        except Refused as refused:
            broken.append(BrokenModel(entry.id, entry.aliases, dict(raw), refused.reason))
    if broken and (strict or not models):
        raise CliErrors([one.error for one in broken], 2)
    for one in broken:
        log.error("%s; it is failed until it is reloaded", one.error)
    return models, broken


def _check_pinned(models: Sequence[HostedModel], budget: int) -> None:
    pinned = [model for model in models if model.spec.pinned]
    needed = sum(model.spec.weight_bytes for model in pinned)
    if needed > budget:
        names = ", ".join(model.spec.id for model in pinned)
        raise CliError(
            f"the pinned models ({names}) take {needed} bytes of the host weight pool, whose "
            f"budget is {budget}: raise --pool-bytes or pin fewer"
        )
