"""One launch for `gemm_counters.sh` to look at, and what its counters say beside our count.

A launch with few enough rows of X is right in what it shows (M = 2,048: sym reads W eight times)
and does not take ncu's replays minutes.
"""

import argparse
import csv
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from report import report

from c2cserve.kernels.gpu.gemm.dataflows.table import DataflowName, traffic
from c2cserve.kernels.gpu.gemm.traffic import Tiles, Traffic

M, N, K = 2048, 16384, 4096
FLOWS: dict[str, tuple[DataflowName, Tiles]] = {
    "sym": ("sym", Tiles(bx=256, alpha=1.0)),
    "asym": ("asym", Tiles(bx=256, alpha=0.0)),
    "direct": ("direct", Tiles(bx=256, cluster=2)),
}
SECTOR_BYTES = 32
LINK = {
    "peer": ("nvlrx__bytes", "lts__t_sectors_aperture_peer"),
    "host": ("pcie__read_bytes", "lts__t_sectors_aperture_sysmem"),
}
HBM = {"hbm_read_bytes": "dram__bytes_read", "hbm_write_bytes": "dram__bytes_write"}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("launch")
    one.add_argument("dataflow", choices=sorted(FLOWS))
    one.add_argument("--home", choices=sorted(LINK), required=True)
    many = commands.add_parser("compare")
    many.add_argument("logs", nargs="+", metavar="HOME:DATAFLOW:CSV")
    many.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.command == "launch":
        launch_once(given.dataflow, given.home)
        return
    rows = [_compared(*log.split(":", 2)) for log in given.logs]
    for row in rows:
        print(line(row))
    report(rows, given.out, show=given.out is None, m=M, n=N, k=K)


def launch_once(name: str, home: str) -> None:
    """Once to load the kernel, then once between the profiler's marks."""
    import torch

    from c2cserve.kernels.gpu.aot.repository import Repository
    from c2cserve.kernels.gpu.gemm.linear import launch
    from c2cserve.kernels.gpu.gemm.measure import WeightStore
    from c2cserve.kernels.gpu.launch_context import LaunchContext

    context, (dataflow, tiles) = LaunchContext(0, Repository(0)), FLOWS[name]
    weight = WeightStore("peer" if home == "peer" else "host", 2 * N * K, "bfloat16", 0)
    [w, *_] = weight.weights((N, K))
    x = torch.randn(M, K, device="cuda").bfloat16()
    out = torch.empty(M, N, dtype=torch.bfloat16, device="cuda")
    for marked in (False, True):
        torch.cuda.synchronize()
        if marked:
            torch.cuda.profiler.start()
        launch(context, dataflow, tiles, x, w, None, out)
        torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def read_counters(lines: Iterable[str]) -> dict[str, float]:
    """Of `ncu --csv`: each metric summed over the kernels of the launch; those that are not a
    number (n/a) are left out. Raises ValueError where there is no table."""
    table = [line for line in lines if line.startswith('"')]
    if not table:
        raise ValueError("no counters: ncu wrote no table (may this user read counters?)")
    found: dict[str, float] = {}
    for row in csv.DictReader(table):
        name, text = row["Metric Name"].removesuffix(".sum"), row["Metric Value"].replace(",", "")
        if text.replace(".", "", 1).isdigit():
            found[name] = found.get(name, 0.0) + float(text)
    return found


def compare(home: str, name: str, counters: Mapping[str, float]) -> dict[str, Any]:
    """Counted bytes, and measured over counted. HBM's count is what kernels ask for: L2 serves
    part of it, so its ratios are at most about 1."""
    dataflow, tiles = FLOWS[name]
    counted = _as_dict(traffic(dataflow, M, N, K, 2, tiles))
    seen = {
        counter: value * (SECTOR_BYTES if "sectors" in counter else 1)
        for counter, value in counters.items()
    }
    link = [counter for counter in LINK[home] if counter in seen]
    hbm = {part: counter for part, counter in HBM.items() if counter in seen}
    return {
        "home": home,
        "dataflow": dataflow,
        "counted": counted,
        "measured_bytes": seen,
        "link_over_counted": {counter: seen[counter] / counted["link_bytes"] for counter in link},
        "hbm_over_counted": {part: seen[counter] / counted[part] for part, counter in hbm.items()},
    }


def line(row: Mapping[str, Any]) -> str:
    ratios = {**row["link_over_counted"], **row["hbm_over_counted"]}
    said = ", ".join(f"{name} {ratio:.3f}" for name, ratio in ratios.items())
    return f"{row['dataflow']} from {row['home']}, measured over counted: {said}"


def _as_dict(counted: Traffic) -> dict[str, int]:
    return {
        "link_bytes": counted.link_bytes,
        "hbm_read_bytes": counted.hbm_read_bytes,
        "hbm_write_bytes": counted.hbm_write_bytes,
    }


def _compared(home: str, dataflow: str, path: str) -> dict[str, Any]:
    return compare(home, dataflow, read_counters(Path(path).read_text().splitlines()))


if __name__ == "__main__":
    main()
