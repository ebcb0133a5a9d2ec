"""A weight that is used stays in HBM when there is room, and answers do not change for it."""

import pytest
import torch
from gemm_case import make_case

from c2cserve.kernels.gpu.gemm.choice.assumed import assumed_h200
from c2cserve.kernels.gpu.gemm.choice.choose import Chooser
from c2cserve.kernels.gpu.gemm.linear import Linear
from c2cserve.kernels.gpu.launch_context import LaunchContext
from c2cserve.memory.hbm_cache import HbmCache
from c2cserve.policy.weights.hbm_residency import Residency

pytestmark = pytest.mark.gpu


def test_a_model_warms_up_by_being_used(context: LaunchContext) -> None:
    cases = [make_case(m, 1024, 768, home="host", bias=m == 3) for m in (1, 3, 70, 300)]
    cache = cache_of(3 * cases[0].w.bytes)
    linear = Linear(context, Chooser(assumed_h200()), cache)
    cache.add("a", 0, 1 << 62)
    for step in range(4):
        cache.begin_step("a", float(step), 0)
        for case in cases:
            linear(case.x, case.w, case.bias, case.out)
        for case in cases:
            case.check(roundings=2)
    size = cases[0].w.bytes
    assert cache.bytes == 3 * size
    assert (cache.counts.streamed_bytes, cache.counts.hit_bytes) == (7 * size, 9 * size)
    assert linear.launched["prefetch"] == 1 + 4, "one of more rows is kept, the other never"
    assert linear.launched["resident"] == 3


def test_dropping_while_work_is_enqueued(context: LaunchContext) -> None:
    """A hotter model takes the room; what reads the old weights has not run yet."""
    cases = [make_case(64, 4096, 4096, home="host") for _ in range(4)]
    size = cases[0].w.bytes
    cache = cache_of(2 * size + 4096)
    linear = Linear(context, Chooser(assumed_h200()), cache)
    for place, case in enumerate(cases):
        cache.add("old" if place < 2 else "new", case.w.pointer, size)
    for turn in range(30):
        mine = cases[:2] if turn < 3 else cases[2:]
        cache.begin_step("old" if turn < 3 else "new", 0.0, 0)
        for case in mine:
            linear(case.x, case.w, None, case.out)
    assert cache.counts.dropped_bytes == 2 * size
    for case in cases:
        case.check()


def test_kv_overwrites_what_is_still_being_read(context: LaunchContext) -> None:
    """It takes the place at once; the GEMM that reads it is enqueued before."""
    case = make_case(64, 4096, 4096, home="host")
    cache = cache_of(case.w.bytes)
    linear = Linear(context, Chooser(assumed_h200()), cache)
    cache.add("a", case.w.pointer, case.w.bytes)
    for _ in range(3):
        cache.begin_step("a", 0.0, 0)
        linear(case.x, case.w, None, case.out)
        cache.begin_step("a", 0.0, cache._arena.numel())
        cache._arena.fill_(255)
        assert cache.bytes == 0
        case.check()


def cache_of(size: int) -> HbmCache:
    return HbmCache(torch.empty(size, dtype=torch.uint8, device="cuda"), Residency(size))
