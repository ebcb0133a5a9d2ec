"""Tokens drawn on the GPU against the CPU sampler's, which draws them from the same stream."""

from dataclasses import replace

import pytest
import torch
from example_counts import few
from interpreted import DEVICE
from triton_case import noise

from c2cserve.grammars.memory import HEAD_WORDS, PLACES_AT, MaskMemory
from c2cserve.kernels.cpu_ops import CpuOps
from c2cserve.kernels.gpu.sampling.greedy import greedy, greedy_of
from c2cserve.kernels.gpu.sampling.masks import RowMasks
from c2cserve.kernels.gpu.sampling.sample import asked_of, sample
from c2cserve.kernels.ops import AwaitedMasks, RowSampling
from c2cserve.memory.pinning import pin_array

WAYS = [
    RowSampling(5, 0),
    RowSampling(5, 1, temperature=0.6),
    RowSampling(5, 2, temperature=3.0, top_k=1),
    RowSampling(5, 3, temperature=1.5, top_k=40),
    RowSampling(5, 4, top_p=0.9),
    RowSampling(5, 5, top_p=0.3),
    RowSampling(5, 6, temperature=2.0, top_p=0.01),
    RowSampling(5, 7, temperature=2.0, min_p=0.2),
    RowSampling(5, 8, temperature=2.0, min_p=0.01, top_k=50, top_p=0.8),
    RowSampling(5, 9, temperature=1e-42),
    RowSampling(5, 10, temperature=0.0),
    RowSampling(5, 11, top_k=10**6),
]
SEEDS = few(12, 5) if DEVICE.type == "cpu" else 12
"""Rows of a batch that differ by their seed only."""


def drawn(logits: torch.Tensor, rows: list[RowSampling]) -> tuple[list[int], list[float]]:
    return greedy_of(sample(logits.to(DEVICE), asked_of(rows).to(DEVICE)).cpu())


@pytest.mark.filterwarnings("ignore:overflow encountered")  # numpy's, of the interpreter
@pytest.mark.parametrize(
    ("vocab", "dtype"),
    [(1, torch.float16), (160, torch.float16), (160, torch.float32), (9000, torch.bfloat16)],
)
def test_agrees_with_the_cpu_sampler(vocab: int, dtype: torch.dtype) -> None:
    logits = (noise(len(WAYS), vocab, seed=vocab) * 4).to(dtype)
    ids, logprobs = drawn(logits, WAYS)
    want = CpuOps(1).sample(logits.float(), [_told(row) for row in WAYS])
    assert ids == want.ids
    assert logprobs == pytest.approx(want.logprobs, rel=1e-4, abs=1e-4)


def _told(row: RowSampling) -> RowSampling:
    return RowSampling(
        row.seed, row.position, row.temperature, row.top_p, row.top_k, row.min_p, top_logprobs=0
    )


@pytest.mark.parametrize(
    "way",
    [{"top_k": 7}, {"top_p": 0.5}, {"top_k": 30, "top_p": 0.6}, {"min_p": 0.3}],
    ids=str,
)
def test_many_draws_of_few_values(way: dict) -> None:
    """Rows full of equal logits: the border is in the middle of them."""
    logits = (noise(1, 300, seed=2).round() * 0.5).bfloat16().expand(SEEDS, -1).contiguous()
    rows = [RowSampling(seed, 3, **way) for seed in range(SEEDS)]
    ids, _ = drawn(logits, rows)
    want = CpuOps(1).sample(logits.float(), rows).ids
    assert ids == want
    assert len(set(ids)) > SEEDS // 4


@pytest.mark.parametrize(
    "way",
    [
        {"top_k": 100, "min_p": 0.1},
        {"top_k": 100, "min_p": 0.1, "top_p": 0.7},
        {"top_k": 100, "temperature": 0.02},
        {"top_k": 100, "temperature": 0.02, "top_p": 0.95},
    ],
    ids=str,
)
def test_more_are_asked_for_than_have_any_weight(way: dict) -> None:
    """min-p, or a low temperature, leaves fewer tokens than top-k would."""
    logits = (noise(1, 300, seed=4) * 4).bfloat16().expand(SEEDS, -1).contiguous()
    logits[:, 7] = logits.max()
    rows = [RowSampling(seed, 3, **way) for seed in range(SEEDS)]
    ids, _ = drawn(logits, rows)
    assert ids == CpuOps(1).sample(logits.float(), rows).ids
    assert len(set(ids)) > 1


def test_negative_zero_is_zero() -> None:
    logits = torch.zeros(8, 40).bfloat16()
    logits[:, ::2] = -0.0
    rows = [RowSampling(seed, 0, top_k=3) for seed in range(8)]
    ids, _ = drawn(logits, rows)
    assert ids == CpuOps(1).sample(logits.float(), rows).ids
    assert set(ids) <= {0, 1, 2}


@pytest.mark.filterwarnings("ignore:invalid value")  # numpy's, of the interpreter
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_row_that_is_not_numbers_is_found(bad: float) -> None:
    logits = noise(3, 9000).bfloat16()
    logits[1, 8999] = bad
    ids, _ = drawn(logits, [RowSampling(1, i, top_p=0.9) for i in range(3)])
    assert ids[1] == -1
    assert min(ids[0], ids[2]) >= 0


def test_the_stream_is_the_cpu_samplers() -> None:
    """Whatever the seed and position: over equal logits the drawn id is the stream's share."""
    places = [(0, 0), (1, 0), (0, 1), (2**64 - 1, 5), (-3, 2**31), (2**40 + 7, 2**20)]
    rows = [RowSampling(seed, position) for seed, position in places]
    logits = torch.zeros(len(rows), 4096)
    ids, _ = drawn(logits.bfloat16(), rows)
    assert ids == CpuOps(1).sample(logits, rows).ids
    known = ((0x6627E8D5 << 21) ^ (0xE169C58D >> 11)) / 2**53
    assert ids[0] == int(known * 4096), "Random123's known answer for counter 0, key 0"


def masks_of(vocab: int, rows: int) -> list[torch.Tensor | None]:
    """Masks of few tokens, of one, of none, and rows without a mask."""
    words = -(-vocab // 32)
    masks: list[torch.Tensor | None] = []
    for row in range(rows):
        mask = torch.zeros(words, dtype=torch.int32)
        for token in {row * 31 % vocab, vocab - 1, row * 7 % vocab} if row % 4 else {vocab - 1}:
            mask[token // 32] |= -(1 << 31) if token % 32 == 31 else 1 << token % 32
        masks.append(None if row % 3 == 2 else mask)
    return masks


@pytest.mark.filterwarnings("ignore:overflow encountered")  # numpy's, of the interpreter
@pytest.mark.parametrize(("vocab", "dtype"), [(160, torch.float32), (9001, torch.bfloat16)])
def test_only_what_a_mask_allows_is_sampled(vocab: int, dtype: torch.dtype) -> None:
    logits = (noise(len(WAYS), vocab, seed=vocab) * 4).to(dtype)
    masks = masks_of(vocab, len(WAYS))
    told = [replace(_told(row), mask=mask) for row, mask in zip(WAYS, masks, strict=True)]
    want = CpuOps(1).sample(logits.float(), told)
    only = RowMasks.of(masks, DEVICE)
    found = sample(logits.to(DEVICE), asked_of(WAYS).to(DEVICE), only)
    ids, logprobs = greedy_of(found.cpu())
    assert ids == want.ids
    assert logprobs == pytest.approx(want.logprobs, rel=1e-4, abs=1e-4)
    likeliest = [replace(row, temperature=0.0) for row in told]
    want = CpuOps(1).sample(logits.float(), likeliest)
    ids, logprobs = greedy_of(greedy(logits.to(DEVICE), only).cpu())
    assert ids == want.ids
    assert logprobs == pytest.approx(want.logprobs, rel=1e-4, abs=1e-4)


def test_masks_that_are_awaited_are_those_that_were_written() -> None:
    masks = masks_of(9001, 7)
    given = [mask for mask in masks if mask is not None]
    on_gpu = DEVICE.type == "cuda"
    memory = MaskMemory()
    memory.register(lambda data: pin_array(data).address if on_gpu else data.ctypes.data)
    region = memory.take(len(given), len(given[0]))
    assert region is not None
    region.masks[:] = torch.stack(given).numpy()
    region.place([sum(one is not None for one in masks[:i]) if mask is not None else -1
                  for i, mask in enumerate(masks)])  # fmt: skip
    region.words[0] = 1
    words = torch.from_numpy(region.words)
    awaited = AwaitedMasks(words, region.address, PLACES_AT, HEAD_WORDS, *region.masks.shape)
    only, want = RowMasks.when_ready(awaited, len(masks), DEVICE), RowMasks.of(masks, DEVICE)
    assert want is not None
    assert torch.equal(only.places, want.places)
    assert torch.equal(only.masks, want.masks)


def test_rows_without_a_mask_have_the_same_bits_beside_rows_with_one() -> None:
    logits = (noise(4, 9000, seed=9) * 4).bfloat16()
    logits[3] = 0
    logits[3, 5] = 90.0  # its probability is 1
    masks = [None, *masks_of(9000, 2), None]
    only = RowMasks.of(masks, DEVICE)
    rows = [RowSampling(1, i) for i in range(4)]
    asked = asked_of(rows).to(DEVICE)
    for alone, beside in (
        (greedy(logits.to(DEVICE)), greedy(logits.to(DEVICE), only)),
        (sample(logits.to(DEVICE), asked), sample(logits.to(DEVICE), asked, only)),
    ):
        assert torch.equal(alone[:, [0, 3]], beside[:, [0, 3]])


def test_a_mask_that_allows_nothing() -> None:
    logits = noise(2, 9000).bfloat16()
    nothing = torch.zeros(282, dtype=torch.int32)
    only = RowMasks.of([nothing, None], DEVICE)
    rows = [RowSampling(1, 0), RowSampling(1, 1)]
    ids, _ = greedy_of(sample(logits.to(DEVICE), asked_of(rows).to(DEVICE), only).cpu())
    also, _ = greedy_of(greedy(logits.to(DEVICE), only).cpu())
    assert ids[0] == also[0] == -1
    assert min(ids[1], also[1]) >= 0
    told = [replace(row, mask=mask) for row, mask in zip(rows, [nothing, None], strict=True)]
    assert CpuOps(1).sample(logits.float(), told).ids[0] == -1
