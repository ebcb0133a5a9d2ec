"""Small copies to the GPU do not wait for large ones that a copy engine has queued."""

from statistics import median

import pytest
import torch

from c2cserve.kernels.gpu.small_copies import copy_small

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
LARGE, QUEUED, TRIES = 16 << 20, 8, 9
WORDS = 4096


def seconds_beside_large_copies(small: torch.Tensor, out: torch.Tensor, *, kernel: bool) -> float:
    """Return how long a small copy takes that is enqueued behind none of the large ones, but on
    another stream."""
    source = torch.empty(LARGE, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(QUEUED, LARGE, dtype=torch.uint8, device=DEVICE)
    beside = torch.cuda.Stream(DEVICE)
    found: list[float] = []
    for _ in range(TRIES):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        with torch.cuda.stream(beside):
            for row in target:
                row.copy_(source, non_blocking=True)
        begin.record()
        if kernel:
            copy_small(small, out)
        else:
            out.copy_(small, non_blocking=True)
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) / 1e3)
    return median(found)


def test_a_small_copy_shares_the_link_with_large_ones() -> None:
    small = torch.arange(WORDS, dtype=torch.int32).pin_memory()
    out = torch.zeros(WORDS, dtype=torch.int32, device=DEVICE)
    copy_small(small, out)  # compiled
    by_kernel = seconds_beside_large_copies(small, out, kernel=True)
    by_engine = seconds_beside_large_copies(small, out, kernel=False)
    assert torch.equal(out.cpu(), small)
    engine_us, kernel_us = round(1e6 * by_engine), round(1e6 * by_kernel)
    print(f"\n16 KiB beside 128 MiB: {kernel_us} us by a kernel, {engine_us} by an engine")  # noqa: T201
    one_large_s = LARGE / 55e9
    assert by_kernel < one_large_s, "it waited for a large copy"


def test_what_is_written_again_is_what_the_next_copy_brings() -> None:
    """The host's memory is reused from step to step: nothing of it may stay in a cache."""
    small = torch.zeros(WORDS, dtype=torch.int32).pin_memory()
    out = torch.zeros(WORDS, dtype=torch.int32, device=DEVICE)
    for number in range(200):
        small.fill_(number)
        copy_small(small, out)
        torch.cuda.current_stream().synchronize()
        assert int(out.min()) == int(out.max()) == number
