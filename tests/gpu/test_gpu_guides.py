"""Grammars on a real GPU: it waits for masks itself, no text changes by that, and no wait lasts."""

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from engine_case import LateModel, make
from gpu_engine_case import KV_BYTES, OTHER, PROMPT, folder, segments
from gpu_policy_loop import Loop

from c2cserve.core.request import FinishReason, Grammar, Sampling
from c2cserve.engine.gpu.segments import PinnedSegments
from c2cserve.engine.gpu.setup import GpuParts, open_gpu
from c2cserve.grammars import memory, write
from c2cserve.grammars.memory import HEAD_WORDS, PLACES_AT, Region
from c2cserve.grammars.table import read_table, write_table
from c2cserve.kernels.cpu_ops import CpuOps
from c2cserve.kernels.gpu.sampling.masks import RowMasks
from c2cserve.kernels.ops import AwaitedMasks

__all__ = ["folder", "segments"]

pytestmark = pytest.mark.gpu

PATTERN = "[a-f]{30}[0-9]{2}"
ENDS = (2,)


@pytest.fixture(scope="module")
def gpu() -> Iterator[GpuParts]:
    before = torch.cuda.current_stream()
    with torch.no_grad():
        yield open_gpu(0, KV_BYTES, CpuOps(2).sample, profile="assumed")
    torch.cuda.synchronize()
    torch.cuda.set_stream(before)


@pytest.fixture
def grammar(tmp_path: Path) -> Grammar:
    singles = [bytes([one]) for one in b"abcdefghijklmnopqrstuvwxyz0123456789"]
    pairs = [a + b for a in singles for b in singles]
    table = write_table(str(tmp_path / "run"), [b""] * 3 + (singles + pairs)[:157])
    return Grammar(write.grammar_of(write.regex(PATTERN)), table, ENDS)


@pytest.mark.parametrize("heat", [0.0, 1.5])
@pytest.mark.parametrize("case", ["llama", "qwen3-moe"])
def test_masks_hold_in_steps_that_are_launched_ahead(
    gpu: GpuParts, segments: PinnedSegments, folder: Path, grammar: Grammar, case: str, heat: float
) -> None:
    """Two requests with a grammar beside two without: one step at a time, then two."""
    make(folder, case)
    model = LateModel(folder, 1024, device=gpu.device, open_=segments.open).load_all()
    held = Sampling(seed=3, temperature=heat, stop_token_ids=ENDS, grammar=grammar)
    scored = Sampling(seed=3, temperature=heat, stop_token_ids=ENDS, grammar=grammar, logprobs=2)
    answers: list[list[list[int]]] = []
    for at_a_time in (1, 2):
        loop = Loop(gpu, model, at_a_time)
        loop.submit("held", PROMPT[:40], 60, held)
        loop.submit("free", OTHER[:30], 40, Sampling(seed=1, temperature=heat))
        loop.finish("held", "free")
        if at_a_time == 2:
            assert loop.ahead > 10, "a grammar holds up no step"
        assert loop.guides.awaited > 10, "the GPU waits for masks"
        loop.submit("scored", PROMPT[:20], 60, scored)  # the CPU samples it, and it is waited for
        loop.finish("scored")
        names = ("held", "free", "scored")
        answers.append([loop.tokens(name) for name in names])
        loop.grammars.close()
    assert answers[0] == answers[1]
    table = read_table(grammar.tokens)
    for tokens in (answers[0][0], answers[0][2]):
        assert re.fullmatch(PATTERN, b"".join(table[token] for token in tokens).decode())
    gpu.finish()
    segments.close(model.path)


def test_a_full_batch_of_grammars(
    gpu: GpuParts, segments: PinnedSegments, folder: Path, grammar: Grammar
) -> None:
    """Prints what a step takes with and without; it is a matter of the model's size, so no limit
    is asserted (benchmarks/structured.py measures a real model)."""
    make(folder, "llama")
    model = LateModel(folder, 1024, device=gpu.device, open_=segments.open).load_all()
    took_s: dict[str, float] = {}
    for name, one in (("free", None), ("held", grammar)):
        loop = Loop(gpu, model, 2)
        names = [f"{name}{i}" for i in range(32)]
        for i, request in enumerate(names):
            how = Sampling(seed=i, temperature=1.0, stop_token_ids=ENDS if one else (), grammar=one)
            loop.submit(request, PROMPT[i : i + 16], 32, how)
        begun_s = time.monotonic()
        loop.finish(*names)
        took_s[name] = time.monotonic() - begun_s
        assert all(len(loop.tokens(request)) > 16 for request in names)
        loop.grammars.close()
    print({name: f"{seconds / 32 * 1e3:.2f} ms a step" for name, seconds in took_s.items()})  # noqa: T201
    gpu.finish()
    segments.close(model.path)


def awaited(region: Region) -> AwaitedMasks:
    words = torch.from_numpy(region.words)
    return AwaitedMasks(words, region.address, PLACES_AT, HEAD_WORDS, *region.masks.shape)


def test_the_stream_waits_and_the_host_does_not(gpu: GpuParts) -> None:
    region = gpu.masks.take(3, 40)
    assert region is not None
    region.place([1, -1, 0, 2])
    only = RowMasks.when_ready(awaited(region), 4, gpu.device)
    over = torch.cuda.Event()
    over.record()
    time.sleep(0.05)
    assert not over.query()
    region.masks[:] = [[7], [8], [9]]
    region.words[0] = 1
    over.synchronize()
    assert only.places.tolist() == [1, -1, 0, 2]
    assert only.masks.tolist() == [[7] * 40, [8] * 40, [9] * 40]


@pytest.mark.parametrize("ends", [False, True])
def test_nothing_waits_for_ever(
    gpu: GpuParts, segments: PinnedSegments, folder: Path, grammar: Grammar, ends: bool
) -> None:
    """A grammar process stands still, or ends. All requests have the tokens that they would have,
    those with a grammar later. The slice can wait for its GPU."""
    make(folder, "llama")
    model = LateModel(folder, 1024, device=gpu.device, open_=segments.open).load_all()
    how = Sampling(seed=3, temperature=1.0, stop_token_ids=ENDS, grammar=grammar)
    other = Sampling(seed=1, temperature=1.0)
    alone = Loop(gpu, model, 2)
    alone.submit("held", PROMPT[:40], 200, how)
    alone.submit("free", OTHER[:30], 60, other)
    alone.finish("held", "free")
    alone.grammars.close()
    loop = Loop(gpu, model, 2)
    loop.submit("held", PROMPT[:40], 200, how)
    loop.submit("free", OTHER[:30], 60, other)
    while len(loop.tokens("held")) < 5:
        loop.tick()
    pid = loop.grammars.of(grammar, model.config.vocab).pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    for _ in range(20):
        loop.tick()  # a step now waits, and some of these may launch the next one
    if ends:
        os.kill(pid, signal.SIGKILL)
    began_s = time.monotonic()
    gpu.finish()
    assert time.monotonic() - began_s < memory._PATIENCE_S + 1.0
    loop.finish("free")
    assert loop.tokens("free") == alone.tokens("free")
    assert loop.ended("held") is None
    assert loop.guides.waited == 1
    if not ends:
        os.kill(pid, signal.SIGCONT)
    while not (prepared := loop.executor.poll().prepared):
        assert time.monotonic() - began_s < 60.0
    loop.add(*prepared)
    loop.finish("held")
    assert loop.tokens("held") == alone.tokens("held")
    loop.grammars.close()
    gpu.finish()
    segments.close(model.path)


def test_a_step_that_fails_beside_a_wait(
    gpu: GpuParts, segments: PinnedSegments, folder: Path, grammar: Grammar
) -> None:
    """What a failed step is built anew from waits for the GPU, which waits for masks."""
    make(folder, "llama")
    model = LateModel(folder, 1024, device=gpu.device, open_=segments.open).load_all()
    how = Sampling(seed=3, temperature=1.0, stop_token_ids=ENDS, grammar=grammar)
    loop = Loop(gpu, model, 2)
    loop.submit("held", PROMPT[:40], 30, how)
    while len(loop.tokens("held")) < 5:
        loop.tick()
    before = loop.tokens("held")
    gpu.renew()
    loop.finish("held")
    tokens = loop.tokens("held")
    assert tokens[: len(before)] == before
    assert loop.ended("held") in (FinishReason.LENGTH, FinishReason.STOP)
    loop.grammars.close()
    gpu.finish()
    segments.close(model.path)
