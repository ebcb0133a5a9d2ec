"""Our decoder against transformers, on random models of every architecture."""

import random
import statistics
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tiny import CASES, Ours, make_checkpoint, make_model

PROMPT = torch.randint(3, 160, (70,), generator=torch.Generator().manual_seed(5)).tolist()


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).abs().max() / want.abs().max())


def rms(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).square().mean().sqrt() / want.square().mean().sqrt())


@torch.inference_mode()
def truth(model: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
    return model(torch.tensor([tokens])).logits[0].float()


@pytest.mark.parametrize("case", CASES)
def test_prefill_chunks_ragged_decode_and_prefix_reuse(tmp_path: Path, case: str) -> None:
    model = make_checkpoint(tmp_path, case)
    if case == "llama-dynamic":
        # Its table is made for the longest context served; transformers' for the current one,
        # which is the same up to the trained length.
        assert len(PROMPT) < model.config.max_position_embeddings
    want = truth(model, PROMPT)
    ours = Ours(tmp_path)
    (whole,) = ours.step([(0, PROMPT, 0)])
    assert relative(whole, want) < 1e-4
    # Chunked, ragged: two other sequences run beside it.
    other = PROMPT[::-1]
    first, beside = ours.step([(1, PROMPT[:19], 0), (2, other[:33], 0)])
    assert torch.equal(first, whole[:19]), "chunking changes nothing, not a bit"
    assert relative(beside, truth(model, other)[:33]) < 1e-4
    second, beside = ours.step([(1, PROMPT[19:60], 19), (2, other[33:34], 33)])
    assert torch.equal(second, whole[19:60])
    for p in range(60, 70):  # decode beside another decode
        one, _ = ours.step([(1, PROMPT[p : p + 1], p), (2, other[p - 26 : p - 25], p - 26)])
        assert torch.equal(one, whole[p : p + 1])
    # Prefix reuse: sequence 3 begins with sequence 0's first four full blocks.
    (rest,) = ours.step([(3, PROMPT[64:], 64)], shared={3: 0})
    assert torch.equal(rest, whole[64:])


@st.composite
def fields(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """Any small model of any architecture."""
    name = draw(st.sampled_from(["Llama", "Mistral", "Qwen2", "Qwen3", "Mixtral", "Qwen3Moe"]))
    kv_heads, group = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    head_dim = 2 * draw(st.integers(2, 20))
    hidden = kv_heads * group * draw(st.integers(1, 12))
    config: dict[str, Any] = {
        "vocab_size": draw(st.integers(20, 120)), "hidden_size": hidden, "head_dim": head_dim,
        "num_attention_heads": kv_heads * group, "num_key_value_heads": kv_heads,
        "num_hidden_layers": draw(st.integers(1, 3)), "max_position_embeddings": 256,
        "intermediate_size": draw(st.integers(1, 90)), "eos_token_id": 1,
        "rms_norm_eps": draw(st.sampled_from([1e-6, 1e-5])),
        "tie_word_embeddings": draw(st.booleans()), "pad_token_id": 0,
        "rope_parameters": {"rope_type": "default", "rope_theta": draw(st.floats(1e3, 1e6))},
    }  # fmt: skip
    if name in ("Llama", "Qwen3", "Qwen3Moe"):
        config["attention_bias"] = draw(st.booleans())
    if name in ("Mistral", "Mixtral"):
        config["sliding_window"] = draw(st.none() | st.integers(2, 80))
    if name in ("Qwen2", "Qwen3"):
        config |= {
            "use_sliding_window": draw(st.booleans()), "sliding_window": draw(st.integers(2, 80)),
            "max_window_layers": draw(st.integers(0, 3)),
        }  # fmt: skip
    if name in ("Mixtral", "Qwen3Moe"):
        experts = draw(st.integers(1, 7))
        config["num_experts_per_tok"] = draw(st.integers(1, experts))
        config["num_local_experts" if name == "Mixtral" else "num_experts"] = experts
    if name == "Qwen3Moe":
        config |= {
            "moe_intermediate_size": draw(st.integers(1, 60)),
            "norm_topk_prob": draw(st.booleans()), "decoder_sparse_step": draw(st.integers(1, 3)),
            "mlp_only_layers": draw(st.lists(st.integers(0, 2), unique=True)),
        }  # fmt: skip
    return name, config


def check_random_model(model: tuple[str, dict[str, Any]], cuts: list[int]) -> None:
    """Prefill in chunks, then as a whole beside something else: transformers' logits both times."""
    with tempfile.TemporaryDirectory() as directory:
        theirs = make_model(Path(directory), *model, seed=len(cuts))
        vocab = model[1]["vocab_size"]
        tokens = [token % vocab for token in PROMPT]
        want, ours = truth(theirs, tokens), Ours(Path(directory))
        whole, _ = ours.step([(0, tokens, 0), (1, tokens[:5], 0)])
        assert relative(whole, want) < 1e-4
        edges = [0, *sorted(set(cuts)), len(tokens)]
        for begin, end in pairwise(edges):
            (part,) = ours.step([(2, tokens[begin:end], begin)])
            assert torch.equal(part, whole[begin:end])


@settings(max_examples=20, deadline=None)
@given(fields(), st.lists(st.integers(1, 69), max_size=4))
def test_random_models(model: tuple[str, dict[str, Any]], cuts: list[int]) -> None:
    check_random_model(model, cuts)


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(max_examples=examples(500), deadline=None)
@given(fields(), st.lists(st.integers(1, 69), max_size=4))
def test_many_random_models(model: tuple[str, dict[str, Any]], cuts: list[int]) -> None:
    check_random_model(model, cuts)


@pytest.mark.parametrize(
    "case", ["llama", "mistral-window", "qwen2", "qwen3-tied", "mixtral", "qwen3-moe"]
)
def test_greedy_is_identical_over_64_steps(tmp_path: Path, case: str) -> None:
    model = make_checkpoint(tmp_path, case)
    prompt = PROMPT[:21]
    with torch.inference_mode():
        want = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=64,
            min_new_tokens=64, do_sample=False,
        )[0, len(prompt) :].tolist()  # fmt: skip
    ours, tokens = Ours(tmp_path), list(prompt)
    (logits,) = ours.step([(0, tokens, 0)])
    for _ in range(64):
        logits[-1, 1] = -torch.inf  # min_new_tokens bans EOS in transformers too
        tokens.append(int(logits[-1].argmax()))
        (logits,) = ours.step([(0, tokens[-1:], len(tokens) - 1)])
    assert tokens[len(prompt) :] == want


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", ["llama", "qwen3-tied"])
def test_half_precision_is_no_worse_than_transformers(
    tmp_path: Path, case: str, dtype: torch.dtype
) -> None:
    model = make_checkpoint(tmp_path, case, dtype)
    theirs = truth(model, PROMPT)
    exact = truth(model.float(), PROMPT)
    (ours,) = Ours(tmp_path).step([(0, PROMPT, 0)])
    assert rms(ours, exact) < rms(theirs, exact) * 1.1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_sparse_model_in_half_precision_is_no_worse_over_many_prompts(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    """Rounding chooses another expert now and then, here as in transformers. So a single prompt
    tells little, and what is typical is compared."""
    model = make_checkpoint(tmp_path, "mixtral", dtype)
    wide, ours = make_checkpoint(tmp_path, "mixtral", dtype).float(), Ours(tmp_path)
    ratios: list[float] = []
    for seed in range(9):
        rng = random.Random(seed)
        prompt = [rng.randrange(2, 90) for _ in range(40)]
        exact = truth(wide, prompt)
        (logits,) = ours.step([(seed, prompt, 0)])
        ratios.append(rms(logits, exact) / rms(truth(model, prompt), exact))
    assert statistics.median(ratios) < 1.1


def test_weights_are_converted_to_the_dtype_asked_for(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, "llama")
    ours = Ours(tmp_path, dtype="bfloat16")
    (logits,) = ours.step([(0, PROMPT, 0)])
    # The weights are the same numbers then; what differs is the rounding of cached keys and values.
    assert 1e-5 < rms(logits, truth(model.bfloat16().float(), PROMPT)) < 0.02


def test_sharded(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, "qwen2", max_shard_size="60KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    (logits,) = Ours(tmp_path).step([(0, PROMPT, 0)])
    assert relative(logits, truth(model, PROMPT)) < 1e-4


@pytest.mark.parametrize("case", ["mixtral", "qwen3-moe"])
def test_fused_experts_of_newer_checkpoints(tmp_path: Path, case: str) -> None:
    model = make_checkpoint(tmp_path, case)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    save_file(fuse_experts(tensors, case), path)
    (logits,) = Ours(tmp_path).step([(0, PROMPT, 0)])
    assert relative(logits, truth(model, PROMPT)) < 1e-4


def fuse_experts(tensors: dict[str, torch.Tensor], case: str) -> dict[str, torch.Tensor]:
    """One stack per layer instead of a tensor per expert."""
    gate, up, down = (
        ("w1", "w3", "w2") if case == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    )
    fused = {n: t for n, t in tensors.items() if ".experts." not in n}
    blocks = sorted({n.split(".experts.")[0] for n in tensors if ".experts." in n})
    for block in blocks:
        count = len({n for n in tensors if n.startswith(f"{block}.experts.") and f".{gate}." in n})

        def stack(name: str, block: str = block, count: int = count) -> torch.Tensor:
            return torch.stack(
                [tensors[f"{block}.experts.{e}.{name}.weight"] for e in range(count)]
            )

        target = block.replace("block_sparse_moe", "mlp")
        fused[f"{target}.experts.gate_up_proj"] = torch.cat((stack(gate), stack(up)), 1)
        fused[f"{target}.experts.down_proj"] = stack(down)
    return {n.replace("block_sparse_moe", "mlp"): t.contiguous() for n, t in fused.items()}
