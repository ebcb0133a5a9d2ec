"""Attention of one layer against what memory and tensor cores can do, and against FlashInfer's.

python benchmarks/attention.py [--shapes llama-8b,llama-3b,qwen3-14b] [--cases TEXT] [--layers N]
    [--repeats N] [--budget-s S] [--out FILE]

Both read the same arena: blocks [layer, k | v, kv_head, 16, head_dim] of all of the shape's layers,
scattered over spans; FlashInfer by page numbers of `attention_cases.page_unit` bytes and strided
views. A measurement is a CUDA graph of a chain of layers (16 of decoding, 4 of prompts), each with
keys and values of its own, replayed after more than the L2 was read: the median of the repeats over
the chain's length, so no keys or values come out of a cache.

Ours also norms (Qwen3) and rotates queries and keys and stores new keys and values in that time;
"attention only" is its kernel for several new tokens alone (for one new token there is no such
kernel: it does all of it). FlashInfer's is its attention only. Beside them its plan, which the host
makes once for a step: `plan_s` until it returns, `plan_done_s` until its copies are over, and the
copies, which the profiler counts when all else is done. `launch_host_s`: the host's time for a call
that is not in a graph.

The floor is the larger of bytes of keys and values over the speed of copies within HBM (bytes read
and written) and operations over cuBLAS at its best, both measured in the same run. Errors are the
largest differences from float64 on a few rows of the chain's first layer.

Without FlashInfer, ours is measured alone. Its modules have to be compiled before: set
FLASHINFER_DISABLE_JIT=1, so that what is missing is refused and not compiled here.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from attention_cases import CASES, Case, arena_bytes, table
from attention_peer import FlashInfer
from attention_run import SPAN_BYTES, Bench, GraphTimer, Timer, fill
from gpu_models import SHAPES, config_of
from report import report

from c2cserve.kernels.layer import KvLayout

_LIMITS_BYTES = 1 << 30
_DEFAULT = "llama-8b,llama-3b,qwen3-14b"


def main() -> None:
    given = _arguments()
    from gpu_machine import SETUP_ERRORS, Gpu  # needs CUDA's bindings

    began_s = time.monotonic()
    torch.set_grad_enabled(False)
    try:
        machine = Gpu(arena_size(given))
    except SETUP_ERRORS as error:
        raise SystemExit(f"attention: {error}") from error
    machine.homes = []
    timer = GraphTimer(machine.context, machine.device, given.repeats)
    wrong = measure(machine, timer, given, began_s)
    if wrong:
        raise SystemExit(f"attention: wrong or not measured: {', '.join(wrong)}")


def _arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", default=_DEFAULT, help=", ".join(SHAPES))
    parser.add_argument("--cases", default="", help="only those whose name begins so")
    parser.add_argument("--layers", type=int, help="of each shape, at most")
    parser.add_argument("--repeats", type=int, default=20, help="of each measurement")
    parser.add_argument("--budget-s", type=float, default=400.0, help="no case begins after it")
    parser.add_argument("--out", type=Path, help="JSON, written after every case")
    given = parser.parse_args(arguments)
    given.shapes = given.shapes.split(",")
    if unknown := set(given.shapes) - set(SHAPES):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(SHAPES)}")
    given.chosen = [case for case in CASES if case.name.startswith(given.cases)]
    if not given.chosen:
        parser.error(f"no case begins with {given.cases!r}: {', '.join(c.name for c in CASES)}")
    return given


def arena_size(given: argparse.Namespace) -> int:
    """Bytes that the largest case of any of the shapes takes."""
    most = max(case.blocks for case in given.chosen)
    sizes: list[int] = []
    for shape in given.shapes:
        one = config_of(shape, given.layers)
        kv = KvLayout(one.layers, one.kv_heads, one.head_dim, "bfloat16")
        sizes.append(arena_bytes(most, kv.block_bytes, SPAN_BYTES))
    return max(sizes)


def measure(machine: Any, timer: Timer, given: argparse.Namespace, began_s: float) -> list[str]:
    """All cases of all shapes; those whose results are wrong or that were not begun."""
    peer, missing = _peer(machine.device)
    limits = machine.limits(_LIMITS_BYTES)
    results: dict[str, Any] = {
        "gpu": machine.name, "torch": torch.__version__, "cuda": torch.version.cuda,
        "flashinfer": {"missing": missing} if peer is None else {"version": peer.version},
        "limits": limits, "shapes": {}, "failed": {},
    }  # fmt: skip
    print(f"HBM {limits['hbm_bytes_per_s'] / 1e9:.0f} GB/s,"
          f" matrix peak {limits['matmul_flops'] / 1e12:.0f} TFLOP/s,"
          f" FlashInfer {missing if peer is None else peer.version}", flush=True)  # fmt: skip

    def write() -> None:
        results["seconds"] = time.monotonic() - began_s
        report(results, given.out, show=False, shapes=given.shapes, layers=given.layers,
               cases=given.cases, repeats=given.repeats)  # fmt: skip

    benches: dict[str, Bench] = {}
    filled = 0
    for shape in given.shapes:
        config = config_of(shape, given.layers)
        if config.head_dim != filled:
            fill(machine.arena, config.head_dim)
            filled = config.head_dim
        bench = benches[shape] = Bench(machine, config, limits, timer, peer)
        rows: list[dict[str, Any]] = []
        results["shapes"][shape] = {
            "heads": config.heads, "kv_heads": config.kv_heads, "head_dim": config.head_dim,
            "block_bytes": bench.kv.block_bytes, "cases": rows,
        }  # fmt: skip
        for case in given.chosen:
            _attempt(bench, case, shape, rows, results["failed"], began_s + given.budget_s)
            write()
        print(f"\n{shape}\n\n{table(rows)}", flush=True)
    _count_copies(benches, given.chosen, results["shapes"])
    write()
    return list(results["failed"])


def _count_copies(benches: dict[str, Bench], chosen: list[Case], shapes: dict[str, Any]) -> None:
    cases = {case.name: case for case in chosen}
    for shape, bench in benches.items():
        for row in shapes[shape]["cases"]:
            bench.count_copies(cases[row["case"]], row)
        print(f"\n{shape}, copies counted\n\n{table(shapes[shape]['cases'])}", flush=True)


def _peer(device: torch.device) -> tuple[FlashInfer | None, str]:
    """FlashInfer, or why it is not there."""
    try:
        return FlashInfer(device), ""
    except ImportError as error:
        return None, f"not importable: {error}"


def _attempt(
    bench: Bench, case: Case, shape: str, rows: list[dict[str, Any]], failed: dict[str, str],
    until_s: float,
) -> None:  # fmt: skip
    name = f"{shape} {case.name}"
    if time.monotonic() > until_s:
        failed[name] = "out of time: not begun"
        return
    row = bench.measure(case)
    rows.append(row)
    for one, found in row["peers"].items():
        if "refused" in found:
            failed[f"{name} ({one})"] = found["refused"]
            print(f"{name}: {one}: {found['refused']}", flush=True)
    if not row["agrees"]:
        failed[name] = "results are not the same"
        print(f"{name}: ours is {row['ours']['error']:.3g} off,"
              f" others {[one.get('error') for one in row['peers'].values()]}",
              flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
