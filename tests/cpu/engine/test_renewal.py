"""What a GPU slice builds anew after a failed step, as far as it can be seen without a GPU."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import torch

from c2cserve.engine.gpu.setup import GpuParts
from c2cserve.kernels.gpu.gemm.weight import WeightHandle
from c2cserve.memory.hbm_cache import HbmCache
from c2cserve.policy.weights.hbm_residency import Residency

SIZE = 1 << 12


def test_everything_is_built_anew_once_the_gpu_is_done() -> None:
    told: list[str] = []

    def part(name: str) -> Any:
        return SimpleNamespace(
            renew=lambda: told.append(name), clear=lambda: told.append(name),
            synchronize=lambda: told.append(f"wait for {name}"), copies=None,
        )  # fmt: skip

    context = part("context")
    context.copies = part("copies")
    parts = SimpleNamespace(
        stream=part("steps"), context=context, ops=part("ops"), to_device=part("staging"),
        flashinfer=SimpleNamespace(flash=part("plans")), cache=part("cache"),
        current=nullcontext,
        streaming=SimpleNamespace(
            renew=lambda: told.append("lane"), finish=lambda: told.append("wait for lane")
        ),
        loads=SimpleNamespace(
            synchronize=lambda: told.append("wait for loads"), drop=lambda: told.append("loads")
        ),
    )  # fmt: skip
    parts.finish = lambda: GpuParts.finish(cast(Any, parts))
    GpuParts.renew(cast(Any, parts))
    assert told[:4] == ["wait for steps", "wait for copies", "wait for lane", "wait for loads"]
    assert set(told[4:]) == {"context", "ops", "staging", "plans", "cache", "lane", "loads"}


def test_weights_that_may_not_have_arrived_are_brought_again() -> None:
    arena = torch.zeros(8 * SIZE, dtype=torch.uint8)
    cache = HbmCache(arena, Residency(arena.numel()))
    cache.add("m", 1 << 20, 4 * SIZE)
    weights = [
        WeightHandle((1 << 20) + i * SIZE, (SIZE // 64, 32), "bfloat16", "host") for i in range(3)
    ]
    cache.begin_step("m", 1.0, SIZE)
    places = [cache.place(w) for w in weights]
    assert all(places)
    changes = cache.changes
    cache.clear()
    assert cache.bytes == 0
    assert cache.changes > changes, "tables that say where weights are look again"
    assert not any(cache.find(w) for w in weights)
    cache.begin_step("m", 2.0, SIZE)
    assert all(cache.place(w) for w in weights)
    assert all(cache.find(w) for w in weights)
