"""What the launch of a GEMM of few rows takes the host, in microseconds of its thread.

python benchmarks/gemm_launch.py [--tree NAME=DIR ...] [--rounds 5] [--launches 200] [--out FILE]

Each --tree is a checkout of this repository, whose `src` is measured; without any it is this one.
They take turns, so that a ratio between two is from one run.

    again   operands of a shape, strides and dtype that came before: what a step launches
    first   the same, with all forgotten that such launches left behind

Launches are real on a machine with a GPU. On one without, the driver's calls do nothing: what is
measured is the choice, the checks, the packing and the look-ups. The results say which it was.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import torch
from report import report
from torch import Tensor

from c2cserve.core.tensors import Home
from c2cserve.kernels.gpu import driver, launch_context
from c2cserve.kernels.gpu.gemm.choice.assumed import assumed_profile
from c2cserve.kernels.gpu.gemm.choice.choose import Chooser
from c2cserve.kernels.gpu.gemm.linear import Linear
from c2cserve.kernels.gpu.gemm.weight import WeightHandle
from c2cserve.kernels.gpu.launch_context import LaunchContext

ROOT = Path(__file__).parent.parent
ROWS = (1, 16)
HOMES: tuple[Home, ...] = ("hbm", "host")
_N = _K = 4096
_SMS = 132
_WARM = 20
_SAMPLES = 15


class Absent:
    """A GPU that is not there: the launch context is the product's, the driver does nothing."""

    name = "none: the driver's calls do nothing"

    def __init__(self) -> None:
        kernels: Any = Kernels()
        self.context = LaunchContext(0, kernels)
        self.linear = Linear(self.context, Chooser(assumed_profile("NVIDIA H200").profile))

    def operand(self, rows: int, columns: int) -> Tensor:
        return torch.zeros(rows, columns, dtype=torch.bfloat16).as_subclass(OnGpu)

    def weight(self, home: Home) -> WeightHandle:
        return WeightHandle(1 << 30, (_N, _K), "bfloat16", home)

    def wait(self) -> None: ...


class OnGpu(Tensor):
    """A tensor that says it is on a GPU. Nothing reads it."""

    # Its methods cost what a tensor's do.
    __torch_function__: Any = vars(torch.nn.Parameter)["__torch_function__"]
    device = torch.device("cuda:0")  # pyright: ignore[reportAssignmentType]


class Kernels:
    """Stands in for compiled kernels."""

    def kernel(self, variant: Any) -> int:
        return 0


class Present:
    """The first GPU of this machine."""

    def __init__(self) -> None:
        from gpu_machine import Gpu

        self._gpu = Gpu(1 << 30, rates="assumed")
        self.name, self.context = self._gpu.name, self._gpu.context
        self.linear, _ = self._gpu.linear()

    def operand(self, rows: int, columns: int) -> Tensor:
        return torch.zeros(rows, columns, dtype=torch.bfloat16, device=self._gpu.device)

    def weight(self, home: Home) -> WeightHandle:
        memory = self._gpu.buffer(home, 2 * _N * _K)
        return WeightHandle(memory.data_ptr(), (_N, _K), "bfloat16", home, owner=memory)

    def wait(self) -> None:
        self._gpu.synchronize()


@contextmanager
def machine() -> Generator[Absent | Present]:
    if torch.cuda.is_available():
        yield Present()
        return
    properties = SimpleNamespace(multi_processor_count=_SMS)
    none: list[tuple[Any, str, Any]] = [
        (torch.cuda, "get_device_properties", Mock(return_value=properties)),
        (torch.cuda, "Event", object),
        (driver, "new_stream", Mock(return_value=None)),
        (driver, "_encode", Mock(return_value=bytes(driver.MAP_BYTES))),
        (driver.cu, "cuLaunchKernelEx", _launched),
        (launch_context, "_resident_clusters", Mock(return_value=_SMS // 4)),
        (LaunchContext, "stream", 0),
    ]
    with ExitStack() as replaced:
        for owner, name, member in none:
            replaced.enter_context(patch.object(owner, name, member))
        yield Absent()


def _launched(*_: object) -> tuple[int]:
    return (0,)


def measure(launches: int) -> dict[str, Any]:
    """Time the launches of the `c2cserve` that is imported."""
    rows: list[dict[str, Any]] = []
    with machine() as gpu:
        for home in HOMES:
            w = gpu.weight(home)
            for count in ROWS:
                x, out = gpu.operand(count, _K), gpu.operand(count, _N)
                for kind in ("again", "first"):
                    us = launch_us(gpu, x, w, out, launches, forget=kind == "first")
                    rows.append({"home": home, "rows": count, "kind": kind, "us": us})
        return {"driver": gpu.name, "rows": rows}


def launch_us(
    gpu: Absent | Present, x: Tensor, w: WeightHandle, out: Tensor, launches: int, *, forget: bool
) -> float:
    """Return the median over samples of what a launch takes this thread."""
    for _ in range(_WARM):
        gpu.linear(x, w, None, out)
    samples: list[float] = []
    for _ in range(_SAMPLES):
        gpu.wait()
        spent_ns = 0
        for _ in range(launches):
            if forget:
                vars(gpu.context).get("plans", {}).clear()
                vars(gpu.linear).get("_served", {}).clear()
            began_ns = time.thread_time_ns()
            gpu.linear(x, w, None, out)
            spent_ns += time.thread_time_ns() - began_ns
        samples.append(spent_ns / launches / 1e3)
    return statistics.median(samples)


def compared(trees: Sequence[tuple[str, Path]], rounds: int, launches: int) -> dict[str, Any]:
    """Return of each tree what it took, the median over rounds in which trees take turns."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name, _ in trees}
    for _ in range(rounds):
        for name, tree in trees:
            said = subprocess.run(
                [sys.executable, __file__, "--once", "--launches", str(launches)],
                env={**os.environ, "PYTHONPATH": str(tree / "src")}, stdout=subprocess.PIPE,
                check=True,
            ).stdout  # fmt: skip
            found[name].append(json.loads(said.splitlines()[-1]))
    results: dict[str, Any] = {"driver": next(iter(found.values()))[0]["driver"]}
    for name, runs in found.items():
        by_row = zip(*(one["rows"] for one in runs), strict=True)
        results[name] = [
            {**row[0], "us": round(statistics.median(one["us"] for one in row), 2)}
            for row in by_row
        ]
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tree", action="append", default=[], metavar="NAME=DIR")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--launches", type=int, default=200, help="in a sample")
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="JSON")
    given = parser.parse_args()
    torch.set_grad_enabled(False)
    if given.once:
        print(json.dumps(measure(given.launches)))
        return
    trees = [tuple(one.split("=", 1)) for one in given.tree] or [("this", str(ROOT))]
    results = compared([(name, Path(at)) for name, at in trees], given.rounds, given.launches)
    report(results, given.out, rounds=given.rounds, launches=given.launches)


if __name__ == "__main__":
    main()
