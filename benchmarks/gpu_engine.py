"""The GPU engine in one process against what its links, memory and tensor cores can do: JSON.

python benchmarks/gpu_engine.py [--shapes llama-8b,qwen3-30b-a3b] [--layers N] [--budget-s S]
    [--homes peer,host] [--parts ...] [--out FILE]

Random weights lie in pinned host memory, in a second GPU's HBM (`peer`) and in HBM. Limits are
measured in the same run: the copy engine over each link, copies within HBM (bytes read and
written), cuBLAS at its best. A step's time is the wall's, from asking for it to its tokens being
on the host; "in a graph" is the same forward pass captured, without what launching costs the host.

parts, of each shape:
  stream     another model's first token for a prompt of 512, and decoding at batch 1, weights at
             home: over bytes / link
  resident   decoding at batch 1 and 32, weights in HBM: over bytes / HBM speed + attention's own
  prefill    8,192 tokens, weights in HBM: share of the matrix peak
  switch     from asking for a step of another model to its first GEMM, over many switches
  copy       the plain baseline: copy all of the model to HBM, then prefill
  cache      steps of one model after another while HBM keeps all, or half, of its weights
"""

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from gpu_engine_parts import PARTS, Run, buffer_bytes
from gpu_models import SHAPES, config_of
from report import report

_KV_BYTES = 6 << 30
_REFUSALS = (RuntimeError, ValueError, LookupError, OSError)
"""What a part may fail with, CUDA's errors and lack of memory among it."""


def main() -> None:
    given = _arguments()
    from gpu_machine import SETUP_ERRORS, Gpu  # needs CUDA's bindings

    began_s = time.monotonic()
    torch.set_grad_enabled(False)
    try:
        machine = Gpu(_KV_BYTES)
    except SETUP_ERRORS as error:
        raise SystemExit(f"gpu_engine: {error}") from error
    if given.own_attention:
        machine.flash = None
    if given.homes:
        machine.homes = given.homes.split(",")
    failed = measure(machine, given, began_s)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def _arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", default="llama-8b", help=", ".join(SHAPES))
    parser.add_argument("--layers", type=int, help="of each shape, at most")
    parser.add_argument("--homes", help="peer, host or both; default: what the machine has")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--own-attention", action="store_true", help="for prompts: no FlashInfer")
    parser.add_argument("--repeats", type=int, default=5, help="of each measurement, about")
    parser.add_argument("--budget-s", type=float, default=140.0, help="no part begins after it")
    parser.add_argument("--out", type=Path, help="JSON, written after every part")
    given = parser.parse_args(arguments)
    given.shapes, given.parts = given.shapes.split(","), given.parts.split(",")
    for known, asked in ((SHAPES, given.shapes), (PARTS, given.parts)):
        if unknown := set(asked) - set(known):
            parser.error(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(known)}")
    return given


def measure(machine: Any, given: argparse.Namespace, began_s: float) -> list[str]:
    """All parts of all shapes; what failed. A part that fails does not stop the next, and what was
    measured before is kept."""
    size = max(buffer_bytes(config_of(shape, given.layers)) for shape in given.shapes)
    limits = machine.limits(size)
    _show_limits(limits, time.monotonic() - began_s)
    results: dict[str, Any] = {
        "gpu": machine.name, "torch": torch.__version__, "cuda": torch.version.cuda,
        "picked_by": machine.picked_by, "flashinfer": _modules(machine.flash), "limits": limits,
        "shapes": {}, "failed": {},
    }  # fmt: skip

    def write() -> None:
        results["seconds"] = time.monotonic() - began_s
        report(
            results, given.out, show=False, shapes=given.shapes, layers=given.layers,
            parts=given.parts, repeats=given.repeats,
        )  # fmt: skip

    for shape in given.shapes:
        run = Run(machine, shape, given.layers, limits, repeats=given.repeats)
        results["shapes"][shape] = {
            "layers": run.config.layers, "weight_bytes": run.bytes, "figures": run.figures,
        }  # fmt: skip
        for part in given.parts:
            _attempt(run, part, began_s + given.budget_s, results["failed"])
            write()
    bars = [row for one in results["shapes"].values() for row in one["figures"] if "met" in row]
    print(f"{sum(row['met'] for row in bars)} of {len(bars)} bars met", flush=True)
    return list(results["failed"])


def _modules(flash: Any) -> list[str]:
    """Of FlashInfer, that prompts may go through."""
    return [] if flash is None else sorted(kind.name for kind in flash.kinds)


def _attempt(run: Run, part: str, until_s: float, failed: dict[str, str]) -> None:
    name = f"{run.shape} {part}"
    if time.monotonic() > until_s:
        failed[name] = "out of time: not begun"
    else:
        try:
            run.part(part)
        except _REFUSALS as error:
            failed[name] = f"{type(error).__name__}: {error}"
    if name in failed:
        print(f"{name}: {failed[name]}", flush=True)


def _show_limits(limits: dict[str, Any], took_s: float) -> None:
    for home, speed in limits["link_bytes_per_s"].items():
        print(f"copy engine from {home}: {speed / 1e9:.1f} GB/s")
    hbm, peak = limits["hbm_bytes_per_s"] / 1e9, limits["matmul_flops"] / 1e12
    print(f"HBM {hbm:.0f} GB/s, matrix peak {peak:.0f} TFLOP/s, ready after {took_s:.1f} s",
          flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
