"""`c2cserve`: where the command line begins. This module imports little: the children of `serve`
import for as long as it does, so they are started before anything else."""

import gc
import importlib
import sys
from collections.abc import Sequence

from c2cserve.processes.standard_streams import open_missing_streams


def app(args: Sequence[str] | None = None) -> None:
    """Run a command and end the process, with the status of `commands.run`."""
    open_missing_streams()
    if args is None:
        # Nothing that is imported is garbage: to look for it takes a tenth of the imports' time.
        # The command that runs enables the collector again.
        gc.disable()
        if sys.argv[1:2] == ["serve"]:
            importlib.import_module("c2cserve.serving.start_signals").end_imports_by_signals()
            importlib.import_module("c2cserve.serving.prestart").prestart(sys.argv[2:])
    try:
        commands = importlib.import_module("c2cserve.cli.commands")
    except KeyboardInterrupt:
        sys.stderr.write("c2cserve: interrupted\n")
        sys.exit(130)
    sys.exit(commands.run(list(sys.argv[1:] if args is None else args)))


if __name__ == "__main__":
    app()
