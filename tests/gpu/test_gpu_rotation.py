"""KV between HBM and host memory on a real GPU, under steps that overlap."""

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from engine_case import LateModel, make, no_sampler
from gpu_engine_case import PROMPT, folder, segments
from gpu_policy_loop import Loop

from c2cserve.core.actions import Move
from c2cserve.engine.gpu.segments import PinnedSegments
from c2cserve.engine.gpu.setup import GpuParts, open_gpu

__all__ = ["folder", "segments"]

pytestmark = pytest.mark.gpu

HOST_BYTES = 256 << 20
LARGE_BYTES = 1 << 30


@pytest.fixture(scope="module")
def gpu() -> Iterator[GpuParts]:
    before = torch.cuda.current_stream()
    with torch.no_grad():
        yield open_gpu(0, 64 << 20, no_sampler, profile="assumed", host_kv_bytes=HOST_BYTES)
    torch.cuda.synchronize()
    torch.cuda.set_stream(before)


def test_what_comes_back_is_what_left(gpu: GpuParts) -> None:
    """While the compute stream is busy, blocks of 64 KiB and 2 MiB, all of the arena."""
    for block in (64 << 10, 2 << 20):
        count = gpu.arena.numel() // block
        gpu.arena.random_(0, 256)
        before = gpu.arena.clone()
        gpu.stream.synchronize()
        names = ("a", "b")
        offsets = {
            name: tuple(range(i * block, count * block, 2 * block)) for i, name in enumerate(names)
        }
        for name in names:
            gpu.host_kv.start(Move(name, "out", 0, offsets[name]), block)
        wait(gpu, 2)
        gpu.arena.zero_()
        torch.cuda._sleep(10_000_000)
        gpu.arena.fill_(7)  # what comes in must not be overtaken by what was launched before
        for name in names:
            gpu.host_kv.start(Move(name, "in", 0, offsets[name]), block)
        wait(gpu, 2)
        assert torch.equal(gpu.arena, before)
        for name in names:
            gpu.host_kv.forget(name)
    assert gpu.host_kv.used_bytes == 0


@pytest.fixture(scope="module")
def large() -> Iterator[GpuParts]:
    before = torch.cuda.current_stream()
    with torch.no_grad():
        yield open_gpu(0, LARGE_BYTES, no_sampler, profile="assumed", host_kv_bytes=LARGE_BYTES)
    torch.cuda.synchronize()
    torch.cuda.set_stream(before)


@pytest.mark.parametrize(
    ("segment_bytes", "share"), [(2 << 20, 0.85), (64 << 10, 0.2)], ids=["2 MiB", "64 KiB"]
)
def test_both_ways_at_once_beside_two_large_copies(
    large: GpuParts, segment_bytes: int, share: float
) -> None:
    """Segments that touch no other. `pytest -m gpu -s` prints the rates; the shares are bounds for
    any machine. With 64 KiB the host's work for each segment counts, not the link."""
    half = LARGE_BYTES // 2
    host = torch.empty(LARGE_BYTES, dtype=torch.uint8, pin_memory=True)
    streams = [torch.cuda.Stream() for _ in range(2)]
    plain_s = moved_s = float("inf")
    out, back = (
        tuple(range(start, start + half, 2 * segment_bytes)) for start in (0, half)
    )  # fmt: skip
    size = len(out) * segment_bytes
    large.host_kv.start(Move("in", "out", 0, back), segment_bytes)
    wait(large, 1)
    for _ in range(5):
        torch.cuda.synchronize()
        begun_s = time.monotonic()
        with torch.cuda.stream(streams[0]):
            host[:size].copy_(large.arena[:size], non_blocking=True)
        with torch.cuda.stream(streams[1]):
            large.arena[half : half + size].copy_(host[half : half + size], non_blocking=True)
        torch.cuda.synchronize()
        plain_s = min(plain_s, time.monotonic() - begun_s)
        begun_s = time.monotonic()
        large.host_kv.start(Move("out", "copy", 0, out), segment_bytes)
        large.host_kv.start(Move("in", "in", 0, back, kept=len(back)), segment_bytes)
        wait(large, 2)
        moved_s = min(moved_s, time.monotonic() - begun_s)
    for name in ("in", "out"):
        large.host_kv.forget(name)
    sys.stdout.write(
        f"\nboth ways, {segment_bytes >> 10} KiB: rotation {2 * size / moved_s / 1e9:.1f} GB/s,"
        f" two large copies {2 * size / plain_s / 1e9:.1f}: {plain_s / moved_s:.2f}\n"
    )
    assert plain_s / moved_s >= share


def wait(gpu: GpuParts, moves: int) -> None:
    over = 0
    while over < moves:
        over += len(gpu.host_kv.finished())


@pytest.mark.parametrize("at_a_time", [1, 2])
def test_requests_that_take_turns_get_the_text_of_an_idle_slice(
    gpu: GpuParts, segments: PinnedSegments, folder: Path, at_a_time: int
) -> None:
    make(folder, "llama")
    model = LateModel(folder, 1024, device=gpu.device, open_=segments.open).load_all()
    prompts = {f"r{i}": PROMPT[i:] + PROMPT[:i] for i in range(12)}
    # At most 64 rows in a step: no sum depends on what else is in it, or on how a prompt is cut.
    alone = Loop(gpu, model, at_a_time, 64 << 20, max_step_tokens=32)
    for name, prompt in prompts.items():
        alone.submit(name, prompt, 200)
        alone.finish(name)
    assert gpu.host_kv.used_bytes == 0
    blocks = -(-(len(PROMPT) + 200) // 16)
    kv_bytes = 5 * blocks * model.decoder.kv.block_bytes  # of twelve requests, five fit
    tight = Loop(gpu, model, at_a_time, kv_bytes // (2 << 20) * (2 << 20), max_step_tokens=32)
    before = gpu.host_kv.counts.in_bytes
    for name, prompt in prompts.items():
        tight.submit(name, prompt, 200)
    tight.finish(*prompts)
    assert {n: tight.tokens(n) for n in prompts} == {n: alone.tokens(n) for n in prompts}
    assert gpu.host_kv.counts.in_bytes > before
    assert gpu.host_kv.used_bytes == 0
