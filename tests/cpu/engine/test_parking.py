"""Cold models: steps that meet weights still loading wait for just those, and lose nothing."""

import threading
from pathlib import Path

import pytest
import torch
from lane import Lane, LateModel
from tiny import make_checkpoint
from torch import Tensor

from c2cserve.core.events import StepDone, StepFailed, StepParked
from c2cserve.engine.models.decoder import Decoder
from c2cserve.engine.models.layout import EMBED, HEAD, expert_group, layer_group
from c2cserve.engine.weights import Weights
from c2cserve.kernels.cpu_ops import CpuOps
from c2cserve.memory.loader import Loader, pread
from c2cserve.memory.segment import Segment, State

PROMPT = torch.randint(3, 160, (30,), generator=torch.Generator().manual_seed(3)).tolist()


def warm_tokens(checkpoint: Path, count: int) -> list[int]:
    lane = Lane()
    lane.attach("m", LateModel(checkpoint).load_all().decoder)
    lane.add("a", "m", PROMPT, count)
    lane.finish("a")
    return lane.tokens("a")


@pytest.mark.parametrize("case", ["llama", "qwen3-tied"])
def test_layers_are_waited_for_one_by_one(tmp_path: Path, case: str) -> None:
    make_checkpoint(tmp_path, case)
    want = warm_tokens(tmp_path, 3)
    model, lane = LateModel(tmp_path), Lane()
    lane.attach("m", model.decoder)
    lane.add("a", "m", PROMPT, 3)
    assert isinstance(lane.step(("a", 0, 30)), StepParked)
    for group in (layer_group(0), layer_group(1), layer_group(2), HEAD):
        assert lane.executor.poll().parked
        assert model.wanted == [group], "what the step needs next, and nothing else"
        lane.executor.poll()
        assert lane.deltas == []
        model.load([group])
        lane.executor.poll()
    parked, done = lane.events
    assert isinstance(parked, StepParked), "said once"
    assert isinstance(done, StepDone)
    assert done.step_id == parked.step_id
    assert not lane.executor.poll().parked
    lane.note(done)
    timing = lane.of("a")[0].timing
    assert timing is not None
    assert done.compute_s > 0
    assert timing.wait_weights_s >= 8, "a second passes at each poll"
    if case == "llama":
        assert not model.segment.ready(model.segment.group(EMBED)), "its rows came from the file"
        lane.step(("a", 30, 1))
        model.load([EMBED])
        lane.step(("a", 31, 1))
    else:
        lane.step(("a", 30, 1))
        lane.step(("a", 31, 1))
    assert lane.tokens("a") == want


@pytest.mark.parametrize("case", ["llama", "qwen3-tied"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_rows_from_the_file_are_the_table_s(tmp_path: Path, case: str, dtype: str) -> None:
    make_checkpoint(tmp_path, case, getattr(torch, dtype))
    model = LateModel(tmp_path)
    weights = Weights(model.segment)
    ids = torch.tensor([0, 159, 7, 7, 31], dtype=torch.int32)
    rows = weights.rows(EMBED, weights.group(EMBED if not model.config.tied else HEAD), ids)
    model.load_all()
    assert torch.equal(rows, CpuOps(1).embed(weights.tensor(EMBED), ids))


def test_other_models_run_while_a_step_is_parked(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    want = warm_tokens(tmp_path, 4)
    cold, lane = LateModel(tmp_path), Lane()
    lane.attach("cold", cold.decoder)
    lane.attach("warm", LateModel(tmp_path).load_all().decoder)
    lane.add("a", "cold", PROMPT, 4)
    lane.add("b", "warm", PROMPT, 4)
    cold.load([layer_group(0)])
    assert isinstance(lane.step(("a", 0, 30)), StepParked)
    lane.finish("b")
    assert lane.tokens("b") == want
    cold.load_all()
    lane.executor.poll()
    done = lane.events[-1]
    assert isinstance(done, StepDone)
    lane.note(done)
    for position in range(30, 33):
        lane.step(("a", position, 1))
    assert lane.tokens("a") == want


class Routing(CpuOps):
    """Notes which experts were chosen, call by call."""

    def __init__(self) -> None:
        super().__init__(1)
        self.chosen: list[set[int]] = []

    def moe_route(self, logits: Tensor, k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
        ids, weights = super().moe_route(logits, k, renormalize)
        self.chosen.append(set(ids.flatten().tolist()))
        return ids, weights


@pytest.mark.parametrize("case", ["mixtral", "qwen3-moe"])
def test_only_the_chosen_experts_are_waited_for(tmp_path: Path, case: str) -> None:
    make_checkpoint(tmp_path, case)
    prompt = PROMPT[:1]
    warm, ops = Lane(), Routing()
    warm.attach("m", LateModel(tmp_path).load_all().decoder)
    warm.add("a", "m", prompt, 1)
    warm.finish("a")
    model = LateModel(tmp_path)
    moe = model.config.moe
    assert moe is not None
    lane = Lane(ops)
    lane.attach("m", model.decoder)
    lane.add("a", "m", prompt, 1)
    model.load([*(layer_group(i) for i in range(3)), HEAD])
    assert isinstance(lane.step(("a", 0, 1)), StepParked)
    for layer in (i for i in range(3) if moe.sparse[i]):
        assert lane.executor.poll().parked
        assert len(ops.chosen[-1]) == moe.per_token
        names = [expert_group(layer, expert) for expert in sorted(ops.chosen[-1])]
        assert model.wanted == names
        model.load(names[:1])
        lane.executor.poll()
        assert model.wanted == names[1:]
        model.load(names[1:])
        lane.executor.poll()
    assert lane.tokens("a") == warm.tokens("a")
    ready = sum(model.segment.ready(i) for i in range(len(model.plan.groups)))
    assert ready == 4 + moe.per_token * sum(moe.sparse)


def test_a_load_that_fails_fails_what_waits_for_it(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    model, lane = LateModel(tmp_path), Lane()
    lane.attach("m", model.decoder)
    lane.add("a", "m", PROMPT, 3)
    model.load([layer_group(0)])
    assert isinstance(lane.step(("a", 0, 30)), StepParked)
    model.segment.state = State.FAILED
    lane.executor.poll()
    assert not lane.executor.poll().parked
    failed = lane.events[-1]
    assert isinstance(failed, StepFailed)
    assert "failed" in failed.reason


def test_first_token_comes_before_the_load_ends(tmp_path: Path) -> None:
    """With the pool's own loader, on a disk that keeps back the last group's bytes."""
    make_checkpoint(tmp_path, "llama")
    want = warm_tokens(tmp_path, 3)
    model = LateModel(tmp_path)
    table = model.sources["model.embed_tokens.weight"]
    held_back, reached = threading.Event(), threading.Event()

    def read(fd: int, buffer: memoryview, offset: int) -> int:
        if table.offset <= offset < table.offset + table.bytes:
            reached.set()
            held_back.wait(30)
        return pread(fd, buffer, offset)

    segment = Segment.create(tmp_path / "pooled", model.plan, model.sources)
    loader = Loader(segment, model.plan, model.sources, threads=1, read=read)
    lane = Lane()
    weights = Weights(Segment.open(tmp_path / "pooled"))
    lane.attach("m", Decoder(model.config, weights, 256))
    lane.add("a", "m", PROMPT, 3)
    assert isinstance(lane.step(("a", 0, 30)), StepParked)
    loading = threading.Thread(target=loader.run)
    loading.start()
    try:
        assert reached.wait(30)
        lane.executor.poll()
        assert lane.tokens("a") == want[:1]
        assert segment.state is State.LOADING
    finally:
        held_back.set()
        loading.join()
    done = lane.events[-1]
    assert isinstance(done, StepDone)
    lane.note(done)
    for position in (30, 31):
        lane.step(("a", position, 1))
    assert lane.tokens("a") == want
