"""`c2cserve profile`: measure this machine once; dataflows are picked by it from then on."""

import os
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from c2cserve.terminal.output import CliError, console, progress_console, show_seconds

if TYPE_CHECKING:
    from c2cserve.kernels.gpu.gemm.choice.profile import Profile
    from c2cserve.profiling.measuring_process import ProcessBench
    from c2cserve.profiling.survey import Bench
    from c2cserve.transfer.path_profile import PathProfile

_UNTIL_S, _QUICK_UNTIL_S = 160.0, 45.0
"""Time after the command began. Measurements under way then end in a second or two."""


def profile(
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Default: where c2cserve looks for it.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Under a minute: more is interpolated.")
    ] = False,
    relays: Annotated[
        bool, typer.Option("--gpu-relays", help="Measure paths over several GPUs' links, too.")
    ] = False,
) -> None:
    """Measure links, memory and GEMMs of this machine's GPU, in under 3 minutes, into a file.
    The paths of all GPUs go into another one beside it.

    Nothing else should run on it meanwhile. A measurement that fails, or hangs, is left out and
    named at the end.
    """
    from c2cserve.bench.provenance import commit
    from c2cserve.kernels.gpu.gemm.choice.profile import save_profile
    from c2cserve.profiling.measuring_process import ProcessBench
    from c2cserve.profiling.survey import Lost, Refused, survey
    from c2cserve.transfer.path_profile import PathProfile, paths_path, save_paths, show_paths

    began_s = time.monotonic()
    until_s = began_s + (_QUICK_UNTIL_S if quick else _UNTIL_S)
    with _progress(began_s, until_s) as tell, ProcessBench(_open_bench) as bench:
        tell("loading kernels, paths")
        try:
            paths = _measure_paths(bench, relays=relays)
            measured = survey(
                bench, commit=commit(), until_s=until_s, clock=time.monotonic, tell=tell
            )
        except (Refused, Lost) as error:
            raise CliError(f"this GPU cannot be measured: {error}") from error
    path = save_profile(measured, out)
    _show(measured)
    if isinstance(paths, PathProfile):
        sys.stdout.write(f"{show_paths(paths)}\n{save_paths(paths, paths_path(path))}\n")
    else:
        sys.stdout.write(f"not measured: paths: {paths}\n")
    took = show_seconds(time.monotonic() - began_s)
    sys.stdout.write(f"{len(measured.points)} measurements in {took}: {path}\n")


def _measure_paths(bench: "ProcessBench", *, relays: bool) -> "PathProfile | str":
    """Return what was measured, or why nothing was. Raises `Lost`."""
    from c2cserve.profiling.survey import Refused

    try:
        return bench.paths(relays=relays)
    except Refused as error:
        return str(error)


def _open_bench() -> "Bench":
    """Return this machine's GPU, ready to be measured by this process.

    Raises `CliError` if it cannot be measured."""
    # Streams share 8 hardware queues unless told otherwise, and 7 slices have more than 8 streams.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    import torch

    if not torch.cuda.is_available():
        why = "it is built without CUDA" if torch.version.cuda is None else "no driver, or no GPU"
        raise CliError(f"there is no GPU to measure: torch {torch.__version__} sees none ({why})")
    try:
        from c2cserve.kernels.gpu.aot.repository import KernelMissingError
        from c2cserve.profiling.gpu_bench import GpuBench
    except ModuleNotFoundError as error:
        raise CliError(f"{error}: pip install '.[gpu]' in the checkout") from error
    try:
        return GpuBench()
    except KernelMissingError as error:
        raise CliError(str(error)) from error


@contextmanager
def _progress(began_s: float, until_s: float) -> Generator[Callable[[str], None]]:
    """A bar of the time that may be used, with what is measured now."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=progress_console(), transient=True) as bar:
        task = bar.add_task("", total=until_s - began_s)

        def tell(what: str) -> None:
            bar.update(task, description=what, completed=time.monotonic() - began_s)

        yield tell


def _show(measured: "Profile") -> None:
    from rich.table import Table

    table = Table(title=f"{measured.machine.gpu}, {measured.machine.host} (GB/s)")
    table.add_column("weights at")
    for head in ("to GPU", "from GPU", "both ways", "read by SMs", "by each of all slices"):
        table.add_column(head, justify="right")
    for home, link in measured.links.items():
        alone = max(read.bytes_per_s for read in link.reads if read.slices == 1)
        most = max(link.reads, key=lambda read: read.slices)
        each = f"{most.bytes_per_s / 1e9:.1f} of {most.slices}" if most.slices > 1 else "-"
        rates = (link.to_gpu_bytes_per_s, link.from_gpu_bytes_per_s, link.duplex_bytes_per_s, alone)
        table.add_row(home, *(f"{rate / 1e9:.1f}" for rate in rates), each)
    local = max(measured.hbm, key=lambda rate: rate.sms)
    table.add_row("hbm", "-", "-", "-", f"{local.read_bytes_per_s / 1e9:.0f}", "-")
    console().print(table)
    for line in measured.cut:
        sys.stdout.write(f"not measured: {line}\n")
