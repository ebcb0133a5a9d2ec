"""`c2cserve multipath`: run a CUDA program with its large copies over the links of several GPUs."""

import os
from typing import Annotated

import typer

from c2cserve.terminal.output import CliError
from c2cserve.terminal.sizes import size_option


def multipath(
    command: Annotated[list[str], typer.Argument(metavar="COMMAND", help="The program, after --.")],
    neighbours: Annotated[
        int | None, typer.Option(min=1, help="GPUs that help with a copy, at most. Default: 3.")
    ] = None,
    least: Annotated[
        int | None, size_option("The smallest copy that takes several links. Default: 6 MiB.")
    ] = None,
    report: Annotated[
        bool, typer.Option("--report", help="Print which copies took several links, at the end.")
    ] = False,
) -> None:
    """Run a CUDA program. Its large copies of pinned memory take the links of several GPUs."""
    from c2cserve.transfer.multipath import MultipathError, multipath_environment

    try:
        environment = multipath_environment(
            os.environ, neighbours=neighbours, least_bytes=least, report=report
        )
        os.execvpe(command[0], command, environment)
    except MultipathError as error:
        raise CliError(str(error)) from error
    except OSError as error:
        raise CliError(f"{command[0]}: {error.strerror}") from error
