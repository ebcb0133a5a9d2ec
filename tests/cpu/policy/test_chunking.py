"""The smallest chunk that is in time; none that asks more than the slice has."""

from hypothesis import given
from hypothesis import strategies as st

from c2cserve.policy.baselines.c2cserve.chunking import ChunkCost, hbm_demand, smallest_chunk

SIZES = (128, 256, 512, 1024, 2048, 4096)


def profile(weights_s: float, token_s: float, token_bytes: float) -> list[ChunkCost]:
    """A slice on which weights stream in `weights_s`, beside the math or after it."""
    return [
        ChunkCost(n, max(weights_s, n * token_s), n * token_bytes, n * token_s) for n in SIZES
    ]  # fmt: skip


slices = st.builds(profile, st.floats(1e-3, 0.3), st.floats(1e-6, 1e-3), st.floats(1e4, 1e8))
prompts, targets, rates = st.integers(1, 16_000), st.floats(1e-2, 10.0), st.floats(1e9, 8e12)


@given(slices, prompts, targets, rates)
def test_what_is_chosen_is_in_time_within_budget_and_the_smallest(
    lines: list[ChunkCost], prompt: int, ttft_s: float, rate: float
) -> None:
    chosen = smallest_chunk(reversed(lines), prompt, ttft_s, rate)
    for line in lines:
        chunk_s = ttft_s / -(-prompt // line.tokens)
        good = (
            line.step_s <= chunk_s
            and line.compute_s <= chunk_s
            and hbm_demand(line, chunk_s) <= rate
        )
        if line.tokens == chosen:
            assert good
        elif good:
            assert chosen is not None
            assert chosen < line.tokens


@given(slices, prompts, targets, rates, st.floats(1.0, 4.0))
def test_more_time_never_needs_a_larger_chunk(
    lines: list[ChunkCost], prompt: int, ttft_s: float, rate: float, more: float
) -> None:
    strict = smallest_chunk(lines, prompt, ttft_s, rate)
    loose = smallest_chunk(lines, prompt, ttft_s * more, rate)
    if strict is not None:
        assert loose is not None
        assert loose <= strict


@given(slices, prompts, rates, st.floats(-1.0, 0.0))
def test_when_it_is_too_late_no_chunk_helps(
    lines: list[ChunkCost], prompt: int, rate: float, ttft_s: float
) -> None:
    assert smallest_chunk(lines, prompt, ttft_s, rate) is None


def test_the_papers_formula() -> None:
    # Section 3.2.1's GEMM, weight-stationary with K in tiles of 64: O is added to 64 times.
    moved = 10240 * 2 * (4096 + 64 * 16384)
    assert hbm_demand(ChunkCost(10240, 0.1, moved, 0.1), 0.1) == moved / 0.1


def test_a_slow_link_asks_for_large_chunks_and_a_slow_hbm_for_patience() -> None:
    fast, slow = profile(0.01, 1e-5, 1e6), profile(0.2, 1e-5, 1e6)
    assert smallest_chunk(fast, 4096, 0.5, 4e12) == 128
    assert smallest_chunk(slow, 4096, 0.5, 4e12) == 2048
    assert smallest_chunk(slow, 4096, 0.5, 1e9) is None
