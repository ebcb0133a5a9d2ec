"""Cases one after another: the pick, other dataflows as time allows, and the floor."""

import time
from typing import Any

from gemm_cases import (
    PAPER,
    PAPER_ROWS,
    Budget,
    Case,
    Linear,
    LinkHome,
    alphas,
    chain_length,
    label,
    weight_of_case,
    worth_timing,
)
from gemm_run import Bench, CaseRun
from gemm_summary import PAPER_BAR, floor_s, summary, summary_lines

from c2cserve.kernels.gpu.driver import CudaError
from c2cserve.kernels.gpu.gemm.choice.candidates import candidates
from c2cserve.kernels.gpu.gemm.choice.choose import Chooser
from c2cserve.kernels.gpu.gemm.dataflows.table import PUBLISHED, DataflowName
from c2cserve.kernels.gpu.gemm.traffic import Tiles
from c2cserve.kernels.gpu.gemm.weight import OperandError
from c2cserve.kernels.gpu.launch_context import LaunchContext

ERROR_MAX = 1e-2
"""Norm of the difference from cuBLAS over the norm; both round once, to 8 bits."""


def table(
    bench: Bench,
    chooser: Chooser,
    cases: list[Case],
    budget_s: float,
    context: LaunchContext | None = None,
) -> dict[str, Any]:
    budget = Budget(budget_s, [weight_of_case(case) for case in cases], time.monotonic())
    rows: list[dict[str, Any]] = []
    cublas: dict[tuple[Linear, int], tuple[float, str]] = {}
    for case in cases:
        until_s = budget.next_until_s(time.monotonic())
        run = CaseRun(bench, case, context)
        place = (case.linear, case.m)
        if place not in cublas:  # the same from any home
            cublas[place] = run.cublas_s()
        rows.append(_row(run, chooser, cublas[place], until_s))
        print(_line(rows[-1], case), flush=True)
    found = summary(rows)
    print("\n".join(summary_lines(found)), flush=True)
    return {"rows": rows, "summary": found}


def paper_shape(bench: Bench, chooser: Chooser, home: LinkHome, *, quick: bool) -> dict[str, Any]:
    """M=10,240, N=16,384, K=4,096 by every dataflow with every candidate's tiles."""
    case = Case(PAPER, PAPER_ROWS, home, bench.sms)
    run = CaseRun(bench, case)
    choice = chooser.pick(case.question)
    every = [one for one in candidates(case.question) if one[0] not in PUBLISHED]
    every.append(("sym", Tiles(bx=256, alpha=1.0)))
    for alpha in alphas(quick):
        every.append(("hybrid", Tiles(bx=256, alpha=alpha)))
    for width in (4, 2):
        every.append(("asym", Tiles(bx=256, alpha=0.0, partial_bytes=width)))
    cublas = run.cublas_s()
    floor = floor_s(cublas[0], run.weight_bytes, run.link_bytes_per_s)
    timed: list[dict[str, Any]] = []
    for dataflow, tiles in every:
        timed.append(timed_candidate(run, dataflow, tiles, floor))
        shown = timed[-1]["seconds"]
        timed[-1]["error"] = None if shown is None else error_of(run, dataflow, tiles)
        ratio = timed[-1]["refused"] if shown is None else f"{shown / floor:6.2f}x floor"
        print(f"paper shape from {home}: {timed[-1]['tiles']:<50} {ratio}", flush=True)
    pick = (choice.dataflow, choice.tiles)
    pick_s = timed[every.index(pick)]["seconds"]
    return {
        "home": home, "m": PAPER_ROWS, "n": PAPER.n, "k": PAPER.k, "floor_s": floor,
        "cublas_s": cublas[0], "pick": label(*pick, PAPER.n), "pick_s": pick_s,
        "bar": PAPER_BAR, "candidates": timed,
    }  # fmt: skip


def timed_candidate(
    run: CaseRun, dataflow: DataflowName, tiles: Tiles, expected_s: float
) -> dict[str, Any]:
    """Its seconds and bytes, or why it can not run here."""
    counted = run.traffic(dataflow, tiles)
    found: dict[str, Any] = {
        "dataflow": dataflow,
        "tiles": label(dataflow, tiles, run.case.linear.n),
        "link_bytes": counted.link_bytes,
        "hbm_bytes": counted.hbm_read_bytes + counted.hbm_write_bytes,
        "seconds": None,
        "refused": None,
    }
    link_s = counted.link_bytes / run.link_bytes_per_s
    try:
        chain = chain_length(max(expected_s, link_s), dataflow)
        found["seconds"] = run.seconds(dataflow, tiles, chain)
    except (OperandError, CudaError, LookupError) as error:
        found["refused"] = str(error)
    return found


def error_of(run: CaseRun, dataflow: DataflowName, tiles: Tiles) -> float:
    """From cuBLAS's result. A wrong result has no speed: raises ValueError."""
    error = run.error(dataflow, tiles)
    if not error <= ERROR_MAX:
        raise ValueError(
            f"{run.case}: {label(dataflow, tiles, run.case.linear.n)} is off by {error:.3g} of norm"
        )
    return error


def _row(
    run: CaseRun, chooser: Chooser, cublas: tuple[float, str], until_s: float
) -> dict[str, Any]:
    """One case: the pick for certain, others as time allows."""
    case, linear = run.case, run.case.linear
    choice = chooser.pick(case.question)
    pick = (choice.dataflow, choice.tiles)
    floor = floor_s(cublas[0], run.weight_bytes, run.link_bytes_per_s)
    timed: list[dict[str, Any]] = []
    for one in worth_timing(chooser.estimates(case.question), pick, published=case.published):
        if timed and time.monotonic() > until_s:
            break
        timed.append(timed_candidate(run, one.dataflow, one.tiles, floor))
    pick_s = timed[0]["seconds"]
    ran = [one for one in timed if one["seconds"] is not None]
    best = min(ran, key=lambda one: one["seconds"], default=None)
    return {
        "model": linear.model, "linear": linear.name, "m": case.m, "n": linear.n, "k": linear.k,
        "experts": linear.experts, "top_k": linear.top_k, "home": case.home, "sms": case.sms,
        "floor_s": floor, "cublas_s": cublas[0], "cublas": cublas[1],
        "weight_bytes": run.weight_bytes, "link_s": run.weight_bytes / run.link_bytes_per_s,
        "pick": label(*pick, linear.n), "pick_s": pick_s, "pick_basis": choice.basis,
        "pick_predicted_s": choice.predicted_s,
        "pick_error": None if pick_s is None else error_of(run, *pick),
        "best": best and best["tiles"], "best_s": best and best["seconds"],
        "candidates": timed,
    }  # fmt: skip


def _line(row: dict[str, Any], case: Case) -> str:
    floor, pick_s = row["floor_s"], row["pick_s"]
    start = f"{case}  floor {floor * 1e6:8.1f} us ({_bound(row)})"
    if pick_s is None:
        return f"{start}  {row['pick']} REFUSED: {row['candidates'][0]['refused']}"
    line = f"{start}  {pick_s / floor:5.2f}x {row['pick']:<32}"
    if row["best"] == row["pick"]:
        return line
    return f"{line}  best {row['best_s'] / floor:5.2f}x {row['best']}"


def _bound(row: dict[str, Any]) -> str:
    return "link" if row["link_s"] >= row["cublas_s"] else "compute"
