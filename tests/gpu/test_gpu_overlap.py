"""Overlapped steps on a real GPU: the next is launched while one runs; nobody's text changes."""

import threading
from pathlib import Path

import pytest
import torch
from engine_case import LateModel, make, no_sampler, on_gpu
from gpu_engine_case import OTHER, PROMPT, folder, gpu, segments
from gpu_policy_loop import Loop

from c2cserve.core.events import StepDone, Withdrawn
from c2cserve.core.request import Sampling
from c2cserve.engine.gpu.segments import PinnedSegments
from c2cserve.engine.gpu.setup import GpuParts, open_gpu
from c2cserve.kernels.cpu_ops import CpuOps
from c2cserve.kernels.gpu.sampling.greedy import greedy_of
from c2cserve.kernels.gpu.sampling.sample import asked_of, sample
from c2cserve.kernels.ops import RowSampling

__all__ = ["folder", "gpu", "segments"]

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", ["llama", "qwen3-moe"])
def test_overlap_changes_no_answer(
    gpu: GpuParts, segments: PinnedSegments, folder: Path, case: str
) -> None:
    """Of greedy requests one after the other; then beside each other, with one that stops a step
    late, one that goes away in flight and one that the CPU draws."""
    make(folder, case)
    model = LateModel(folder, 1024, device=gpu.device, open_=segments.open).load_all()
    texts: list[list[int]] = []
    for at_a_time in (1, 2):
        loop = Loop(gpu, model, at_a_time)
        loop.submit("a", PROMPT[:40], 64)
        loop.finish("a")
        texts.append(loop.tokens("a"))
        assert (loop.ahead > 20) == (at_a_time == 2)
        assert loop.policy.arena.held_bytes == 0
    assert texts[0] == texts[1]
    assert len(texts[0]) == 64
    loop = Loop(gpu, model, 2)
    stop = max(i for i, token in enumerate(texts[0][:40]) if texts[0].index(token) == i)
    loop.submit(
        "stops", PROMPT[:40], 64, Sampling(0, temperature=0.0, stop_token_ids=(texts[0][stop],))
    )
    loop.finish("stops")
    assert loop.tokens("stops") == texts[0][: stop + 1]
    loop.submit("goes", OTHER[:50], 500)
    loop.submit("stays", OTHER[:20], 40)
    while len(loop.tokens("goes")) < 10:
        loop.tick()
    loop.events.append(Withdrawn("goes"))
    loop.finish("stays")
    assert len(loop.tokens("stays")) == 40
    assert len(loop.executor) == 0
    assert loop.policy.arena.held_bytes == 0
    gpu.finish()
    segments.close(model.path)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(seed=3, temperature=0.8, top_k=5),
        Sampling(seed=3, top_p=0.9, min_p=0.01),
        Sampling(seed=3, temperature=0.8, presence_penalty=0.5),
    ],
    ids=["top-k", "top-p", "the CPU's"],
)
def test_drawn_requests_beside_greedy_ones(
    gpu: GpuParts, segments: PinnedSegments, folder: Path, sampling: Sampling
) -> None:
    """What the GPU draws is chained, what the CPU draws is waited for: the same steps either way,
    so the same text."""
    make(folder, "llama")
    model = LateModel(folder, 1024, device=gpu.device, open_=segments.open).load_all()
    parts = open_gpu(0, 512 << 20, CpuOps(2).sample, profile="assumed")
    answers: list[list[list[int]]] = []
    try:
        for at_a_time in (1, 2):
            loop = Loop(parts, model, at_a_time)
            loop.submit("greedy", PROMPT[:16], 20)
            loop.submit("drawn", PROMPT[16:48], 20, sampling)
            loop.finish("greedy", "drawn")
            answers.append([loop.tokens("greedy"), loop.tokens("drawn")])
            assert (loop.ahead > 5) == (at_a_time == 2 and not sampling.presence_penalty)
        parts.finish()
    finally:
        torch.cuda.set_stream(gpu.stream)
    assert answers[0] == answers[1]
    assert {len(tokens) for tokens in answers[0]} == {20}
    segments.close(model.path)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_whole_batch_of_large_rows_is_drawn_as_the_cpu_draws_it(dtype: torch.dtype) -> None:
    """Sums in other orders may put a border or a target one token further, once in a while."""
    count, vocab = 64, 151936
    logits = (torch.randn(count, vocab, generator=torch.Generator().manual_seed(1)) * 3).to(dtype)
    ways = [{}, {"top_k": 50}, {"top_p": 0.95}, {"min_p": 0.05, "top_p": 0.8}]
    rows = [RowSampling(9, i, **ways[i % len(ways)]) for i in range(count)]
    ids, _ = greedy_of(sample(logits.cuda(), asked_of(rows).cuda()).cpu())
    want = CpuOps(2).sample(logits.float(), rows).ids
    assert sum(a != b for a, b in zip(ids, want, strict=True)) <= 2


def test_the_end_of_a_step_is_notified(
    gpu: GpuParts, segments: PinnedSegments, folder: Path
) -> None:
    make(folder, "llama")
    model = LateModel(folder, 1024, device=gpu.device, open_=segments.open).load_all()
    notified = threading.Semaphore(0)
    parts = open_gpu(0, 64 << 20, no_sampler, profile="assumed", notify=notified.release)
    try:
        lane = on_gpu(parts)
        lane.attach("m", model.decoder)
        lane.add("a", "m", PROMPT[:40], 2)
        done = lane.step(("a", 0, 40))
        assert isinstance(done, StepDone)
        assert notified.acquire(timeout=10)
        assert not notified.acquire(timeout=0.05)
        parts.finish()
    finally:
        torch.cuda.set_stream(gpu.stream)
    segments.close(model.path)
