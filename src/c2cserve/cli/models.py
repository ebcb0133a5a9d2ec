"""`c2cserve models`: the catalogue of a running server, through its admin API."""

import sys
import time
from pathlib import Path
from typing import Annotated, TypeVar
from urllib.parse import quote

import msgspec
import typer

from c2cserve.bench.admin import decode, find_model
from c2cserve.bench.client import Unanswered, ask
from c2cserve.core.model import ModelState, ModelStatus
from c2cserve.terminal.output import CliError, console, print_json, progress_console, show_bytes
from c2cserve.terminal.tables import Column, FittedTable

T = TypeVar("T")

app = typer.Typer(
    help="List, add, remove and reload a server's models.",
    no_args_is_help=True,
    add_completion=False,
)

_LONG_S = 24 * 3600.0
"""Adding may download first and removing drains first: the server says when it is done."""
_POLL_S = 0.2
_COLD_S = 2.0
"""Time in which a load that will start has started."""

UrlOption = Annotated[str, typer.Option(help="The server's root.")]
KeyOption = Annotated[
    str | None, typer.Option("--key", envvar="C2CSERVE_ADMIN_KEY", help="Admin API key.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
NameArgument = Annotated[str, typer.Argument(help="Id or alias.")]
LOCAL = "http://127.0.0.1:8000"


class Listing(msgspec.Struct):
    models: list[ModelStatus]


@app.command("list")
def list_models(url: UrlOption = LOCAL, key: KeyOption = None, as_json: JsonOption = False) -> None:
    """Every model of the catalogue and where its weights are."""
    models = decode(ask(url, "/admin/models", key=key), Listing).models
    if as_json:
        print_json(msgspec.to_builtins(models))
        return
    from rich.markup import escape

    table = FittedTable(
        Column("model"), Column("aliases", rank=5), Column("state", wraps=True),
        Column("weights"), Column("context", rank=3), Column("slices", rank=4),
        Column("running", right=True, rank=1), Column("waiting", right=True, rank=2),
        Column("priority", right=True, rank=7), Column("pinned", right=True, rank=6),
    )  # fmt: skip
    for model in models:
        table.add_row(
            model.id, ", ".join(model.aliases), escape(show_state(model)),
            show_bytes(model.weight_bytes),
            str(model.max_context), ", ".join(model.active_slices) or "-", str(model.running),
            str(model.waiting), str(model.priority), "yes" if model.pinned else "",
        )  # fmt: skip
    console().print(table)


@app.command("show")
def show(
    name: NameArgument, url: UrlOption = LOCAL, key: KeyOption = None, as_json: JsonOption = False
) -> None:
    """Everything the server tells about one model."""
    model = find_model(url, key, name)
    fields = msgspec.to_builtins(model)
    if as_json:
        print_json(fields)
        return
    from rich.markup import escape
    from rich.table import Table

    table = Table(show_header=False, box=None)
    for field, value in fields.items():
        text = ", ".join(value) or "-" if isinstance(value, (list, tuple)) else str(value)
        shown = show_bytes(int(text)) if field.endswith("_bytes") else escape(text)
        table.add_row(field, shown)
    console().print(table)


@app.command("add")
def add(
    model: Annotated[str, typer.Argument(metavar="ID", help="What requests will call it.")],
    path: Annotated[Path | None, typer.Option(help="Checkpoint directory.")] = None,
    hub: Annotated[str | None, typer.Option(help="Hub repository id.")] = None,
    revision: Annotated[str | None, typer.Option(help="Hub branch, tag or commit.")] = None,
    alias: Annotated[list[str] | None, typer.Option(help="Another name (repeatable).")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, bfloat16, float16.")] = None,
    ttft: Annotated[float | None, typer.Option(help="SLO target, s.")] = None,
    tpot: Annotated[float | None, typer.Option(help="SLO target, s.")] = None,
    priority: Annotated[int | None, typer.Option(help="Higher goes first.")] = None,
    pinned: Annotated[bool, typer.Option("--pinned", help="Never leaves the pool.")] = False,
    max_context: Annotated[int | None, typer.Option(help="Tokens.")] = None,
    keep_warm: Annotated[float | None, typer.Option(help="Hint, s.")] = None,
    wait: Annotated[bool, typer.Option(help="Until its weights are loaded.")] = True,
    url: UrlOption = LOCAL,
    key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Add a model while serving. Keys are those of the catalogue file; a path is the server's."""
    entry = {
        "id": model, "path": None if path is None else str(path.expanduser().resolve()),
        "hub": hub, "revision": revision, "aliases": alias, "dtype": dtype, "ttft_s": ttft,
        "tpot_s": tpot, "priority": priority, "pinned": pinned or None,
        "max_context": max_context, "keep_warm_s": keep_warm,
    }  # fmt: skip
    given = {name: value for name, value in entry.items() if value is not None}
    text = ask(url, "/admin/models", key=key, method="POST", body=given, timeout_s=_LONG_S)
    _loaded(url, key, decode(text, ModelStatus), wait=wait, as_json=as_json)


@app.command("remove")
def remove(name: NameArgument, url: UrlOption = LOCAL, key: KeyOption = None) -> None:
    """Drain a model, unload it everywhere, and take it out of the catalogue."""
    ask(url, f"/admin/models/{quote(name)}", key=key, method="DELETE", timeout_s=_LONG_S)
    sys.stdout.write(f"removed {name}\n")


@app.command("reload")
def reload(
    name: NameArgument,
    wait: Annotated[bool, typer.Option(help="Until its weights are loaded.")] = True,
    url: UrlOption = LOCAL,
    key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Read a model's files again, and switch to them once they are loaded."""
    path = f"/admin/models/{quote(name)}/reload"
    text = ask(url, path, key=key, method="POST", timeout_s=_LONG_S)
    _loaded(url, key, decode(text, ModelStatus), wait=wait, as_json=as_json)


def show_state(model: ModelStatus) -> str:
    if model.state is ModelState.LOADING:
        return f"loading {model.loaded_bytes / max(1, model.weight_bytes):.0%}"
    if model.state is ModelState.FAILED:
        return f"failed: {model.error}"
    if model.failed_slices:
        return f"{model.state.value}, fails on {', '.join(model.failed_slices)}"
    return model.state.value


def _loaded(url: str, key: str | None, model: ModelStatus, *, wait: bool, as_json: bool) -> None:
    """Report the model, once it is loaded if asked to wait. Raises `CliError` if it failed."""
    if wait:
        model = _follow(url, key, model)
    if model.state is ModelState.FAILED:
        raise CliError(f"{model.id} could not be loaded: {model.error}")
    if as_json:
        print_json(msgspec.to_builtins(model))
    else:
        size = show_bytes(model.weight_bytes)
        sys.stdout.write(f"{model.id}: {show_state(model)}, {size} of weights\n")


def _follow(url: str, key: str | None, model: ModelStatus) -> ModelStatus:
    """Show the load until it ends. If a model stays cold, the pool has no room for it now."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    columns = (TextColumn(model.id), BarColumn(), DownloadColumn())
    with Progress(*columns, console=progress_console(), transient=True) as bar:
        task = bar.add_task(model.id, total=model.weight_bytes)
        cold_until_s = time.monotonic() + _COLD_S
        while model.state is ModelState.LOADING or (
            model.state is ModelState.COLD and time.monotonic() < cold_until_s
        ):
            bar.update(task, completed=model.loaded_bytes)
            time.sleep(_POLL_S)
            try:
                model = find_model(url, key, model.id)
            except Unanswered as error:
                raise CliError(f"lost the server while {model.id} was loading: {error}") from error
    return model
