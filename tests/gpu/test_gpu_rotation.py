"""KV between HBM and host memory on a real GPU, under steps that overlap.

One slice serves all tests, as opening one takes longer than any of them. `pytest -m gpu -s
--durations=0 tests/gpu/test_gpu_rotation.py` shows where the time goes."""

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

ARENA_BYTES = 1 << 30
SMALL_BYTES = 64 << 20
REQUESTS, NEW_TOKENS = 8, 128


@pytest.fixture(scope="module")
def gpu() -> Iterator[GpuParts]:
    before = torch.cuda.current_stream()
    with torch.no_grad():
        yield open_gpu(0, ARENA_BYTES, no_sampler, profile="assumed", host_kv_bytes=ARENA_BYTES)
    torch.cuda.synchronize()
    torch.cuda.set_stream(before)


def test_what_comes_back_is_what_left(gpu: GpuParts) -> None:
    """While the compute stream is busy, blocks of 64 KiB and 2 MiB."""
    arena = gpu.arena[:SMALL_BYTES]
    for block in (64 << 10, 2 << 20):
        count = SMALL_BYTES // block
        arena.random_(0, 256)
        before = arena.clone()
        gpu.stream.synchronize()
        names = ("a", "b")
        offsets = {
            name: tuple(range(i * block, count * block, 2 * block)) for i, name in enumerate(names)
        }
        for name in names:
            gpu.host_kv.start(Move(name, "out", 0, offsets[name]), block)
        wait(gpu, 2)
        arena.zero_()
        torch.cuda._sleep(10_000_000)
        arena.fill_(7)  # what comes in must not be overtaken by what was launched before
        for name in names:
            gpu.host_kv.start(Move(name, "in", 0, offsets[name]), block)
        wait(gpu, 2)
        assert torch.equal(arena, before)
        for name in names:
            gpu.host_kv.forget(name)
    assert gpu.host_kv.used_bytes == 0


@pytest.mark.parametrize(
    ("segment_bytes", "share"), [(2 << 20, 0.85), (64 << 10, 0.2)], ids=["2 MiB", "64 KiB"]
)
def test_both_ways_at_once_beside_two_large_copies(
    gpu: GpuParts, segment_bytes: int, share: float
) -> None:
    """Segments that touch no other. `pytest -m gpu -s` prints the rates; the shares are bounds for
    any machine."""
    half = ARENA_BYTES // 2
    host = torch.empty(ARENA_BYTES, dtype=torch.uint8, pin_memory=True)
    streams = [torch.cuda.Stream() for _ in range(2)]
    plain_s = moved_s = float("inf")
    out, back = (
        tuple(range(start, start + half, 2 * segment_bytes)) for start in (0, half)
    )  # fmt: skip
    size = len(out) * segment_bytes
    gpu.host_kv.start(Move("in", "out", 0, back), segment_bytes)
    wait(gpu, 1)
    for _ in range(5):
        torch.cuda.synchronize()
        begun_s = time.monotonic()
        with torch.cuda.stream(streams[0]):
            host[:size].copy_(gpu.arena[:size], non_blocking=True)
        with torch.cuda.stream(streams[1]):
            gpu.arena[half : half + size].copy_(host[half : half + size], non_blocking=True)
        torch.cuda.synchronize()
        plain_s = min(plain_s, time.monotonic() - begun_s)
        begun_s = time.monotonic()
        gpu.host_kv.start(Move("out", "copy", 0, out), segment_bytes)
        gpu.host_kv.start(Move("in", "in", 0, back, kept=len(back)), segment_bytes)
        wait(gpu, 2)
        moved_s = min(moved_s, time.monotonic() - begun_s)
    for name in ("in", "out"):
        gpu.host_kv.forget(name)
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
def test_requests_that_take_turns_get_the_text_of_a_roomy_slice(
    gpu: GpuParts, segments: PinnedSegments, folder: Path, at_a_time: int
) -> None:
    make(folder, "llama")
    model = LateModel(folder, 1024, device=gpu.device, open_=segments.open).load_all()
    prompts = {f"r{i}": PROMPT[i:] + PROMPT[:i] for i in range(REQUESTS)}
    # At most 64 rows in a step: no sum depends on what else is in it, or on how a prompt is cut.
    roomy = Loop(gpu, model, at_a_time, SMALL_BYTES, max_step_tokens=32)
    before = gpu.host_kv.counts.in_bytes
    tokens = tokens_of(roomy, prompts)
    assert gpu.host_kv.counts.in_bytes == before, "with room for all, none waits on the host"
    # The prompts of four fit, and with all of their tokens three do.
    tight = Loop(gpu, model, at_a_time, 4 << 20, max_step_tokens=32)
    assert tokens_of(tight, prompts) == tokens
    assert gpu.host_kv.counts.in_bytes > before
    assert gpu.host_kv.used_bytes == 0


def tokens_of(loop: Loop, prompts: dict[str, list[int]]) -> dict[str, list[int]]:
    begun_s = time.monotonic()
    for name, prompt in prompts.items():
        loop.submit(name, prompt, NEW_TOKENS)
    loop.finish(*prompts)
    sys.stdout.write(f"\n{len(prompts)} requests took {time.monotonic() - begun_s:.2f} s\n")
    return {name: loop.tokens(name) for name in prompts}
