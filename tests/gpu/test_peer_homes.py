"""Weights copied into a neighbour's HBM: the same bits as out of host memory, read over NVLink."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from engine_case import VOCAB, make, no_sampler, ours_at, shared_folder
from tiny import Ours
from torch import Tensor

from c2cserve.engine.gpu.peers import open_peers
from c2cserve.engine.gpu.segments import PinnedSegments
from c2cserve.engine.gpu.setup import GpuParts, open_gpu
from c2cserve.policy.weights.hbm_residency import Residency
from c2cserve.policy.weights.lending import Lending
from c2cserve.transfer.gpus import engine_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a neighbour"),
]

LENT_BYTES = 64 << 20
PROMPT = torch.randint(3, VOCAB, (300,), generator=torch.Generator().manual_seed(5)).tolist()


@pytest.fixture
def gpu() -> Iterator[GpuParts]:
    before = torch.cuda.current_stream()
    with torch.no_grad():
        peers = open_peers(engine_of((0, 1)), 0, [1], LENT_BYTES, Lending(LENT_BYTES))
        yield open_gpu(
            0, 256 << 20, no_sampler, profile="assumed", cache_policy=Residency(256 << 20),
            peers=peers,
        )  # fmt: skip
    torch.cuda.synchronize()
    torch.cuda.set_stream(before)


@pytest.fixture
def segments(gpu: GpuParts) -> Iterator[PinnedSegments]:
    assert gpu.peers is not None
    held = PinnedSegments(peers=gpu.peers.pool)
    yield held
    torch.cuda.synchronize()
    held.close_all()


@pytest.fixture
def folder() -> Iterator[Path]:
    with shared_folder() as path:
        yield path


def attach(gpu: GpuParts, segments: PinnedSegments, folder: Path, case: str) -> Ours:
    make(folder, case)
    ours = ours_at(folder, "host", gpu, segments)
    gpu.warm(ours.config)
    segment = segments.open(folder / "segment")
    assert gpu.cache is not None
    gpu.cache.add("m", segment.data.ctypes.data, segment.data.nbytes)
    segments.close(folder / "segment")
    return ours


def talk(gpu: GpuParts, ours: Ours, seq: int) -> list[Tensor]:
    """Prefill by cuBLAS and by our own kernels, and decoding, twice by a graph."""
    assert gpu.cache is not None
    gpu.cache.begin_step("m", float(seq), None)  # KV has all of the arena: nothing is kept
    logits = ours.step([(seq, PROMPT[:200], 0)])
    logits += ours.step([(seq, PROMPT[200:230], 200)])
    for at in range(230, 234):
        logits += ours.step([(seq, [PROMPT[at]], at)])
    return [one.cpu() for one in logits]


@pytest.mark.parametrize("case", ["llama", "qwen3-tied", "qwen3-moe"])
def test_the_same_bits_from_a_neighbour(
    gpu: GpuParts, segments: PinnedSegments, folder: Path, case: str
) -> None:
    peers, cache = gpu.peers, gpu.cache
    assert peers is not None
    assert cache is not None
    ours = attach(gpu, segments, folder, case)
    at_home = talk(gpu, ours, 0)
    streamed = cache.counts.streamed_bytes
    assert cache.counts.peer_bytes == 0, "a slice that does not look reads at home"
    deadline = time.monotonic() + 20
    while peers.pool.bytes < 0.9 * streamed / 6:  # six passes
        assert time.monotonic() < deadline
        time.sleep(0.01)
    peers.refresh()
    there = talk(gpu, ours, 1)
    for one, other in zip(at_home, there, strict=True):
        assert torch.equal(one, other)
    read = cache.counts.streamed_bytes - streamed
    assert cache.counts.peer_bytes == read, "every matrix"
    gpu.finish()
    cache.forget("m")
    segments.close(folder / "segment")
    assert peers.pool.bytes == 0


def test_another_model_at_the_same_addresses_is_itself(
    gpu: GpuParts, segments: PinnedSegments, folder: Path
) -> None:
    """Segments come and go: what was copied of one is never taken for another's."""
    peers, cache = gpu.peers, gpu.cache
    assert peers is not None
    assert cache is not None
    answers: dict[int, list[Tensor]] = {}
    for turn in range(6):
        place = folder / str(turn)
        place.mkdir()
        ours = attach(gpu, segments, place, ("llama", "qwen2")[turn % 2])
        peers.refresh()
        if turn >= 2:
            time.sleep(0.2)  # copies are made
            peers.refresh()
        logits = talk(gpu, ours, 0)
        for one, other in zip(logits, answers.setdefault(turn % 2, logits), strict=True):
            assert torch.equal(one, other)
        gpu.finish()
        cache.forget("m")
        segments.close(place / "segment")
    assert cache.counts.peer_bytes > 0
