"""`c2cserve keys`: the keys file, and what its keys have used."""

import re
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from c2cserve.bench.client import ask
from c2cserve.server.access.keyfile import (
    KeyRecord,
    KeysFile,
    KeysFileError,
    change_keys,
    read_keys,
)
from c2cserve.server.access.mistakes import field_of, requirement
from c2cserve.server.access.secret import make_key
from c2cserve.server.access.usage import as_csv
from c2cserve.server.access.usage_log import sum_lines
from c2cserve.terminal.output import CliError, print_columns, print_json

app = typer.Typer(
    help="Make, list and revoke API keys; show their usage.",
    no_args_is_help=True,
    add_completion=False,
)

_LIMITS = "Limits (default: none)"
_DURATION = re.compile(r"(\d{1,6})([hdw])")
_HOURS = {"h": 1, "d": 24, "w": 7 * 24}

FileOption = Annotated[
    Path, typer.Option("--keys", envvar="C2CSERVE_KEYS_FILE", help="The keys file.")
]
UrlOption = Annotated[str, typer.Option(help="The server's root.")]
AdminKeyOption = Annotated[
    str | None, typer.Option("--key", envvar="C2CSERVE_ADMIN_KEY", help="Admin API key.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
NameArgument = Annotated[str, typer.Argument(help="What logs and metrics call the key.")]
_LOCAL = "http://127.0.0.1:8000"


def _limit(help_: str, *names: str) -> Any:
    return typer.Option(*names, help=help_, rich_help_panel=_LIMITS)


@app.command("add")
def add(
    name: NameArgument,
    keys: FileOption,
    tenant: Annotated[str | None, typer.Option(help="Whose key it is; default: the name.")] = None,
    expires: Annotated[
        str | None, typer.Option(help="12h, 30d, 8w, or a date and time with its zone.")
    ] = None,
    cache_group: Annotated[
        str | None, typer.Option(help="Tenants of one group share a prefix cache.")
    ] = None,
    requests_per_minute: Annotated[int | None, _limit("Requests.")] = None,
    tokens_per_minute: Annotated[int | None, _limit("Prompt and output tokens.")] = None,
    concurrency: Annotated[int | None, _limit("Choices under way.")] = None,
    model: Annotated[
        list[str] | None, _limit("Pattern of allowed model ids, such as 'org/*'; repeatable.")
    ] = None,
    max_priority: Annotated[int | None, _limit("Highest priority of a request.")] = None,
    min_ttft_ms: Annotated[float | None, _limit("Tightest x-slo-ttft-ms.")] = None,
    min_tpot_ms: Annotated[float | None, _limit("Tightest x-slo-tpot-ms.")] = None,
) -> None:
    """Make a key and print it, this once: the file has only a hash. A new file gets mode 0600."""
    now = datetime.now(UTC).replace(microsecond=0)
    new = make_key()
    limits = {
        "requests_per_minute": requests_per_minute, "tokens_per_minute": tokens_per_minute,
        "concurrency": concurrency, "models": model, "max_priority": max_priority,
        "min_ttft_ms": min_ttft_ms, "min_tpot_ms": min_tpot_ms,
    }  # fmt: skip
    fields = {
        "id": new.id, "name": name, "salt": new.salt, "sha256": new.sha256, "created": now,
        "expires": None if expires is None else _moment(expires, now), "tenant": tenant,
        "cache_group": cache_group, "limits": limits,
    }  # fmt: skip
    record = _record(fields)

    def added(file: KeysFile) -> KeysFile:
        if any(one.name == name for one in file.keys):
            raise CliError(f"{keys} has a key {name!r}; choose another name")
        return KeysFile(1, (*file.keys, record))

    _change(keys, added)
    sys.stdout.write(f"{new.text}\n")
    sys.stderr.write(
        f"{name}: keep it now, it is not shown again. A server that runs takes it at "
        "`c2cserve keys reload` or SIGHUP.\n"
    )


@app.command("list")
def list_keys(keys: FileOption, as_json: JsonOption = False) -> None:
    """Every key of the file, with its limits and without its hash."""
    now = datetime.now(UTC)
    shown = [_without_hash(one, now) for one in _read(keys).keys]
    if as_json:
        print_json(shown)
        return
    rows = [
        [
            str(one["name"]), str(one["tenant"]), str(one["id"]), str(one["state"]),
            str(one["created"]), str(one["expires"] or "-"), _show_limits(one["limits"]),
        ]
        for one in shown
    ]  # fmt: skip
    print_columns(("name", "tenant", "id", "state", "created", "expires", "limits"), rows)


@app.command("revoke")
def revoke(
    name: Annotated[str, typer.Argument(help="Name or id of the key.")], keys: FileOption
) -> None:
    """Refuse a key from now on. Its entry stays, so that its name tells what it was."""
    now = datetime.now(UTC).replace(microsecond=0)

    def revoked(file: KeysFile) -> KeysFile:
        if not any(name in (one.name, one.id) for one in file.keys):
            raise CliError(f"{keys} has no key {name!r}")
        return KeysFile(1, tuple(_revoked(one, name, now) for one in file.keys))

    _change(keys, revoked)
    sys.stdout.write(
        f"{name}: revoked. A server that runs refuses it after `c2cserve keys reload` or SIGHUP.\n"
    )


@app.command("reload")
def reload(url: UrlOption = _LOCAL, key: AdminKeyOption = None) -> None:
    """Tell a server to read its keys file again. Requests under way go on."""
    count = _fields(ask(url, "/admin/keys/reload", key=key, method="POST"))["keys"]
    sys.stdout.write(f"{count} keys\n")


@app.command("usage")
def usage(
    url: UrlOption = _LOCAL,
    key: AdminKeyOption = None,
    log: Annotated[
        Path | None, typer.Option(help="Sum up this usage log instead of asking a server.")
    ] = None,
    csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Requests and tokens of each key and model: since the server's start, or of a usage log."""
    if csv and as_json:
        raise CliError("give --csv or --json, not both", 2)
    report = _fields(ask(url, "/admin/usage", key=key)) if log is None else _of_log(log)
    rows: list[dict[str, object]] = report["usage"]
    if as_json:
        print_json(report)
    elif csv:
        sys.stdout.write(as_csv(rows))
    else:
        heads = ("key", "tenant", "model", "requests", "prompt", "cached", "output")
        print_columns(heads, [[str(value) for value in row.values()] for row in rows], numbers=4)


def _of_log(path: Path) -> dict[str, Any]:
    try:
        rows, broken = sum_lines(path)
    except OSError as error:
        raise CliError(f"{path}: {error.strerror}") from error
    if broken and not rows:
        raise CliError(f"{path} is not a usage log: no line of it is one of `serve --usage-log`")
    if broken:
        lines = "line is not whole and does" if broken == 1 else "lines are not whole and do"
        sys.stderr.write(f"{path}: {broken} {lines} not count\n")
    return {"usage": rows, "broken_lines": broken}


def _fields(text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise CliError(f"the server is not a c2cserve of this version: {error}") from error


# ---- the file -----------------------------------------------------------------------------------


def _read(path: Path) -> KeysFile:
    try:
        return read_keys(path)
    except KeysFileError as error:
        raise CliError(str(error)) from error


def _change(path: Path, change: Callable[[KeysFile], KeysFile]) -> None:
    try:
        change_keys(path, change)
    except KeysFileError as error:
        raise CliError(str(error)) from error


def _record(fields: dict[str, Any]) -> KeyRecord:
    """Check an entry as it will be checked when it is read."""
    limits = {name: value for name, value in fields["limits"].items() if value is not None}
    try:
        return msgspec.convert({**fields, "limits": limits}, KeyRecord)
    except msgspec.ValidationError as error:
        field = field_of(error)
        raise CliError(f"{_option(field)} has to be {requirement(field)}", 2) from error


def _option(field: str) -> str:
    """Return the option, or the argument, of `add` that fills a field."""
    if field == "name":
        return "NAME"
    return "--model" if field == "models" else f"--{field.replace('_', '-')}"


def _revoked(record: KeyRecord, name: str, now: datetime) -> KeyRecord:
    """A key that was revoked before keeps its moment."""
    if name not in (record.name, record.id) or record.state(now) == "revoked":
        return record
    return msgspec.structs.replace(record, revoked=now)


def _moment(text: str, now: datetime) -> datetime:
    match = _DURATION.fullmatch(text)
    try:
        if match is not None:
            moment = now + timedelta(hours=int(match[1]) * _HOURS[match[2]])
        else:
            moment = datetime.fromisoformat(text)
    except (ValueError, OverflowError):
        moment = None
    if moment is None or moment.tzinfo is None:
        raise CliError(
            f"--expires: {text!r} is not like 12h, 30d, 8w or 2030-01-31T12:00:00+00:00", 2
        )
    if moment <= now:
        raise CliError(f"--expires: {text} has passed", 2)
    return moment


# ---- output -------------------------------------------------------------------------------------


def _without_hash(record: KeyRecord, now: datetime) -> dict[str, object]:
    return {
        "id": record.id, "name": record.name, "tenant": record.tenant_name,
        "cache_group": record.cache_group, "state": record.state(now),
        "created": _show(record.created), "expires": _show(record.expires),
        "revoked": _show(record.revoked), "limits": msgspec.to_builtins(record.limits),
    }  # fmt: skip


def _show(moment: datetime | None) -> str | None:
    return None if moment is None else moment.isoformat(timespec="seconds")


def _show_limits(limits: Any) -> str:
    shown: dict[str, Any] = msgspec.to_builtins(limits)
    parts = [
        f"{name}={' '.join(value) if isinstance(value, (list, tuple)) else value}"
        for name, value in shown.items()
    ]
    return ", ".join(parts) or "-"
