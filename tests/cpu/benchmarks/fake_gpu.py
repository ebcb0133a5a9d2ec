"""A machine without a GPU for `gpu_engine.py`: kernels interpreted, GEMMs in plain torch, limits
made up."""

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from interpreted import DEVICE
from torch import Tensor

from c2cserve.core.tensors import Home
from c2cserve.engine.gpu.ops import GpuOps
from c2cserve.engine.models.config import ModelConfig
from c2cserve.kernels.cpu_ops import CpuOps
from c2cserve.kernels.gpu.gemm.weight import OperandError, WeightHandle
from c2cserve.kernels.layer import Layer


class PlainMultiply:
    """`kernels.gpu.gemm.linear.Linear`'s contract on the host, rounded once; `refuses` an
    expert's."""

    def __init__(self, *, refuses_experts: bool = False) -> None:
        self._refuses = refuses_experts
        self.calls = 0

    def __call__(self, x: Tensor, w: WeightHandle, bias: Tensor | None = None) -> Tensor:
        self.calls += 1
        y = x.float() @ _owner(w).float().T
        return (y if bias is None else y + bias.float()).to(x.dtype)

    def gated(self, x: Tensor, w: WeightHandle, bias: Tensor | None = None) -> Tensor:
        return PlainKernels.silu_mul(self(x, w, bias))

    def experts(self, x: Tensor, w: WeightHandle, offsets: Tensor, top_k: int) -> Tensor:
        if self._refuses:
            raise OperandError("no experts here")
        bounds = pairwise(offsets.tolist())
        experts = zip(_owner(w), bounds, strict=True)
        parts = [x[a:b].float() @ one.float().T for one, (a, b) in experts]
        return torch.cat(parts).to(x.dtype)


class FakeCache:
    bytes = 1

    def add(self, model: str, address: int, size: int) -> None: ...

    def begin_step(self, model: str, now: float, kv_end: int) -> None: ...


class FakeMachine:
    """`gpu_engine_run.Machine` and what `gpu_engine_parts.Run` asks of it."""

    device = DEVICE
    name = "a GPU that is not there"
    picked_by = "nothing"
    host_sampler = staging = flash = None

    def __init__(self, homes: Sequence[Home] = ("peer", "host"), **multiply: bool) -> None:
        self.homes = list(homes)
        self.host_sampler: Any = CpuOps(1).sample
        self.multiplies: list[PlainMultiply] = []
        self._multiply = multiply
        self._buffers: dict[Home, Tensor] = {}
        self.arena = torch.zeros(64 << 20, dtype=torch.uint8)

    def buffer(self, home: Home, size: int) -> Tensor:
        if home not in self._buffers:
            torch.manual_seed(0)
            self._buffers[home] = (torch.randn(size // 2) * 0.05).bfloat16().view(torch.uint8)
        return self._buffers[home]

    def linear(self, kept_bytes: int = 0) -> tuple[PlainMultiply, FakeCache]:
        self.multiplies.append(PlainMultiply(**self._multiply))
        return self.multiplies[-1], FakeCache()

    def capture_decoding(self, ops: GpuOps, linear: PlainMultiply, cache: FakeCache) -> None: ...

    def limits(self, size: int) -> dict[str, Any]:
        for home in (*self.homes, "hbm"):
            self.buffer(home, size)
        links = dict.fromkeys(self.homes, 50e9)
        return {"link_bytes_per_s": links, "hbm_bytes_per_s": 4e12, "matmul_flops": 7e14}

    def warm(self, config: ModelConfig) -> None: ...

    def free_bytes(self) -> int:
        return 64 << 30

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    def synchronize(self) -> None: ...

    def mark(self) -> float:
        return time.perf_counter()

    def elapsed_s(self, begin: float, end: float) -> float:
        return end - begin

    def chain_s(self, steps: Sequence[Callable[[], object]]) -> float:
        steps[0]()
        return 1e-4


class PlainKernels:
    """In place of `kernels.gpu.elementwise` and attention where only their being called matters:
    interpreted, they would take nearly all of a test's time. No token sees another."""

    @staticmethod
    def embed(table: Tensor, ids: Tensor, device: torch.device) -> Tensor:
        return table[ids]

    @staticmethod
    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return torch.nn.functional.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)

    @staticmethod
    def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        residual += x
        return PlainKernels.rms_norm(residual, weight, eps)

    @staticmethod
    def silu_mul(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return torch.nn.functional.silu(gate) * up

    @staticmethod
    def chained(ids: Tensor, sampled: Tensor) -> Tensor:
        return torch.where(ids < 0, sampled[(-1 - ids).clamp(min=0)], ids)

    @staticmethod
    def combine(y: Tensor, places: Tensor, weights: Tensor, rows: int) -> Tensor:
        combined = (y[places] * weights[..., None]).sum(1).to(y.dtype)
        return torch.nn.functional.pad(combined, (0, 0, 0, rows - len(combined)))

    @staticmethod
    def attend(qkv: Tensor, layer: Layer, *_: object) -> Tensor:
        kv = layer.shape.kv
        return qkv[:, : -2 * kv.kv_heads * kv.head_dim].contiguous()


def _owner(w: WeightHandle) -> Tensor:
    assert isinstance(w.owner, Tensor)
    return w.owner
