"""Small copies to the GPU do not wait for large ones that a copy engine has queued."""

from collections.abc import Callable
from statistics import median

import pytest
import torch

from c2cserve.engine.gpu.sampling import Sampler
from c2cserve.kernels.cpu_ops import CpuOps
from c2cserve.kernels.gpu.small_copies import copy_small, copy_small_out
from c2cserve.kernels.ops import RowSampling

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
LARGE, QUEUED, TRIES = 16 << 20, 8, 9
ONE_LARGE_S = LARGE / 55e9
WORDS = 4096


def seconds_beside_large_copies(small: Callable[[], object], *, out: bool = False) -> float:
    """Return how long a small copy takes that is enqueued behind none of the large ones, but on
    another stream. That has the highest priority, as the transfer engine's have. `out`: the large
    ones go to host memory."""
    host = torch.empty(LARGE, dtype=torch.uint8, pin_memory=True)
    rows = torch.empty(QUEUED, LARGE, dtype=torch.uint8, device=DEVICE)
    beside = torch.cuda.Stream(DEVICE, priority=min(torch.cuda.Stream.priority_range()))
    found: list[float] = []
    for _ in range(TRIES):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        with torch.cuda.stream(beside):
            for row in rows:
                host.copy_(row, non_blocking=True) if out else row.copy_(host, non_blocking=True)
        begin.record()
        small()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) / 1e3)
    return median(found)


def test_a_small_copy_shares_the_link_with_large_ones() -> None:
    small = torch.arange(WORDS, dtype=torch.int32).pin_memory()
    out = torch.zeros(WORDS, dtype=torch.int32, device=DEVICE)
    copy_small(small, out)  # compiled
    by_kernel = seconds_beside_large_copies(lambda: copy_small(small, out))
    by_engine = seconds_beside_large_copies(lambda: out.copy_(small, non_blocking=True))
    assert torch.equal(out.cpu(), small)
    engine_us, kernel_us = round(1e6 * by_engine), round(1e6 * by_kernel)
    print(f"\n16 KiB beside 128 MiB: {kernel_us} us by a kernel, {engine_us} by an engine")  # noqa: T201
    assert by_kernel < ONE_LARGE_S, "it waited for a large copy"


def test_a_small_copy_to_the_host_does_not_wait_for_kv_that_goes_out() -> None:
    given = torch.arange(WORDS, dtype=torch.int32, device=DEVICE)
    pinned = torch.zeros(WORDS, dtype=torch.int32).pin_memory()
    copy_small_out(given, pinned)  # compiled
    by_kernel = seconds_beside_large_copies(lambda: copy_small_out(given, pinned), out=True)
    by_engine = seconds_beside_large_copies(
        lambda: pinned.copy_(given, non_blocking=True), out=True
    )
    assert torch.equal(given.cpu(), pinned)
    engine_us, kernel_us = round(1e6 * by_engine), round(1e6 * by_kernel)
    print(f"\n16 KiB out beside 128 MiB: {kernel_us} us by a kernel, {engine_us} by an engine")  # noqa: T201
    assert by_kernel < ONE_LARGE_S, "it waited for a large copy"


def test_a_steps_tokens_do_not_wait_for_kv_that_goes_out() -> None:
    sampler = Sampler(CpuOps().sample)
    logits = torch.randn(32, 1024, device=DEVICE).bfloat16()
    plain = [RowSampling(seed=1, position=i, temperature=0.0) for i in range(32)]
    biased = [RowSampling(seed=1, position=i, temperature=0.0, top_logprobs=2) for i in range(32)]
    want = logits.argmax(-1).tolist()
    for rows in (plain, biased):  # their tokens come, and all of their logits
        assert sampler(logits, rows).collect().ids == want
        taken_s = seconds_beside_large_copies(lambda rows=rows: sampler(logits, rows), out=True)
        assert taken_s < ONE_LARGE_S, "it waited for a large copy"


def test_memory_that_a_step_writes_is_not_lent_before_its_end() -> None:
    """A sample that nobody collects must not write into what another one has taken."""
    sampler = Sampler(CpuOps().sample)
    logits = torch.randn(8, 1024, device=DEVICE).bfloat16()
    rows = [RowSampling(seed=1, position=i, temperature=0.0) for i in range(8)]
    sampler(logits, rows).collect()
    torch.cuda._sleep(200_000_000)  # pyright: ignore[reportPrivateUsage]
    first = sampler(logits, rows)
    [written] = [one.data_ptr() for one in first.pinned if one is not None]
    del first
    second = sampler(logits, rows)
    assert written not in [one.data_ptr() for one in second.pinned if one is not None]
    assert second.collect().ids == logits.argmax(-1).tolist()


def test_what_is_written_again_is_what_the_next_copy_brings() -> None:
    """The host's memory is reused from step to step: nothing of it may stay in a cache."""
    small = torch.zeros(WORDS, dtype=torch.int32).pin_memory()
    out = torch.zeros(WORDS, dtype=torch.int32, device=DEVICE)
    for number in range(200):
        small.fill_(number)
        copy_small(small, out)
        torch.cuda.current_stream().synchronize()
        assert int(out.min()) == int(out.max()) == number
