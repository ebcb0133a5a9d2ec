"""`c2cserve kernels explain`: which dataflow this machine would pick for a GEMM, and why."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from c2cserve.terminal.output import CliError, console, print_json, show_bytes, show_seconds

if TYPE_CHECKING:
    from c2cserve.kernels.gpu.gemm.choice.choose import Choice, Estimate
    from c2cserve.kernels.gpu.gemm.choice.cost import Question
    from c2cserve.kernels.gpu.gemm.choice.profile import Profile


def explain(
    m: Annotated[int, typer.Argument(min=1, help="Rows of X (tokens).")],
    n: Annotated[int, typer.Argument(min=1, help="Rows of W (outputs).")],
    k: Annotated[int, typer.Argument(min=1, help="Columns of both.")],
    home: Annotated[Literal["host", "peer", "hbm"], typer.Option(help="Where W is.")] = "host",
    sms: Annotated[int | None, typer.Option(min=1, help="Of the slice; default: all.")] = None,
    dtype: Annotated[Literal["bfloat16", "float16"], typer.Option()] = "bfloat16",
    experts: Annotated[int, typer.Option(min=0, help="Of an MoE layer; M tokens.")] = 0,
    top_k: Annotated[int, typer.Option(min=0, help="Experts per token.")] = 0,
    neighbours: Annotated[
        int, typer.Option(min=0, help="Other slices streaming over the link.")
    ] = 0,
    profile: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Default: this machine's.")
    ] = None,
    assume: Annotated[
        Literal["h200", "h100"] | None, typer.Option(help="Known speeds instead of a profile.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Every dataflow for O[M,N] = X[M,K] W[N,K]^T by predicted time, the pick, and why."""
    from c2cserve.kernels.gpu.gemm.choice.choose import Chooser, NothingFits, describe
    from c2cserve.kernels.gpu.gemm.choice.cost import Question
    from c2cserve.kernels.gpu.gemm.choice.profile import ProfileError

    try:
        measured, source = _profile(profile, assume)
        question = Question(
            m, n, k, dtype, home, sms or measured.machine.sms, experts, top_k, neighbours
        )
        chooser = Chooser(measured)
        choice, estimates = chooser.pick(question), chooser.estimates(question)
        served = describe(*chooser.serving(question))
    except (ProfileError, NothingFits) as error:
        raise CliError(str(error)) from error
    except ValueError as error:
        raise CliError(str(error), exit_code=2) from error
    if as_json:
        print_json(_as_json(question, source, choice, served, estimates))
    else:
        _show(question, source, choice, served, estimates)


def _profile(path: Path | None, assume: Literal["h200", "h100"] | None) -> tuple["Profile", str]:
    """Return the profile to decide by, and its description."""
    from c2cserve.kernels.gpu.gemm.choice.assumed import assumed_h100, assumed_h200
    from c2cserve.kernels.gpu.gemm.choice.profile import ProfileMissing, load_profile

    if assume is not None:
        if path is not None:
            raise CliError("--assume and --profile: give one of them", exit_code=2)
        known = assumed_h100() if assume == "h100" else assumed_h200()
        return known, f"assumed: known speeds of an {known.machine.gpu}, nothing was measured here"
    try:
        found = load_profile(path, gpu=_this_gpu() if path is None else None)
    except ProfileMissing as error:
        raise CliError(f"{error} (or explain with --assume h200)") from error
    machine = found.machine
    return found, f"measured: {machine.gpu}, {machine.host}, {found.date:%Y-%m-%d}"


def _this_gpu() -> str | None:
    """Return the name of this machine's first GPU; None: there is none, and any profile will do."""
    from c2cserve.devices.gpus import GpuProblem, find_gpus, find_nvml

    try:
        gpus = find_gpus(find_nvml())
    except GpuProblem as error:
        raise CliError(f"the GPU driver does not answer: {error}") from error
    return gpus[0].name if gpus else None


def _show(
    question: "Question", source: str, choice: "Choice", served: str, estimates: "list[Estimate]"
) -> None:
    from rich.table import Table

    from c2cserve.kernels.gpu.gemm.choice.choose import describe_tiles

    table = Table()
    for head in ("pick", "dataflow", "tiles"):
        table.add_column(head)
    for head in ("us", "x floor", "link us", "compute", "HBM", "fixed", "link bytes", "factor"):
        table.add_column(head, justify="right")
    table.add_column("known by")
    for one in estimates:
        terms = one.terms
        parts = (terms.link_s, terms.compute_s, terms.hbm_s, terms.overhead_s)
        table.add_row(
            "->" if _is_pick(one, choice) else "",
            one.dataflow,
            describe_tiles(one.dataflow, one.tiles) or "-",
            _us(one.predicted_s),
            f"{one.predicted_s / choice.floor_s:.2f}",
            *map(_us, parts),
            show_bytes(terms.traffic.link_bytes),
            f"{one.factor:.2f}",
            _basis(one),
        )
    out = sys.stdout
    out.write(f"{_describe(question)}\n{source}\n")
    console().print(table)
    least = "W read from HBM" if question.home == "hbm" else "W once over the link"
    out.write(f"floor: {show_seconds(choice.floor_s)}, the larger of cuBLAS and {least}\n")
    out.write(f"pick: {choice.why}\n")
    out.write(f"serving: {served}, whose answers do not depend on where W is\n")


def _describe(q: "Question") -> str:
    experts = f", {q.top_k} of {q.experts} experts a row" if q.experts else ""
    shared = f", {q.neighbours} other slices on the link" if q.neighbours else ""
    return (
        f"O[{q.m}, {q.n}] = X[{q.m}, {q.k}] W[{q.n}, {q.k}]^T{experts}, {q.dtype}, "
        f"W at {q.home}, {q.sms} SMs{shared}"
    )


def _us(seconds: float) -> str:
    """Format microseconds, the unit of all times in a column."""
    return f"{seconds * 1e6:,.0f}"


def _basis(one: "Estimate") -> str:
    return one.basis if one.tried else f"{one.basis}, never timed"


def _is_pick(one: "Estimate", choice: "Choice") -> bool:
    return (one.dataflow, one.tiles) == (choice.dataflow, choice.tiles)


def _as_json(
    question: "Question", source: str, choice: "Choice", served: str, estimates: "list[Estimate]"
) -> dict[str, object]:
    from dataclasses import asdict

    candidates = [
        {**asdict(one), "factor": one.factor, "pick": _is_pick(one, choice)} for one in estimates
    ]
    return {
        "question": asdict(question),
        "source": source,
        "floor_s": choice.floor_s,
        "why": choice.why,
        "serving": served,
        "candidates": candidates,
    }
