"""`c2cserve`: where the command line begins. This module imports little: the children of `serve`
import for as long as it does, so they are started before anything else."""

import atexit
import gc
import importlib
import os
import signal
import sys
from collections.abc import Sequence

from c2cserve.processes.standard_streams import open_missing_streams

INTERRUPTED = 130
"""The status that a shell gives to what an interrupt has ended."""


def app(args: Sequence[str] | None = None) -> None:
    """Run a command and end the process, with the status of `commands.run`."""
    open_missing_streams()
    ended: list[int] = []
    if args is None:
        atexit.register(_leave, ended)
    try:
        status = _run(args)
    except KeyboardInterrupt:  # while commands were imported, or as one had ended
        status = _interrupted()
    ended.append(status)
    if args is None and signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda number, frame: _end_at_once(said=status == INTERRUPTED))
    sys.exit(status)


def _run(args: Sequence[str] | None) -> int:
    if args is None:
        # Nothing that is imported is garbage: to look for it takes a tenth of the imports' time.
        # The command that runs enables the collector again.
        gc.disable()
        if sys.argv[1:2] == ["serve"]:
            importlib.import_module("c2cserve.serving.start_signals").end_imports_by_signals()
            importlib.import_module("c2cserve.serving.prestart").prestart(sys.argv[2:])
    commands = importlib.import_module("c2cserve.cli.commands")
    return commands.run(list(sys.argv[1:] if args is None else args))


def _interrupted() -> int:
    sys.stderr.write("c2cserve: interrupted\n")
    return INTERRUPTED


def _end_at_once(*, said: bool) -> None:
    """End while the interpreter waits for threads. `said`: an interrupt was reported already."""
    if not said:
        _interrupted()
    os._exit(INTERRUPTED)


def _leave(ended: list[int]) -> None:
    """Called last at the interpreter's end, as it was registered first. What follows has no
    handlers. If an import was interrupted, Python would end by SIGINT in place of a status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if ended == [INTERRUPTED]:
        sys.stdout.flush()
        os._exit(INTERRUPTED)


if __name__ == "__main__":
    app()
