"""`c2cserve calibrate`: this machine as the simulator knows machines, out of a server's record."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from c2cserve.terminal.output import CliError, console, show_seconds

if TYPE_CHECKING:
    from c2cserve.sim.planning.calibrate import Calibration

_SHOWN_PROMPTS = (16, 64, 256)
_SHOWN_BATCHES = (1, 4, 16)


def calibrate(
    record: Annotated[Path, typer.Argument(metavar="FILE", help="From serve --record FILE.")],
    out: Annotated[Path, typer.Option(help="Folder for the profile and its tables.")],
    request_ms: Annotated[
        float, typer.Option(min=0, help="What a request takes beside slices: HTTP, tokenizing.")
    ] = 0.0,
) -> None:
    """Make a simulator's profile of a machine with CPU slices out of a server's record."""
    from dataclasses import replace

    from c2cserve.runtime.replay import RecordError
    from c2cserve.sim.planning.calibrate import CalibrationError
    from c2cserve.sim.planning.calibrate import calibrate as calibrate_record

    try:
        found = replace(calibrate_record(record), request_s=request_ms / 1e3)
        path = found.write(out)
    except OSError as error:
        raise CliError(f"{error.filename}: {error.strerror}") from error
    except (RecordError, CalibrationError) as error:
        raise CliError(f"{record}: {error}") from error
    _show(found)
    console().print(f"wrote {path}: c2cserve simulate --hardware {path} --noise {found.noise:.2f}")


def _show(found: "Calibration") -> None:
    from c2cserve.sim.show import make_table

    heads = [f"prompt of {n}" for n in _SHOWN_PROMPTS] + [f"decode of {n}" for n in _SHOWN_BATCHES]
    table = make_table(f"{len(found.seen.steps)} steps", ("model", *heads))
    for name, times in found.tables.items():
        length = times.decode[0][0]
        cells = [show_seconds(times.prefill_s(0, tokens)) for tokens in _SHOWN_PROMPTS]
        cells += [show_seconds(times.decode_s(batch, length)) for batch in _SHOWN_BATCHES]
        table.add_row(name, *cells)
    console().print(table)
