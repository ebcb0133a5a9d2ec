"""`c2cserve replay FILE --dashboard`: a recorded run on the dashboard's page."""

import contextlib
import socket
from pathlib import Path

from c2cserve.terminal.output import CliError, console

_HOST = "127.0.0.1"


def show_record(record: Path, port: int) -> None:
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
