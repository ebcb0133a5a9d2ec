"""Whatever a config, a request or a machine is like: a worker survives, and says what is wrong."""

import dataclasses
import mmap
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from lane import GREEDY, Lane, LateModel
from published import PUBLISHED
from tiny import COMMON, Ours, make_checkpoint, make_model
from torch import Tensor

from c2cserve.core.actions import Direction, Drop, Move
from c2cserve.core.events import MoveDone
from c2cserve.core.request import FinishReason
from c2cserve.engine.cpu import arena
from c2cserve.engine.models.config import ConfigError, parse_config
from c2cserve.kernels.cpu_ops import CpuOps
from c2cserve.kernels.ops import RowSampling, SampledTokens

PROMPT = torch.randint(3, 160, (40,), generator=torch.Generator().manual_seed(11)).tolist()
LLAMA = PUBLISHED["llama-3.1-8b"]


def test_a_step_of_a_model_that_could_not_be_attached_fails(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    lane, model = Lane(), LateModel(tmp_path).load_all()
    lane.attach("m", model.decoder)
    lane.add("a", "m", PROMPT, 4)
    lane.executor.detach("m")
    assert "not attached" in lane.failed(("a", 0, 40))
    assert len(lane.executor) == 1


@pytest.mark.parametrize("direction", ["copy", "out", "in"])
def test_kv_of_a_model_that_is_detached_moves_no_more(tmp_path: Path, direction: Direction) -> None:
    """Its requests are about to be withdrawn: another slice could not map its weights."""
    make_checkpoint(tmp_path, "llama")
    lane = Lane()
    lane.attach("m", LateModel(tmp_path).load_all().decoder)
    lane.add("a", "m", PROMPT, 4)
    lane.executor.detach("m")
    lane.executor.submit(Move("a", direction, 0, (0,)))
    lane.executor.poll()
    assert lane.events[-1] == MoveDone("a", direction)
    lane.executor.submit(Drop("a"))
    assert len(lane.executor) == 0


class BadSampler(CpuOps):
    armed = True

    def sample(self, logits: Tensor, rows: Sequence[RowSampling]) -> SampledTokens:
        if self.armed:
            raise RuntimeError("no drawing today")
        return super().sample(logits, rows)


def test_drawing_that_fails_is_tried_again(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    ops = BadSampler(1)
    lane = Lane(ops)
    lane.attach("m", LateModel(tmp_path).load_all().decoder)
    lane.add("a", "m", PROMPT, 4)
    assert "no drawing today" in lane.failed(("a", 0, 40))
    ops.armed = False
    lane.add("b", "m", PROMPT, 4)
    lane.finish("a")
    lane.finish("b")
    assert lane.tokens("a") == lane.tokens("b")
    assert lane.ended("a") is FinishReason.LENGTH


def test_prompt_logprobs_once_though_preempted(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    lane = Lane()
    lane.attach("m", LateModel(tmp_path).load_all().decoder)
    asked = dataclasses.replace(GREEDY, prompt_logprobs=1)
    lane.add("whole", "m", PROMPT, 1, asked)
    lane.finish("whole")
    lane.add("a", "m", PROMPT, 1, asked)
    lane.step(("a", 0, 25))
    lane.preempt("a")
    lane.step(("a", 0, 10))
    lane.step(("a", 10, 20))
    lane.step(("a", 30, 10))
    assert lane.of("a")[0].prompt_logprobs == lane.of("whole")[0].prompt_logprobs


def test_arena_without_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    class Plain(mmap.mmap):
        def madvise(self, *_: int) -> None:
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(arena.mmap, "mmap", Plain)
    assert len(arena.make_arena(1 << 20)) == 1 << 20


def test_a_context_beyond_the_longest_fails_and_reads_nothing_beyond(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    lane = Lane()
    lane.attach("m", LateModel(tmp_path, max_context=32).load_all().decoder)
    lane.add("a", "m", PROMPT, 4)
    assert "at most 32" in lane.failed(("a", 0, 40))


def test_end_tokens_beyond_the_vocabulary_never_reach_the_sampler() -> None:
    raw = {**LLAMA, "eos_token_id": [2, 10**7, -1]}
    assert parse_config(raw).eos_token_ids == (2,)


@torch.inference_mode()
def test_qwen3_moe_windows_every_layer(tmp_path: Path) -> None:
    fields = {
        **COMMON,
        "num_experts_per_tok": 2,
        "num_experts": 4,
        "moe_intermediate_size": 44,
        "use_sliding_window": True,
        "sliding_window": 9,
        "max_window_layers": 2,
    }
    model = make_model(tmp_path, "Qwen3Moe", fields, 3)
    want = model(torch.tensor([PROMPT])).logits[0]
    (got,) = Ours(tmp_path).step([(0, PROMPT, 0)])
    assert float((got - want).abs().max() / want.abs().max()) < 1e-4


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"hidden_size": "many"}, "not a whole number"),
        ({"rope_scaling": [1]}, "wrong kind"),
        ({"num_attention_heads": 0}, "0 heads"),
        ({"vocab_size": 0}, "not positive"),
        ({"rope_scaling": {"type": "linear"}}, "needs 'factor'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "needs 'low_freq_factor'"),
        (
            {
                "rope_scaling": {
                    "rope_type": "longrope",
                    "short_factor": [1.0],
                    "long_factor": [1.0],
                }
            },
            "= 64 numbers",
        ),
        ({"head_dim": 1024}, "between 0 and 512"),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}},
            "partial_rotary_factor",
        ),
    ],
)
def test_nonsense_is_one_clear_line(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_config({**LLAMA, **change})


def test_more_experts_per_token_than_experts() -> None:
    with pytest.raises(ConfigError, match="9 experts per token out of 8"):
        parse_config({**PUBLISHED["mixtral-8x7b"], "num_experts_per_tok": 9})


def test_unknown_layer_types_are_refused() -> None:
    raw = {**PUBLISHED["qwen2.5-0.5b"], "use_sliding_window": True}
    with pytest.raises(ConfigError, match="chunked_attention"):
        parse_config({**raw, "layer_types": ["chunked_attention"] * 24})
    with pytest.raises(ConfigError, match="2 layers of 24"):
        parse_config({**raw, "layer_types": ["full_attention"] * 2})


def test_fields_left_out_mean_what_transformers_means() -> None:
    mixtral = {k: v for k, v in PUBLISHED["mixtral-8x7b"].items() if k != "rope_theta"}
    theirs = transformers.MixtralConfig(**deepcopy(mixtral))
    assert parse_config(mixtral).rope.theta == theirs.rope_parameters["rope_theta"] == 1e6
    qwen3 = {k: v for k, v in PUBLISHED["qwen3-8b"].items() if k != "head_dim"}
    qwen3["hidden_size"] = 2048
    assert (
        parse_config(qwen3).head_dim == transformers.Qwen3Config(**deepcopy(qwen3)).head_dim == 128
    )


def test_attention_bias_only_where_the_architecture_has_it() -> None:
    assert not parse_config({**PUBLISHED["mistral-7b-v0.3"], "attention_bias": True}).qkv_bias
