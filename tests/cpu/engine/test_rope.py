"""Rotary tables against transformers', for every scaling and many parameters."""

from typing import Any

import pytest
import torch
import transformers
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from c2cserve.engine.models.config import parse_config
from c2cserve.engine.models.rope import RopeTables

DIM = 16


def config_dict(rope: dict[str, Any], max_position: int = 256) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 4 * DIM,
        "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 32,
        "rms_norm_eps": 1e-6, "max_position_embeddings": max_position, "rope_parameters": rope,
    }  # fmt: skip


def theirs(raw: dict[str, Any], length: int) -> tuple[torch.Tensor, torch.Tensor]:
    rope = LlamaRotaryEmbedding(transformers.LlamaConfig(**raw))
    cos, sin = rope(torch.zeros(1), torch.arange(length)[None])
    return cos[0, :, : DIM // 2], sin[0, :, : DIM // 2]


def assert_same(raw: dict[str, Any], length: int) -> None:
    ours = RopeTables(parse_config(raw), length).upto(length)
    for mine, other in zip(ours, theirs(raw, length), strict=True):
        assert mine.shape == (length, DIM // 2)
        torch.testing.assert_close(mine, other, atol=2e-5, rtol=0)


THETA = st.floats(1e3, 1e6)
FACTOR = st.floats(1.0, 32.0)


@settings(max_examples=12, deadline=None)
@given(THETA)
def test_plain(theta: float) -> None:
    assert_same(config_dict({"rope_type": "default", "rope_theta": theta}), 100)


@settings(max_examples=12, deadline=None)
@given(THETA, FACTOR)
def test_linear(theta: float, factor: float) -> None:
    assert_same(config_dict({"rope_type": "linear", "rope_theta": theta, "factor": factor}), 100)


@settings(max_examples=12, deadline=None)
@given(THETA, FACTOR, st.integers(8, 256))
def test_dynamic(theta: float, factor: float, max_position: int) -> None:
    """Ours is for the longest context served; theirs, at that length, is the same."""
    rope = {"rope_type": "dynamic", "rope_theta": theta, "factor": factor}
    assert_same(config_dict(rope, max_position), 256)


@settings(max_examples=20, deadline=None)
@given(THETA, FACTOR, st.floats(0.5, 2.0), st.floats(2.5, 8.0), st.integers(16, 4096))
def test_llama3(theta: float, factor: float, low: float, high: float, original: int) -> None:
    rope = {
        "rope_type": "llama3", "rope_theta": theta, "factor": factor, "low_freq_factor": low,
        "high_freq_factor": high, "original_max_position_embeddings": original,
    }  # fmt: skip
    assert_same(config_dict(rope), 200)


@settings(max_examples=examples(30), deadline=None)
@given(
    THETA, FACTOR, st.integers(32, 4096),
    st.fixed_dictionaries(
        {},
        optional={
            "attention_factor": st.floats(0.5, 2.0), "beta_fast": st.floats(16, 64),
            "beta_slow": st.floats(0.5, 2), "truncate": st.booleans(),
            "mscale": st.floats(0.5, 1.5), "mscale_all_dim": st.floats(0.5, 1.5),
        },
    ),
)  # fmt: skip
def test_yarn(theta: float, factor: float, original: int, options: dict[str, Any]) -> None:
    rope = {
        "rope_type": "yarn", "rope_theta": theta, "factor": factor,
        "original_max_position_embeddings": original, **options,
    }  # fmt: skip
    assert_same(config_dict(rope), 200)


DIVISORS = st.lists(st.floats(1.0, 40.0), min_size=DIM // 2, max_size=DIM // 2)


@pytest.mark.parametrize("length", [60, 200])
@settings(max_examples=10, deadline=None)
@given(DIVISORS, DIVISORS, st.none() | st.floats(1.0, 1.5))
def test_longrope(length: int, long: list[float], short: list[float], given: float | None) -> None:
    """The original length is 64: a longer service takes the long divisors."""
    rope: dict[str, Any] = {
        "rope_type": "longrope", "rope_theta": 1e4, "long_factor": long, "short_factor": short,
        "original_max_position_embeddings": 64,
    }  # fmt: skip
    assert_same(config_dict(rope if given is None else {**rope, "attention_factor": given}), length)


def test_tables_grow_without_changing() -> None:
    raw = config_dict({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}, 1000)
    tables = RopeTables(parse_config(raw), 9000)
    before = [table.clone() for table in tables.upto(100)]
    assert len(before[0]) < 9000, "most contexts are short"
    for length in (3000, 9000):
        after = tables.upto(length)
        assert len(after[0]) >= length
        assert all(torch.equal(a[: len(b)], b) for a, b in zip(after, before, strict=True))
