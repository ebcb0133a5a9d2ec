"""`c2cserve serve`: the options of a server, and the port it listens on."""

import contextlib
import errno
import socket
from collections.abc import Generator
from pathlib import Path

import uvloop

from c2cserve.catalog.entry import CatalogError
from c2cserve.catalog.file import load_catalog
from c2cserve.catalog.generation import chosen_defaults
from c2cserve.cli import serve_options as opt
from c2cserve.cli.access_options import AccessOptions, open_gate, read_tls
from c2cserve.core.request import SamplingDefaults
from c2cserve.devices.plan import ANY_GPUS, SliceWishes
from c2cserve.server.connections import connections_within
from c2cserve.server.settings import (
    ConnectionLimits,
    RequestLimits,
    ServerSettings,
    TextSettings,
)
from c2cserve.server.tls import TlsError
from c2cserve.serving.controller.fleet import FleetSettings
from c2cserve.serving.key_secrecy import choose_admin_key, hide_keys
from c2cserve.serving.live_server import LiveServer, LiveSettings
from c2cserve.serving.logs import setup_logging
from c2cserve.serving.start_signals import StartSignals
from c2cserve.serving.startup import open_files
from c2cserve.terminal.option_groups import grouped
from c2cserve.terminal.output import CliError

# The defaults of the options, where they are explained.
FLEET, REQUESTS, CONNECTIONS, TEXT, SERVER = (
    FleetSettings(), RequestLimits(), ConnectionLimits(), TextSettings(), ServerSettings(),
)  # fmt: skip

_OF_PORTS = (errno.EADDRINUSE, errno.EACCES)


@grouped
def serve(
    catalog: opt.CatalogPath,
    access: AccessOptions,
    cluster: opt.ClusterOptions,
    policy: opt.PolicyOptions,
    host: opt.Host = "127.0.0.1",
    port: opt.Port = 8000,
    slices: opt.Slices = None,
    threads: opt.Threads = None,
    kv_bytes: opt.KvBytes = None,
    gpu_slices: opt.GpuSlices = ANY_GPUS,
    gpu_kv_bytes: opt.GpuKvBytes = None,
    gpu_profile: opt.GpuProfile = "measured",
    gpu_peer_bytes: opt.GpuPeerBytes = 0,
    gpu_lanes: opt.GpuLanes = 2,
    gpu_relays: opt.GpuRelays = False,
    host_kv_bytes: opt.HostKvBytes = None,
    pool_bytes: opt.PoolBytes = None,
    pool_dir: opt.PoolDir = Path("/dev/shm"),
    record: opt.RecordFile = None,
    log_level: opt.LogLevel = "info",
    log_format: opt.LogFormatOption = "text",
    hang_timeout: opt.HangTimeout = FLEET.beat_timeout_s,
    stall_timeout: opt.StallTimeout = FLEET.stall_timeout_s,
    drain_timeout: opt.DrainTimeout = 60.0,
    strict: opt.Strict = False,
    generation_config: opt.GenerationConfig = "auto",
    api_key: opt.ApiKeys = None,
    admin_key: opt.AdminKey = "",
    max_choices: opt.MaxChoices = REQUESTS.choices,
    max_messages: opt.MaxMessages = REQUESTS.messages,
    max_stops: opt.MaxStops = REQUESTS.stops,
    max_logit_bias: opt.MaxLogitBias = REQUESTS.logit_bias,
    max_prompt_chars: opt.MaxPromptChars = REQUESTS.prompt_chars,
    max_prompt_tokens: opt.MaxPromptTokens = REQUESTS.prompt_tokens,
    max_grammar_chars: opt.MaxGrammarChars = REQUESTS.grammar_chars,
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
        max_body_bytes, requests=RequestLimits(
            max_choices, max_messages, max_stops, max_logit_bias, max_prompt_chars,
            max_prompt_tokens, max_grammar_chars,
        ), connections=ConnectionLimits(
            connections_within(max_connections, open_files(0, text_processes)), max_header_bytes,
            max_headers, head_timeout, body_timeout, idle_timeout, send_timeout,
        ), text=TextSettings(text_processes, text_timeout), access=access.settings(host),
    )  # fmt: skip
    wishes = SliceWishes(
        slices, threads, kv_bytes, gpu_slices, gpu_kv_bytes, gpu_profile, gpu_peer_bytes,
        host_kv_bytes, gpu_lanes, gpu_relays)  # fmt: skip
    settings = LiveSettings(
        host, port, wishes, pool_bytes, pool_dir, record, log_level, log_format,
        FleetSettings(beat_timeout_s=hang_timeout, stall_timeout_s=stall_timeout),
        drain_timeout, strict, policy.admission(), server,
        access.model_root or (), access.keys, access.usage_log, _defaults(generation_config),
        policy.policy,
    )  # fmt: skip
    _serve(catalog, settings, access, cluster)


def _defaults(choice: str) -> SamplingDefaults | None:
    try:
        return chosen_defaults(choice)
    except CatalogError as error:
        raise CliError(str(error), 2) from error


def _serve(
    catalog_path: Path, settings: LiveSettings, access: AccessOptions, cluster: opt.ClusterOptions
) -> None:  # fmt: skip
    signals = StartSignals(reloads=bool(access.keys or access.usage_log or access.ssl_certfile))
    try:
        setup_logging("server", settings.log_level, settings.log_format)
        catalog = load_catalog(catalog_path, with_files=False)
        tls = read_tls(access)
    except (CatalogError, TlsError, ValueError) as error:
        raise CliError(str(error), 2) from error
    hide_keys()
    gate = open_gate(settings.server.api_keys, access)
    with _listen(settings.host, settings.port) as listener:
        server = LiveServer(settings, catalog, tls, gate, signals)
        if (address := cluster.cluster) is not None:
            from c2cserve.serving.front.server import FrontServer  # a server of its own needs none

            timeout_s = cluster.node_timeout
            server = FrontServer(address, timeout_s, settings, catalog, tls, gate, signals)
        reason = uvloop.run(server.run(listener))
    if signals.interrupted:
        raise KeyboardInterrupt
    if reason is not None:
        raise CliError(reason)


@contextlib.contextmanager
def _listen(host: str, port: int) -> Generator[socket.socket]:
    """Take the port before anything expensive is done. Raises CliError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is named because event loops switch Nagle's delay off only where it is.
    with socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            option = "--port" if error.errno in _OF_PORTS else "--host"
            raise CliError(
                f"cannot listen on {host}:{port}: {error.strerror}; choose another with {option}"
            ) from error
        yield listener
