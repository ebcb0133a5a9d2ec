"""Cached prefixes in host memory on a real GPU: what comes back is what was computed.

`pytest -m gpu -s tests/gpu/test_gpu_prefix_tier.py`."""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_case import LateModel, make, no_sampler
from gpu_engine_case import PROMPT, folder, segments
from gpu_policy_loop import GREEDY, Loop

from c2cserve.core.actions import BringPrefix, DropPrefix, Move, SavePrefix
from c2cserve.core.request import BLOCK_TOKENS, Job, Request, Slo
from c2cserve.engine.gpu.segments import PinnedSegments
from c2cserve.engine.gpu.setup import GpuParts, open_gpu
from c2cserve.engine.prefixes import PrefixBlocks

__all__ = ["folder", "segments"]

pytestmark = pytest.mark.gpu

HOST_BYTES = 256 << 20
SMALL_BYTES = 4 << 20
NEW_TOKENS = 16


@pytest.fixture(scope="module")
def gpu() -> Iterator[GpuParts]:
    before = torch.cuda.current_stream()
    with torch.no_grad():
        yield open_gpu(0, 512 << 20, no_sampler, profile="assumed", host_kv_bytes=HOST_BYTES)
    torch.cuda.synchronize()
    torch.cuda.set_stream(before)


@pytest.mark.parametrize("block", [64 << 10, 2 << 20])
def test_blocks_come_back_to_other_places_as_they_were(gpu: GpuParts, block: int) -> None:
    """While the compute stream is busy with what was launched before."""
    prefixes = PrefixBlocks(gpu.host_kv.extents, gpu.host_kv.copier, time.monotonic)
    count = (64 << 20) // block
    here, there = gpu.arena[: count * block], gpu.arena[count * block : 2 * count * block]
    here.random_(0, 256)
    before = here.clone()
    gpu.stream.synchronize()
    ids = tuple(range(count))
    prefixes.submit(SavePrefix(1, block, ids, tuple(one * block for one in ids)))
    wait(prefixes)
    assert prefixes.used_bytes == count * block
    here.zero_()
    torch.cuda._sleep(10_000_000)
    there.fill_(7)  # what comes in must not be overtaken by what was launched before
    backwards = tuple((count + one) * block for one in reversed(ids))
    prefixes.submit(BringPrefix(2, block, ids, backwards))
    wait(prefixes)
    assert torch.equal(there.view(count, block).flip(0).flatten(), before)
    prefixes.submit(DropPrefix(ids))
    assert gpu.host_kv.used_bytes == 0
    assert prefixes.counts.brought_bytes == prefixes.counts.saved_bytes == count * block
    assert prefixes.counts.bring_s > 0.0


@pytest.mark.parametrize("block", [64 << 10, 2 << 20])
def test_a_request_comes_in_from_a_prefix_and_its_own_copies(gpu: GpuParts, block: int) -> None:
    """The first half of its blocks is a prefix's, which goes out once for both."""
    kv = gpu.host_kv
    prefixes = PrefixBlocks(kv.extents, kv.copier, time.monotonic)
    count = (64 << 20) // block
    half, out_bytes = count // 2, kv.counts.out_bytes
    here, there = gpu.arena[: count * block], gpu.arena[count * block : 2 * count * block]
    here.random_(0, 256)
    before = here.clone()
    gpu.stream.synchronize()
    places = tuple(range(0, count * block, block))
    prefixes.submit(SavePrefix(1, block, tuple(range(half)), places[:half]))
    wait(prefixes)
    out = Move("r", "out", half, places[half:], shared=half)
    back = tuple((2 * count - 1 - one) * block for one in range(count))
    come = Move("r", "in", 0, back, kept=count, shared=half, ids=tuple(range(half)))
    for move in (out, come):
        kv.start(move, block, prefixes.runs(move))
        end_s = time.monotonic() + 30
        while not kv.finished():
            assert time.monotonic() < end_s
        here.zero_()
        gpu.stream.synchronize()
    assert torch.equal(there.view(count, block).flip(0).flatten(), before)
    assert kv.counts.out_bytes - out_bytes == half * block
    kv.forget("r")
    prefixes.submit(DropPrefix(tuple(range(half))))
    assert kv.used_bytes == 0


def wait(prefixes: PrefixBlocks) -> None:
    end_s = time.monotonic() + 30
    while not prefixes.finished():
        assert time.monotonic() < end_s


@pytest.mark.parametrize("at_a_time", [1, 2])
def test_a_prefix_that_was_pushed_out_gives_the_same_text(
    gpu: GpuParts, segments: PinnedSegments, folder: Path, at_a_time: int
) -> None:
    make(folder, "llama")
    model = LateModel(folder, 1024, device=gpu.device, open_=segments.open).load_all()
    # At most 64 rows in a step: no sum depends on what else is in it, or on how a prompt is cut.
    loop = Loop(gpu, model, at_a_time, SMALL_BYTES, max_step_tokens=32, link_bytes_per_s=1e15)
    ask(loop, "first", PROMPT, family=1)
    tier = loop.policy.prefixes
    assert tier is not None
    number = 0
    while tier.hits == 0:
        for _ in range(4):
            number += 1
            ask(loop, f"fills {number}", PROMPT[number:] + PROMPT[:number], family=number + 10)
        ask(loop, f"again {number}", PROMPT, family=1)
        assert loop.tokens(f"again {number}") == loop.tokens("first")
        assert number < 100, "it is never pushed out"
    assert tier.tokens <= loop.policy.cached_tokens
    assert loop.executor.prefixes.counts.brought_bytes > 0


def ask(loop: Loop, name: str, prompt: list[int], family: int) -> None:
    hashes = tuple(1000 * family + i for i in range(len(prompt) // BLOCK_TOKENS))
    request = Request(name, "m", len(prompt), NEW_TOKENS, time.monotonic(), Slo(60.0, 60.0))
    loop.add(Job(replace(request, prefix_hashes=hashes), tuple(prompt), GREEDY))
    loop.finish(name)
