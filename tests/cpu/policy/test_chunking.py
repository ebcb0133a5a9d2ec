"""The smallest chunk that is in time."""

from hypothesis import given
from hypothesis import strategies as st

from c2cserve.core.events import ChunkCost
from c2cserve.policy.baselines.c2cserve.chunking import smallest_chunk

SIZES = (128, 256, 512, 1024, 2048, 4096)


def profile(weights_s: float, token_s: float) -> list[ChunkCost]:
    """A slice on which weights stream in `weights_s`, beside the math or after it."""
    return [ChunkCost(n, max(weights_s, n * token_s), 0.0) for n in SIZES]


slices = st.builds(profile, st.floats(1e-3, 0.3), st.floats(1e-6, 1e-3))
prompts, targets = st.integers(1, 16_000), st.floats(1e-2, 10.0)


@given(slices, prompts, targets)
def test_what_is_chosen_is_in_time_and_the_smallest(
    lines: list[ChunkCost], prompt: int, ttft_s: float
) -> None:
    chosen = smallest_chunk(reversed(lines), prompt, ttft_s)
    for line in lines:
        good = line.step_s <= ttft_s / -(-prompt // line.tokens)
        if line.tokens == chosen:
            assert good
        elif good:
            assert chosen is not None
            assert chosen < line.tokens


@given(slices, prompts, targets, st.floats(1.0, 4.0))
def test_more_time_never_needs_a_larger_chunk(
    lines: list[ChunkCost], prompt: int, ttft_s: float, more: float
) -> None:
    strict = smallest_chunk(lines, prompt, ttft_s)
    loose = smallest_chunk(lines, prompt, ttft_s * more)
    if strict is not None:
        assert loose is not None
        assert loose <= strict


@given(slices, prompts, st.floats(-1.0, 0.0))
def test_when_it_is_too_late_no_chunk_helps(
    lines: list[ChunkCost], prompt: int, ttft_s: float
) -> None:
    assert smallest_chunk(lines, prompt, ttft_s) is None


def test_a_slow_link_asks_for_large_chunks() -> None:
    fast, slow = profile(0.01, 1e-5), profile(0.2, 1e-5)
    assert smallest_chunk(fast, 4096, 0.5) == 128
    assert smallest_chunk(slow, 4096, 0.5) == 2048
    assert smallest_chunk(slow, 4096, 0.3) == 4096
