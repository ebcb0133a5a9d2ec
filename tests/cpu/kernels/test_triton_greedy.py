"""The GPU's greedy choice against the CPU sampler's."""

import pytest
import torch
from interpreted import DEVICE
from triton_case import noise

from c2cserve.kernels.cpu_ops import CpuOps
from c2cserve.kernels.gpu.sampling.greedy import greedy, greedy_of
from c2cserve.kernels.ops import RowSampling

GREEDY = RowSampling(seed=0, position=0, temperature=0.0, top_logprobs=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("vocab", [1, 160, 8192, 20000])
def test_agrees_with_the_cpu_sampler(vocab: int, dtype: torch.dtype) -> None:
    logits = (noise(3, vocab) * 4).to(dtype)
    ids, logprobs = greedy_of(greedy(logits.to(DEVICE)).cpu())
    want = CpuOps(1).sample(logits.float(), [GREEDY] * 3)
    assert ids == want.ids
    assert logprobs == pytest.approx(want.logprobs, rel=1e-4, abs=1e-5)


def test_the_lowest_of_equal_ones() -> None:
    logits = torch.zeros(2, 20000, dtype=torch.bfloat16)
    logits[0, [7000, 9000, 19999]] = 3.0
    logits[1, 19999] = 1.0
    ids, _ = greedy_of(greedy(logits.to(DEVICE)).cpu())
    assert ids == [7000, 19999]


@pytest.mark.filterwarnings("ignore:invalid value")  # numpy's, of the interpreter
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_numbers_is_found(bad: float) -> None:
    logits = noise(3, 9000).bfloat16()
    logits[1, 8999] = bad
    ids, _ = greedy_of(greedy(logits.to(DEVICE)).cpu())
    assert ids[1] == -1
    assert min(ids[0], ids[2]) >= 0
