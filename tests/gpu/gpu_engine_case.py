"""A checkpoint in segments of the pool, and a GPU slice's engine, for tests of GPUs."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from engine_case import (
    VOCAB,
    no_sampler,
    shared_folder,
)

from c2cserve.engine.gpu.segments import PinnedSegments
from c2cserve.engine.gpu.setup import GpuParts, open_gpu

PROMPT = torch.randint(3, VOCAB, (300,), generator=torch.Generator().manual_seed(5)).tolist()
OTHER = PROMPT[::-1]
KV_BYTES = 1 << 30


@pytest.fixture(scope="module")
def gpu() -> Iterator[GpuParts]:
    before = torch.cuda.current_stream()
    with torch.no_grad():
        yield open_gpu(0, KV_BYTES, no_sampler, profile="assumed")
    torch.cuda.synchronize()
    torch.cuda.set_stream(before)


@pytest.fixture
def folder() -> Iterator[Path]:
    with shared_folder() as path:
        yield path


@pytest.fixture
def segments(gpu: GpuParts) -> Iterator[PinnedSegments]:
    held = PinnedSegments()
    yield held
    torch.cuda.synchronize()
    held.close_all()
