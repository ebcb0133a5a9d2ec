"""`c2cserve replay`: do the policies decide from a recorded run's events what they decided then?"""

import contextlib
import json
import socket
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from c2cserve.terminal.output import CliError, console, print_json

if TYPE_CHECKING:
    from c2cserve.runtime.replay import Difference, ReplayResult


_HOST, _PORT = "127.0.0.1", 8001


def replay(
    record: Annotated[Path, typer.Argument(metavar="FILE", help="From serve --record FILE.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    dashboard: Annotated[
        bool, typer.Option("--dashboard", help="Show the run in a browser; decides nothing.")
    ] = False,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Of the dashboard; 0: any. Default: 8001.")
    ] = None,
) -> None:
    """Reproduce every decision of a record. Ends with 1 at a difference."""
    if dashboard and as_json:
        raise CliError("--json: no effect with --dashboard", 2)
    if dashboard:
        _show_record(record, _PORT if port is None else port)
        return
    if port is not None:
        raise CliError("--port: no effect without --dashboard", 2)
    from c2cserve.runtime.replay import RecordError
    from c2cserve.runtime.replay import replay as replay_record

    try:
        result = replay_record(record)
    except OSError as error:
        raise CliError(f"{record}: cannot be read: {error.strerror}") from error
    except RecordError as error:
        raise CliError(str(error)) from error
    if as_json:
        print_json({"equal": result.equal, **asdict(result)})
    else:
        _show(result)
    if not result.equal:
        raise typer.Exit(1)


def _show(result: "ReplayResult") -> None:
    from rich.table import Table

    table = Table()
    table.add_column("stream")
    for head in ("ticks", "events", "actions", "decisions"):
        table.add_column(head, justify="right")
    for one in result.streams:
        verdict = "equal" if one.difference is None else f"differ at tick {one.difference.tick}"
        counts = (str(one.ticks), str(one.events), str(one.actions))
        table.add_row(one.stream, *counts, verdict)
    console().print(table)
    if result.torn_line:
        sys.stderr.write("warning: the last line is incomplete and was left out\n")
    for one in result.streams:
        if one.difference is not None:
            _show_difference(one.stream, one.difference)


def _show_difference(stream: str, difference: "Difference") -> None:
    """The first action that differs, recorded and replayed."""
    before, after = difference.recorded, difference.replayed
    position = next(
        (i for i, (was, now) in enumerate(zip(before, after, strict=False)) if was != now),
        min(len(before), len(after)),
    )
    sys.stdout.write(
        f"{stream}, tick {difference.tick} (t = {difference.now:.6f} s), action {position}:\n"
        f"  recorded: {_action(before, position)}\n  replayed: {_action(after, position)}\n"
    )


def _action(actions: list[Any], position: int) -> str:
    return json.dumps(actions[position]) if position < len(actions) else "nothing"


def _show_record(record: Path, port: int) -> None:
    """Serve the dashboard over a record, for this machine, until ctrl-C. Raises CliError."""
    import uvicorn

    from c2cserve.runtime.replay import RecordError
    from c2cserve.server.dashboard.playback import ReplayRoutes, find_span

    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((_HOST, port))
        except OSError as error:
            raise CliError(
                f"cannot listen on {_HOST}:{port}: {error.strerror}; choose another with --port"
            ) from error
        try:
            span = find_span(record)
        except OSError as error:
            raise CliError(f"{record}: cannot be read: {error.strerror}") from error
        except RecordError as error:
            raise CliError(str(error)) from error
        url = f"http://{_HOST}:{listener.getsockname()[1]}/dashboard"
        seconds = span.end_s - span.begin_s
        console().print(f"{record}: {seconds:.1f} s; look at {url} (ctrl-C ends)", soft_wrap=True)
        config = uvicorn.Config(
            ReplayRoutes(record, span).app(), log_level="warning", access_log=False, ws="none",
            proxy_headers=False, timeout_graceful_shutdown=1,
        )  # fmt: skip
        with contextlib.suppress(KeyboardInterrupt):
            uvicorn.Server(config).run([listener])
