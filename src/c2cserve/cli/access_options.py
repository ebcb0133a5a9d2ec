"""Options of `serve` that say who may ask it, and over what."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from c2cserve.server.access.gate import Gate
from c2cserve.server.guard import is_loopback
from c2cserve.server.settings import AccessSettings
from c2cserve.server.tls import Tls, TlsError
from c2cserve.terminal.output import CliError

_ACCESS = "Access"


@dataclass(frozen=True, slots=True)
class AccessOptions:
    keys: Annotated[
        Path | None,
        typer.Option(
            envvar="C2CSERVE_KEYS_FILE",
            help="Keys with limits: see keys --help.",
            rich_help_panel=_ACCESS,
        ),
    ] = None
    usage_log: Annotated[
        Path | None,
        typer.Option(
            help="Append what each request used to this file, a line each.",
            rich_help_panel=_ACCESS,
        ),
    ] = None
    admin_key_file: Annotated[
        Path | None,
        typer.Option(help="File with the key for /admin and /metrics.", rich_help_panel=_ACCESS),
    ] = None
    open_metrics: Annotated[
        bool,
        typer.Option(
            "--open-metrics", help="/metrics needs no key, and answers other machines.",
            rich_help_panel=_ACCESS,
        ),
    ] = False  # fmt: skip
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            help="Names that Host may have beside this machine's own, checked if given or on a"
            " loopback address; *: any. Repeatable.",
            rich_help_panel=_ACCESS,
        ),
    ] = None
    allowed_origin: Annotated[
        list[str] | None,
        typer.Option(
            help="Origins such as https://app.example whose web pages may use /v1 and /api; *: any."
            " Repeatable.",
            rich_help_panel=_ACCESS,
        ),
    ] = None
    shared_cache: Annotated[
        bool,
        typer.Option(
            "--shared-cache", help="All of --api-key reuse each other's prefixes.",
            rich_help_panel=_ACCESS,
        ),
    ] = False  # fmt: skip
    model_root: Annotated[
        list[Path] | None,
        typer.Option(
            exists=True,
            file_okay=False,
            help="Directories under which added models may lie, beside the catalogue's and those"
            " of its models. Repeatable.",
            rich_help_panel=_ACCESS,
        ),
    ] = None
    ssl_certfile: Annotated[
        Path | None,
        typer.Option(help="Certificate chain (PEM): serve HTTPS.", rich_help_panel=_ACCESS),
    ] = None
    ssl_keyfile: Annotated[
        Path | None,
        typer.Option(help="Its private key, if it is another file.", rich_help_panel=_ACCESS),
    ] = None

    def settings(self, host: str) -> AccessSettings:
        """`host`: the address that the server listens on."""
        return AccessSettings(
            loopback_only=is_loopback(host.lower()),
            allowed_hosts=tuple(name.lower() for name in self.allowed_host or ()),
            allowed_origins=tuple(one.lower().rstrip("/") for one in self.allowed_origin or ()),
            open_metrics=self.open_metrics,
            shared_cache=self.shared_cache,
        )


def read_tls(options: AccessOptions) -> Tls | None:
    """Return the certificate to serve with, or None to serve without one. Raises TlsError."""
    if options.ssl_certfile is None:
        if options.ssl_keyfile is not None:
            raise TlsError("--ssl-keyfile needs --ssl-certfile")
        return None
    return Tls(options.ssl_certfile, options.ssl_keyfile)


def open_gate(api_keys: Sequence[str], options: AccessOptions) -> Gate:
    """Return the gate that checks keys. Raises CliError for keys or a usage log that cannot be
    used."""
    try:
        return Gate(api_keys, options.keys, options.usage_log)
    except ValueError as error:
        raise CliError(str(error), 2) from error
    except OSError as error:
        raise CliError(f"--usage-log {options.usage_log}: {error.strerror}", 2) from error
