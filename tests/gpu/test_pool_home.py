"""Weights in shared memory, mapped and registered by two processes, read by kernels of both."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from c2cserve.kernels.gpu.gemm.launchers.direct import direct
from c2cserve.kernels.gpu.gemm.traffic import Tiles
from c2cserve.kernels.gpu.gemm.weight import WeightHandle
from c2cserve.kernels.gpu.launch_context import LaunchContext
from c2cserve.memory.pinning import PinnedRegion, PinningError, pin_array

pytestmark = pytest.mark.gpu

N, K = 1024, 512
READER = """
import sys, mmap, numpy as np, torch
from c2cserve.kernels.gpu.gemm.launchers.direct import direct
from c2cserve.kernels.gpu.launch_context import LaunchContext
from c2cserve.kernels.gpu.aot.repository import Repository
from c2cserve.kernels.gpu.gemm.traffic import Tiles
from c2cserve.kernels.gpu.gemm.weight import WeightHandle
from c2cserve.memory.pinning import pin_array
path, n, k = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
data = np.memmap(path, np.uint8, "r")
region = pin_array(data)
handle = WeightHandle(region.address, (n, k), "bfloat16", "host", region)
x = torch.ones(4, k, dtype=torch.bfloat16, device="cuda")
out = torch.empty(4, n, dtype=torch.bfloat16, device="cuda")
direct(LaunchContext(0, Repository(0)), x, handle, None, out, Tiles(bx=16))
torch.cuda.synchronize()
print("sum", float(out[0].double().sum()))
"""


def test_two_processes_read_one_segment(context: LaunchContext, tmp_path: Path) -> None:
    shared = Path("/dev/shm") / f"c2cserve-test-{tmp_path.name}"
    weight = (torch.randn(N, K) / 8).to(torch.bfloat16)
    try:
        shared.write_bytes(weight.view(torch.uint8).numpy().tobytes())
        data: np.ndarray = np.memmap(shared, np.uint8, "r")
        region = pin_array(data)
        handle = WeightHandle(region.address, (N, K), "bfloat16", "host", region)
        x = torch.ones(4, K, dtype=torch.bfloat16, device="cuda")
        out = torch.full((4, N), torch.nan, dtype=torch.bfloat16, device="cuda")
        direct(context, x, handle, None, out, Tiles(bx=16))
        torch.cuda.synchronize()
        torch.testing.assert_close(
            out[0].float().cpu(), weight.float().sum(1), rtol=8e-3, atol=8e-3
        )
        command = [sys.executable, "-c", READER, str(shared), str(N), str(K)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == 0, done.stderr
        assert float(done.stdout.split()[-1]) == float(out[0].double().sum())
        region.close()
    finally:
        shared.unlink(missing_ok=True)


def test_what_is_no_memory_is_refused() -> None:
    with pytest.raises(PinningError):
        PinnedRegion(4096, 4096)
