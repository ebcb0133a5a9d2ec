"""Small tensors of models: where they are read, and what becomes of those that are replaced."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from c2cserve.engine.models import rope
from c2cserve.engine.models.config import parse_config
from c2cserve.engine.models.decoder import ForwardBatch
from c2cserve.engine.models.placing import placed
from c2cserve.engine.models.rope import RopeTables

RAW: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 256,
    "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "head_dim": 128,
    "rms_norm_eps": 1e-6, "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}  # fmt: skip


def batch_of(*ids: int) -> ForwardBatch:
    nothing = torch.empty(0, dtype=torch.int32)
    return ForwardBatch(
        nothing, nothing, nothing, nothing, nothing,
        ids=torch.tensor(ids, dtype=torch.int32), logit_rows=nothing, longest=1,
    )  # fmt: skip


def test_tensors_of_the_host_stay_where_they_are() -> None:
    tensor = torch.ones(3)
    assert placed(tensor, None) is tensor
    assert placed(tensor, torch.device("cpu")) is tensor


def test_tokens_are_read_on_the_host_where_they_are_known() -> None:
    host = batch_of(3, 4)
    moved = replace(batch_of(3, 4), host=host)
    assert moved.ids_to_read is host.ids
    assert host.ids_to_read is host.ids
    chained = replace(batch_of(3, 9), host=batch_of(3, -1))
    assert chained.ids_to_read is chained.ids, "the host does not know a token that is sampled now"


def test_rotary_tables_that_launched_steps_read_are_released_before_they_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    released: list[Any] = []
    monkeypatch.setattr(rope, "release", released.append)
    tables = RopeTables(parse_config(RAW), 8192)
    first = tables.upto(2048)
    assert released == []
    longer = tables.upto(2049)
    assert [id(one) for one in released] == [id(one) for one in first]
    assert torch.equal(longer[0][:2048], first[0])
