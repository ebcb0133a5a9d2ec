"""Triton's kernels become machine code for the GPUs we serve on, without one: no errors at start,
nothing kept in local memory."""

import os
import subprocess
import sys

import pytest

COMPILE = """
import subprocess, sys, tempfile
from pathlib import Path
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

class NoGpu:
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)

driver.set_active(NoGpu())
compiled, run = [], JITFunction.run

def compile_only(self, *args, grid, warmup, **options):
    kernel = run(self, *args, grid=grid, warmup=True, **options)
    compiled.append((self.__name__, kernel))
    return kernel

JITFunction.run = compile_only
from c2cserve.kernels.gpu.warm import Sizes, warm
dim = int(sys.argv[1])
warm(Sizes(hidden=4096, inner=12288, heads=32, kv_heads=8, head_dim=dim, vocab=151936,
           dtype="bfloat16", qk_norm=dim == 128, top_k=2), torch.device("cpu"))
dump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
for name, kernel in compiled:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [dump, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    assert "STACK:0 " in usage and "LOCAL:0 " in usage, f"{name} spills: {usage}"
    assert kernel.metadata.shared <= 227 * 1024, name
    if name in ("_many_kernel", "_single_kernel"):
        assert "cp.async.cg" in kernel.asm["ptx"], f"{name} does not load ahead"
    print(name)
"""


@pytest.mark.parametrize(
    "dim", [128, *(pytest.param(dim, marks=pytest.mark.slow) for dim in (64, 80, 96, 256))]
)
def test_every_kernel_compiles_for_hopper(dim: int) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, str(dim)], capture_output=True, text=True, timeout=110,
        env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) == 10
