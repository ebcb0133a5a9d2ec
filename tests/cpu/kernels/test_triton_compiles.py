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
made = []
triton.knobs.runtime.jit_post_compile_hook = lambda **facts: made.append(facts["repr"])
from c2cserve.kernels.gpu import elementwise
from c2cserve.kernels.gpu.attention.paged import Arrivals, attend
from c2cserve.kernels.gpu.sampling.sample import sample
from c2cserve.kernels.gpu.graph_inputs import GraphInputs
from c2cserve.kernels.gpu.sampling.greedy import greedy
from c2cserve.kernels.gpu.sampling.masks import RowMasks
from c2cserve.kernels.gpu.aot.warm import Sizes, warm
from c2cserve.kernels.gpu.small_copies import copy_small, copy_small_out
from c2cserve.kernels.layer import KvLayout, Layer, LayerShape, LayerWeights, Mlp, TokenRows
dim, cpu, dtype = int(sys.argv[1]), torch.device("cpu"), torch.bfloat16
warm(Sizes(hidden=4096, inner=12288, heads=32, kv_heads=8, head_dim=dim, vocab=151936,
           dtype="bfloat16", qk_norm=dim == 128, top_k=2), cpu)
warmed = list(compiled)
assert len(made) == len(compiled)

def ints(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)

def zeros(*shape, dtype=dtype):
    return torch.zeros(shape, dtype=dtype)

# Any step of this model and of others like it: nothing new.
for tokens in (1, 2, 5, 16, 4096):
    x = zeros(tokens, 3072)
    elementwise.add_rms_norm(x, x, zeros(3072, dtype=torch.float32), 1e-6)
    elementwise.silu_mul(zeros(tokens, 1536))
    elementwise.chained(zeros(tokens, dtype=torch.int32), zeros(3, dtype=torch.int32))
    copy_small(zeros(tokens, dtype=torch.int32), zeros(tokens, dtype=torch.int32))
    copy_small_out(zeros(tokens, dtype=torch.int32), zeros(tokens, dtype=torch.int32))
    elementwise.embed(zeros(7, 3072), zeros(tokens, dtype=torch.int32), cpu)
    places = zeros(tokens, 8, dtype=torch.int64)
    elementwise.combine(x, places, zeros(tokens, 8, dtype=torch.float32), tokens)
    greedy(zeros(min(tokens, 17), 32000))
    few = min(tokens, 5)
    rows = TokenRows(ints(*range(few)), ints(*range(few + 1)), ints(*range(few)),
                     zeros(few, 3, dtype=torch.int64), zeros(few, dtype=torch.int64))
    GraphInputs.make(8, 3072, 4096, dtype, cpu).copy_in(zeros(few, 3072), rows)
    sample(zeros(min(tokens, 17), 32000), zeros(6, min(tokens, 17), dtype=torch.int64))
    masks = RowMasks.of([zeros(1000, dtype=torch.int32), *[None] * min(tokens - 1, 16)], cpu)
    greedy(zeros(min(tokens, 17), 32000), masks)
    sample(zeros(min(tokens, 17), 32000), zeros(6, min(tokens, 17), dtype=torch.int64), masks)
for layer, heads, kv_heads in ((0, 1, 1), (1, 28, 4), (35, 64, 8)):
    kv = KvLayout(36, kv_heads, dim, "bfloat16")
    arena, slots = zeros(kv.block_bytes, dtype=torch.uint8), zeros(5, dtype=torch.int64)
    qkv, table = zeros(5, (heads + 2 * kv_heads) * dim), zeros(9, dim // 2, dtype=torch.float32)
    norm = zeros(dim, dtype=torch.float32)
    steps = (((0, 5), 1, 0), ((0, 1, 5), 16, 4096), ((0, 1, 2, 3, 4, 5), 300, 1))
    for starts, width, window in steps:
        weights = LayerWeights(norm, norm, None, (norm, norm) if dim == 128 else None, norm, None,
                               norm, Mlp(norm, None, norm, None), window)
        rows = TokenRows(ints(0, 1, 2, 3, 4), ints(*starts), ints(*starts[1:]),
                         zeros(len(starts) - 1, width, dtype=torch.int64), slots)
        shape = LayerShape(kv, 3072, heads, 1e-6, 0.1)
        attend(qkv, Layer(layer, weights, shape), rows, (table, table), arena, Arrivals(cpu))
assert len(made) == len(warmed), made[len(warmed):]
dump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
for name, kernel in warmed:
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
def test_every_kernel_compiles_for_hopper_when_warmed_and_never_again(dim: int) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, str(dim)], capture_output=True, text=True, timeout=110,
        env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) == 18
