"""The options of `c2cserve serve`: their types and what `--help` says of them."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from c2cserve.core.machine import ProfileChoice
from c2cserve.core.policy_names import OWN, PolicyName
from c2cserve.policy.by_name import admission_of
from c2cserve.policy.cluster.admission import BURST_S, AdmissionSettings
from c2cserve.serving.logs import LogFormat
from c2cserve.terminal.sizes import size_option

_LIMITS = "Limits of a request"
_SOCKETS = "Connections"
_API_KEYS = "C2CSERVE_API_KEYS"
_CLUSTER = "Cluster"


def address(host: str) -> str:
    """Return the host to listen on; brackets around an IPv6 address, as in a URL, are left out.

    Raises BadParameter for an empty one: an unset variable must not open the server to all."""
    host = host.removeprefix("[").removesuffix("]")
    if not host:
        raise typer.BadParameter(
            "it is empty; 127.0.0.1 is this machine alone, 0.0.0.0 all its addresses"
        )
    return host


CatalogPath = Annotated[Path, typer.Option("--catalog", help="The catalogue file (TOML).")]
Host = Annotated[str, typer.Option(callback=address, help="Address to listen on.")]
Port = Annotated[
    int, typer.Option(min=0, max=65535, help="Port to listen on; 0: a free one, see the log.")
]
Slices = Annotated[
    int | None,
    typer.Option(min=1, help="CPU slices; default: by the machine, none beside GPU slices."),
]
Threads = Annotated[int | None, typer.Option(min=1, help="Threads per CPU slice.")]
KvBytes = Annotated[int | None, size_option("KV arena per CPU slice.")]
GpuSlices = Annotated[
    str,
    typer.Option(
        help="auto: whole if there is a GPU; none; whole: one per GPU; 16x7: of each GPU 7 of"
        " 16 SMs; whole@0,1: on these."
    ),
]
GpuKvBytes = Annotated[
    int | None,
    size_option("KV arena per GPU slice; default: by free memory."),
]
GpuProfile = Annotated[
    ProfileChoice,
    typer.Option(
        help="Pick GEMM dataflows by this machine's profile, or by known rates of the nearest GPU:"
        " H200 or H100."
    ),
]
GpuPeerBytes = Annotated[
    int, size_option("What GPUs without slices lend to each GPU with some.", least=0)
]
GpuLanes = Annotated[
    int,
    typer.Option(
        min=1, max=2,
        help="2: on a whole GPU or MIG instance, models whose weights stream run beside the"
        " others. 1: all take turns.",
    ),
]  # fmt: skip
GpuRelays = Annotated[
    bool,
    typer.Option(
        "--gpu-relays", help="GPUs with slices lend each other their links to host memory."
    ),
]
HostKvBytes = Annotated[
    int | None,
    size_option(
        "Host memory of each slice for KV of requests that make room for others, and for cached"
        " prefixes; 0: they are computed again. Default: up to 4 GiB of each GPU slice, none of CPU"
        " slices.",
        least=0,
    ),
]
PoolBytes = Annotated[int | None, size_option("Host weight pool.")]
PoolDir = Annotated[Path, typer.Option(help="Shared-memory filesystem for the pool.")]
RecordFile = Annotated[
    Path | None, typer.Option("--record", help="Write every event and action to this file.")
]
LogLevel = Annotated[
    Literal["debug", "info", "warning", "error"],
    typer.Option(case_sensitive=False, help="The least that is logged."),
]
LogFormatOption = Annotated[LogFormat, typer.Option("--log-format", help="json or text.")]
HangTimeout = Annotated[
    float, typer.Option(min=0.1, help="Seconds without a sign of life before a worker is replaced.")
]
StallTimeout = Annotated[
    float,
    typer.Option(
        min=0.1, help="Seconds with requests and no step done before a slice is in trouble."
    ),
]
DrainTimeout = Annotated[
    float, typer.Option(min=0.0, help="Seconds that running requests get after SIGTERM.")
]
Strict = Annotated[
    bool, typer.Option("--strict", help="End at once if a model of the catalogue is broken.")
]
GenerationConfig = Annotated[
    str,
    typer.Option(
        help="Sampling defaults. auto: those of each checkpoint; none; or a"
        " directory whose file is for all models."
    ),
]
ApiKeys = Annotated[
    list[str] | None,
    typer.Option(
        "--api-key",
        envvar="C2CSERVE_API_KEYS",
        help="Accepted keys for /v1, without limits; several are separated by commas.",
    ),
]
AdminKey = Annotated[
    str, typer.Option(envvar="C2CSERVE_ADMIN_KEY", help="Key for /admin and /metrics.")
]


def _limit(help_: str) -> typer.models.OptionInfo:
    return typer.Option(min=1, help=help_, rich_help_panel=_LIMITS)


def _socket(help_: str) -> typer.models.OptionInfo:
    return typer.Option(min=1, help=help_, rich_help_panel=_SOCKETS)


def _seconds(help_: str) -> typer.models.OptionInfo:
    return typer.Option(min=0.1, help=help_, rich_help_panel=_SOCKETS)


MaxChoices = Annotated[int, _limit("Prompts of a request times its n.")]
MaxMessages = Annotated[int, _limit("Messages of a chat.")]
MaxStops = Annotated[int, _limit("Stop strings.")]
MaxLogitBias = Annotated[int, _limit("Entries of logit_bias, and of stop_token_ids.")]
MaxPromptChars = Annotated[int, _limit("Characters of all prompts, or of a rendered chat.")]
MaxPromptTokens = Annotated[int, _limit("Prompt tokens, summed over choices.")]
MaxGrammarChars = Annotated[int, _limit("Characters of schemas and grammars of outputs.")]
MaxBodyBytes = Annotated[int, size_option("Body of a request.", panel=_LIMITS)]
MaxHeaderBytes = Annotated[int, size_option("Request line and headers.", panel=_LIMITS)]
MaxHeaders = Annotated[int, _limit("Headers of a request.")]
TextProcesses = Annotated[
    int,
    typer.Option(
        min=1, rich_help_panel=_LIMITS, help="Processes that validate, render and tokenize."
    ),
]
TextTimeout = Annotated[
    float,
    typer.Option(
        min=0.1, rich_help_panel=_LIMITS, help="Seconds in which a request must be tokenized."
    ),
]
MaxConnections = Annotated[
    int, _socket("Open at once; at most what the limit of open files leaves.")
]
HeadTimeout = Annotated[float, _seconds("Seconds from a request's first byte to its body.")]
BodyTimeout = Annotated[float, _seconds("Seconds from there to the request's end.")]
IdleTimeout = Annotated[float, _seconds("Seconds that a connection may have no request.")]
SendTimeout = Annotated[float, _seconds("Seconds in which a client takes nothing of its answer.")]


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """Many machines."""

    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="auto|HOST:PORT|local",
            help="Serve with all machines of a Ray cluster: this machine's, that head's, or a new"
            " one of this machine alone.",
            rich_help_panel=_CLUSTER,
        ),
    ] = None
    node_timeout: Annotated[
        float,
        typer.Option(
            min=1.0,
            help="Seconds without a sign of life before a node's requests go elsewhere.",
            rich_help_panel=_CLUSTER,
        ),
    ] = 2.0


@dataclass(frozen=True, slots=True)
class PolicyOptions:
    """Which policy decides, and when it refuses."""

    policy: Annotated[
        PolicyName,
        typer.Option(help="c2cserve, or a published system to compare with, in the same server."),
    ] = OWN
    max_waiting: Annotated[int, typer.Option(min=0, help="Requests queued before 429.")] = 1024
    patience: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="Refuse a request that waits so many times its TTFT target; 0: never. Default: 20,"
            " or what --policy has.",
        ),
    ] = None
    burst: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="Seconds that requests may wait without a break; then what would miss its TTFT"
            f" target is refused at once. Default: {BURST_S:g}.",
        ),
    ] = None

    def admission(self) -> AdmissionSettings:
        """Return when requests are refused. Raises BadParameter for an option without effect."""
        if self.burst is not None and self.policy != OWN:
            raise typer.BadParameter(
                f"{self.policy} refuses nothing for an overload: leave it out",
                param_hint="'--burst'",
            )
        burst_s = BURST_S if self.burst is None else self.burst
        settings = AdmissionSettings(self.max_waiting, burst_s=burst_s)
        return admission_of(self.policy, settings, self.patience)


def split_keys(given: list[str] | None) -> tuple[str, ...]:
    """Return the keys of `--api-key`.

    Raises BadParameter if the option or its variable is set but has no key: an empty secret must
    not open the server."""
    keys = tuple(key.strip() for one in given or () for key in one.split(",") if key.strip())
    if not keys and (given or _API_KEYS in os.environ):
        raise typer.BadParameter(
            f"there is no key in it; unset {_API_KEYS} to serve without keys",
            param_hint="'--api-key'",
        )
    return keys
