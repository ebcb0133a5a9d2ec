"""GEMMs whose weights are in host or peer memory, against what nothing can beat: JSON and plots.

python benchmarks/gemm.py [--quick] [--budget-s S] [--parts table,paper,slice,figures] [--out FILE]
python benchmarks/gemm.py --plot FILE [--images FOLDER]

A time is a chain's over its length: one CUDA graph of GEMMs over different weights, replayed
(`c2cserve.kernels.gpu.gemm.measure`). The floor beside it, from the same run: the larger of cuBLAS
with W in HBM and W's bytes over the copy engine's speed (of experts, the chosen ones'). The pick is
what `choose.py` says by a profile that `c2cserve profile` measured before; it is run like all
others.
"""

import argparse
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemm_cases import PAPER_ROWS, LinkHome, slice_cases, table_cases
from report import report

from c2cserve.devices.discover import discover
from c2cserve.kernels.gpu.gemm.choice.assumed import assumed_profile
from c2cserve.kernels.gpu.gemm.choice.choose import Chooser
from c2cserve.kernels.gpu.gemm.choice.profile import Profile, ProfileError, load_profile

if TYPE_CHECKING:
    from gemm_run import Bench

PARTS = ("table", "paper", "slice", "figures")
SLICE_SMS = 16
_STORE_BYTES = 4 << 30
_SHARES = {"table": 0.75, "paper": 0.08, "slice": 0.17}


def main() -> None:
    given = _arguments()
    if given.plot is not None:
        from gemm_plots import plot_all

        for path in plot_all(json.loads(given.plot.read_text())["results"], given.images):
            print(path)
        return
    _measure(given)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer cases")
    parser.add_argument("--budget-s", type=float, default=400.0, help="all but the figures")
    parser.add_argument("--parts", default="table,paper,slice", help=", ".join(PARTS))
    parser.add_argument("--homes", help="host, peer or both; default: what the machine has")
    parser.add_argument("--profile", type=Path, help="to pick by; default: this machine's")
    parser.add_argument("--out", type=Path, help="JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw earlier results, no GPU")
    parser.add_argument("--images", type=Path, default=Path("docs/images"), help="of --plot")
    given = parser.parse_args()
    given.parts = given.parts.split(",")
    if unknown := set(given.parts) - set(PARTS):
        parser.error(f"no such parts: {', '.join(sorted(unknown))}")
    return given


def _measure(given: argparse.Namespace) -> None:
    # Streams share 8 hardware queues unless told otherwise: a copy may then wait behind a kernel
    # that has nothing to do with it.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    import torch
    from gemm_run import Bench

    from c2cserve.kernels.gpu.aot.repository import Repository

    began_s = time.monotonic()
    discover()  # what the report will say of this machine: better found wanting now than then
    homes: list[LinkHome] = ["peer", "host"] if torch.cuda.device_count() > 1 else ["host"]
    if given.homes:
        homes = given.homes.split(",")
    profile, picked_by = _profile(given.profile, torch.cuda.get_device_name(0))
    bench = Bench(Repository(0), homes, store_bytes=_STORE_BYTES, rows=PAPER_ROWS)
    results: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(0), "gpus": torch.cuda.device_count(),
        "sms": bench.sms, "torch": torch.__version__, "cuda": torch.version.cuda,
        "picked_by": picked_by, "link_bytes_per_s": bench.link_bytes_per_s,
    }  # fmt: skip
    for home, speed in bench.link_bytes_per_s.items():
        print(f"copy engine from {home}: {speed / 1e9:.1f} GB/s", flush=True)
    chooser = Chooser(profile)
    try:
        for part in given.parts:
            budget_s = given.budget_s * _SHARES.get(part, 1.0)
            results[part] = _part(part, bench, chooser, budget_s, quick=given.quick)
        results["link_bytes_per_s_after"] = {home: bench.copy_speed(home) for home in homes}
    finally:
        # What was measured before something failed is worth as much as ever.
        results["seconds"] = time.monotonic() - began_s
        parameters = {"quick": given.quick, "budget_s": given.budget_s, "parts": given.parts}
        report(results, given.out, show=given.out is None, **parameters)


def _profile(path: Path | None, gpu: str) -> tuple[Profile, str]:
    """What to pick by. Without a profile, known speeds: said so in the results."""
    try:
        found = load_profile(path, gpu=gpu)
    except ProfileError as error:
        if path is not None:
            raise
        assumed = assumed_profile(gpu)
        print(f"{error}: picks are by {assumed.note}")
        return assumed.profile, assumed.note
    return found, f"profile of {found.date:%Y-%m-%d %H:%M} UTC, measured apart from this run"


def _part(part: str, bench: "Bench", chooser: Chooser, budget_s: float, *, quick: bool) -> Any:
    from gemm_figures import figures
    from gemm_slices import partitions
    from gemm_table import paper_shape, table

    match part:
        case "table":
            cases = table_cases(bench.homes, bench.sms, quick=quick)
            return table(bench, chooser, cases, budget_s)
        case "slice":
            [alone] = partitions(bench, SLICE_SMS, 1)
            cases = slice_cases(bench.homes, alone.context.sms, quick=quick)
            with alone.use():
                return table(bench, chooser, cases, budget_s, alone.context)
        case "paper":
            return [paper_shape(bench, chooser, home, quick=quick) for home in bench.homes]
        case _:
            return figures(bench, chooser, quick=quick)


if __name__ == "__main__":
    main()
