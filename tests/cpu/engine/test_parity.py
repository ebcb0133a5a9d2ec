"""Our decoder against transformers, on random models of every architecture."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import CASES, Ours, make_checkpoint

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
@pytest.mark.parametrize("case", ["llama", "qwen3-tied", "mixtral"])
def test_half_precision_is_no_worse_than_transformers(
    tmp_path: Path, case: str, dtype: torch.dtype
) -> None:
    model = make_checkpoint(tmp_path, case, dtype)
    model.set_experts_implementation("eager")  # the grouped one wants other sizes
    theirs = truth(model, PROMPT)
    exact = truth(model.float(), PROMPT)
    (ours,) = Ours(tmp_path).step([(0, PROMPT, 0)])
    assert rms(ours, exact) < rms(theirs, exact) * 1.1


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
