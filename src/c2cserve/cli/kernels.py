"""`c2cserve kernels`: the GPU kernels, built ahead of serving. Triton's alone need a GPU."""

import sys
import time
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from c2cserve.cli.kernels_explain import explain
from c2cserve.kernels.gpu.aot import compiler, flash_modules
from c2cserve.kernels.gpu.aot.compiler import BuildError, default_folder
from c2cserve.kernels.gpu.aot.flash_modules import MODULES, installed
from c2cserve.kernels.gpu.aot.variants import (
    RELAY,
    SHARED_BYTES,
    THREADS,
    BuiltKernel,
    RelayKernel,
    Variant,
)
from c2cserve.kernels.gpu.gemm.dataflows import table
from c2cserve.terminal.output import (
    CliError,
    console,
    print_json,
    progress_console,
    show_bytes,
    show_seconds,
)

VARIANTS: tuple[Variant | RelayKernel, ...] = (*table.VARIANTS, RELAY)
"""Every kernel that is built: those of GEMMs, and the one of the transfer engine."""

app = typer.Typer(
    help="Build, list, check and explain the GPU kernels.",
    no_args_is_help=True,
    add_completion=False,
)
app.command("explain")(explain)

FolderOption = Annotated[
    Path | None,
    typer.Option(help="Of the built kernels.", show_default=f"{default_folder()}"),
]


@app.command("build")
def build(
    folder: FolderOption = None,
    force: Annotated[bool, typer.Option("--force", help="Also what is built already.")] = False,
) -> None:
    """Compile every kernel that is not built yet. Needs nvcc and takes a minute.

    If FlashInfer is installed, this also builds its attention, which takes many minutes. If there
    is a GPU, this also fills Triton's cache (TRITON_CACHE_DIR) with what most models need."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    folder, began_s = folder or default_folder(), time.monotonic()
    lacking = sum(1 for v in VARIANTS if force or compiler.read_report(folder, v) is None)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=progress_console(), transient=True) as bar:
        task = bar.add_task("compiling", total=lacking)
        try:
            made = compiler.build(
                VARIANTS,
                folder,
                force=force,
                built=lambda variant, _: bar.update(task, advance=1, description=variant.name),
            )
        except BuildError as error:
            bar.stop()
            raise _said(error) from error
    said = f"built {len(made)} of {len(VARIANTS)} kernels" if made else "every kernel was built"
    took = f" in {show_seconds(time.monotonic() - began_s)}" if made else ""
    sys.stdout.write(f"{said}{took}: {folder}\n")
    _refuse(compiler.check(VARIANTS, folder))
    sys.stdout.write(f"{_fill_triton_cache()}\n")
    sys.stdout.write(f"{_build_flash(folder, force)}\n")  # last: it can be done without


@app.command("list")
def list_kernels(
    folder: FolderOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Every kernel: what it is compiled with, and whether it is built."""
    folder = folder or default_folder()
    rows = [*(_row(folder, variant) for variant in VARIANTS), *_flash_rows(folder)]
    if as_json:
        print_json(rows)
        return
    from rich.table import Table

    states = Counter(str(row["state"]) for row in rows)
    table = Table(
        caption=f"GEMMs: {THREADS} threads, {show_bytes(SHARED_BYTES)} of shared memory each"
    )
    for head in ("kernel", "stages", "registers", "state"):
        table.add_column(head, justify="right" if head in ("stages", "registers") else "left")
    for row in rows:
        registers = "-" if row["registers"] is None else str(row["registers"])
        stages = "-" if row["stages"] is None else str(row["stages"])
        table.add_row(str(row["name"]), stages, registers, str(row["state"]))
    console().print(table)
    counted = ", ".join(f"{count} {name}" for name, count in states.items())
    sys.stdout.write(f"{len(rows)} kernels, {counted}: {folder}\n")


@app.command("check")
def check(folder: FolderOption = None) -> None:
    """End with 1 and name every kernel that is not built, is stale, or uses local memory. What
    FlashInfer lacks is named too, but can be done without."""
    folder = folder or default_folder()
    _refuse(compiler.check(VARIANTS, folder))
    sys.stdout.write(f"{len(VARIANTS)} kernels are built and fit: {folder}\n")
    version = installed()
    lacking = [] if version is None else flash_modules.check(folder, version)
    sys.stdout.write("".join(f"{line}: prompts take our own kernel\n" for line in lacking))


@app.command("clean")
def clean(folder: FolderOption = None) -> None:
    """Remove what was built from other sources than these, and what killed builds left."""
    folder = folder or default_folder()
    removed = compiler.clean(VARIANTS, folder) + flash_modules.clean(folder, installed())
    sys.stdout.write(f"removed {removed} files: {folder}\n")


def _said(error: BuildError) -> CliError:
    """Its first line, once the compiler's words are shown."""
    line, _, words = str(error).partition("\n")
    sys.stderr.write(words)
    return CliError(line)


def _build_flash(folder: Path, force: bool) -> str:
    """What was done, in words."""
    version = installed()
    if version is None:
        return "FlashInfer's attention: not built, it is not installed ('c2cserve[flash]')"
    began_s = time.monotonic()
    try:
        made = flash_modules.build(folder, version, force=force)
    except BuildError as error:
        raise _said(error) from error
    if not made:
        return f"FlashInfer's attention: every module was built, by {version}"
    took = show_seconds(time.monotonic() - began_s)
    return f"FlashInfer's attention: built {len(made)} of {len(MODULES)} modules in {took}"


def _flash_rows(folder: Path) -> list[dict[str, object]]:
    version = installed()
    if version is None:
        return []
    return [
        {
            "name": kind.name, "stages": None, "registers": None,
            "state": flash_modules.state(folder, kind, version), "flashinfer": version,
        }
        for kind in MODULES
    ]  # fmt: skip


def _fill_triton_cache() -> str:
    """What was done, in words. Triton compiles for the GPU it finds, on which kernels run once."""
    if find_spec("triton") is None:
        return "Triton's kernels: none, it is not installed (pip install '.[gpu]' in the checkout)"
    import torch

    if not torch.cuda.is_available():
        return "Triton's kernels: not compiled, no GPU here; a slice's first start does it"
    from c2cserve.kernels.gpu.aot.warm import COMMON, warm

    began_s = time.monotonic()
    with torch.no_grad():
        for sizes in COMMON:
            warm(sizes, torch.device("cuda", 0))
    torch.cuda.synchronize()
    took = show_seconds(time.monotonic() - began_s)
    return f"Triton's kernels: compiled, or found in its cache, for {len(COMMON)} sizes in {took}"


def _row(folder: Path, variant: Variant | RelayKernel) -> dict[str, object]:
    report = compiler.read_report(folder, variant)
    gemm = isinstance(variant, Variant)
    return {
        "name": variant.name,
        "stages": variant.stages if gemm else None,
        "registers": report and report.registers,
        "state": _state(folder, variant, report),
        "threads": THREADS if gemm else variant.threads,
        "shared_bytes": SHARED_BYTES if gemm else 0,
        "defines": variant.defines,
    }


def _state(folder: Path, variant: BuiltKernel, report: compiler.Report | None) -> str:
    if report is not None and not report.fit:
        return f"unfit: {report.faults}"
    return compiler.state(folder, variant)


def _refuse(problems: list[str]) -> None:
    if problems:
        sys.stdout.write("".join(f"{problem}\n" for problem in problems))
        raise CliError(
            f"{len(problems)} of {len(VARIANTS)} kernels are not fit to serve with"
            " (`c2cserve kernels build` builds what is missing or stale)"
        )
