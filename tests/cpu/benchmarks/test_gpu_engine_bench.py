"""The engine's benchmark without a GPU: every part runs on tiny models, its figures and its file
are complete, and counts are what the shapes say."""

import json
import time
from pathlib import Path

import gpu_engine_parts
import pytest
import torch
from fake_gpu import DEVICE, FakeMachine, PlainKernels
from gpu_engine import _arguments, measure
from gpu_engine_parts import PARTS, Run, buffer_bytes
from gpu_engine_run import BufferWeights, Engine, decode_batch
from gpu_models import SHAPES, attention_flops, config_of, raw_config, weight_bytes
from host_memory import grow_memory, memory_bytes

from c2cserve.engine.gpu import ops
from c2cserve.engine.models.decoder import run_to_end

pytestmark = pytest.mark.skipif(DEVICE.type != "cpu", reason="kernels are interpreted here")


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "PROMPT": 20, "LONG_PROMPT": 40, "CONTEXT": 18, "ROWS": (1, 3), "_SWITCH_MODELS": 3,
        "_SWITCHES": 10, "_ALIGNMENT": 4096,
    }.items():  # fmt: skip
        monkeypatch.setattr(gpu_engine_parts, name, value)
    torch.set_num_threads(1)


def test_shapes_are_as_large_as_published() -> None:
    """Parameters, from the models' own pages."""
    billions = {"llama-3b": 3.21, "llama-8b": 8.03, "qwen3-14b": 14.8, "qwen3-30b-a3b": 30.5}
    for shape, count in billions.items():
        assert weight_bytes(shape) / 2e9 == pytest.approx(count, rel=0.005)
    assert raw_config("llama-8b", 4)["num_hidden_layers"] == 4
    assert raw_config("llama-8b", 99)["num_hidden_layers"] == 32
    assert attention_flops(config_of("tiny-llama"), 2) == 2 * 4 * 4 * 16 * 3


@pytest.fixture
def plain_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "elementwise", PlainKernels)
    monkeypatch.setattr(ops, "attend", PlainKernels.attend)


@pytest.mark.usefixtures("plain_kernels")
def test_every_part_of_every_kind_of_model(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "engine.json"
    given = _arguments(["--shapes", "tiny-llama,tiny-moe", "--repeats", "1", "--out", str(out)])
    assert measure(FakeMachine(), given, time.monotonic()) == []
    results = json.loads(out.read_text())["results"]
    for shape in ("tiny-llama", "tiny-moe"):
        figures = results["shapes"][shape]["figures"]
        what = [row["what"] for row in figures]
        assert len(what) == len(set(what)) == 2 * 3 + 2 * 2 + 1 + 2 + 2 + 4
        assert all(row["seconds"] > 0 for row in figures)
        assert all(row["met"] == (row["ratio"] <= row["bar"]) for row in figures if "ratio" in row
                   and "bar" in row)  # fmt: skip
    assert "bars met" in capsys.readouterr().out


@pytest.mark.usefixtures("plain_kernels")
def test_a_part_that_fails_is_named_and_the_others_run(tmp_path: Path) -> None:
    out = tmp_path / "engine.json"
    given = _arguments(
        ["--shapes", "tiny-moe,tiny-llama", "--parts", "prefill", "--repeats", "1", "--out",
         str(out)]
    )  # fmt: skip
    now = time.monotonic()
    assert measure(FakeMachine(refuses_experts=True), given, now) == ["tiny-moe prefill"]
    results = json.loads(out.read_text())["results"]
    assert "no experts here" in results["failed"]["tiny-moe prefill"]
    assert len(results["shapes"]["tiny-llama"]["figures"]) == 1
    assert measure(FakeMachine(), given, now - 1e4) == ["tiny-moe prefill", "tiny-llama prefill"]
    assert "out of time" in json.loads(out.read_text())["results"]["failed"]["tiny-llama prefill"]


def test_counted_bytes_and_operations_are_the_shapes() -> None:
    machine = FakeMachine()
    engine = Engine(machine, machine.linear()[0])
    config = config_of("tiny-llama")
    engine.attach("a", config, machine.buffer("host", buffer_bytes(config)))
    run = Run(machine, "tiny-llama", None, machine.limits(0))
    prompt = run._counted(engine, engine.talk("a", 20))
    embedding = config.vocab * config.hidden * 2
    norms = (2 * config.layers + 1) * config.hidden * 2
    assert prompt.bytes == weight_bytes("tiny-llama") - embedding - norms
    head = config.vocab * config.hidden
    layers = (prompt.bytes / 2 - head) * 2 * 20
    assert prompt.flops == layers + 2 * head, "the head's product is of one row"


def test_of_experts_the_chosen_count() -> None:
    machine = FakeMachine()
    engine = Engine(machine, machine.linear()[0])
    config = config_of("tiny-moe")
    engine.attach("a", config, machine.buffer("host", buffer_bytes(config)))
    run = Run(machine, "tiny-moe", None, machine.limits(0))
    [talk] = engine.talk("a", 20)
    many = run._counted(engine, [talk])
    one = run._counted(engine, [talk])
    assert config.moe is not None
    expert = 3 * config.moe.intermediate * config.hidden * 2
    left_out = config.layers * (config.moe.experts - config.moe.per_token) * expert
    full = weight_bytes("tiny-moe")
    assert full - one.bytes > left_out
    assert one.bytes < many.bytes < full


def test_a_decode_batch_continues_what_steps_wrote() -> None:
    """The pass that is captured computes what a step computes: the same blocks, the same token."""
    machine = FakeMachine()
    engine = Engine(machine, machine.linear()[0])
    config = config_of("tiny-llama")
    decoder = engine.attach("a", config, machine.buffer("host", buffer_bytes(config)))
    talks = engine.talk("a", 18, 2)
    for talk in talks:
        engine.step([talk])
    batch = decode_batch(decoder.kv, 2, 19, machine.device)
    first = [engine.executor._seqs[talk].tokens[18] for talk in talks]
    batch.ids[:] = torch.tensor(first, dtype=torch.int32)
    logits = run_to_end(decoder.forward(batch, engine.ops, engine.arena))
    engine.step(talks)
    second = [engine.executor._seqs[talk].tokens[19] for talk in talks]
    assert logits.argmax(-1).tolist() == second


def test_models_overlap_in_a_buffer_and_end_in_it() -> None:
    config = config_of("tiny-llama")
    buffer = torch.zeros(buffer_bytes(config), dtype=torch.uint8)
    for offset in (0, 4096):
        weights = BufferWeights(config, buffer, offset)
        assert bool((weights.tensor("layers.1.post_norm") == 1).all())
        assert weights.missing([weights.group("head")]) == []
    with pytest.raises(ValueError, match="leaves its buffer"):
        BufferWeights(config, buffer, buffer.numel() // 2)


def test_unknown_shapes_and_parts_are_refused() -> None:
    for wrong in (["--shapes", "llama"], ["--parts", "streams"]):
        with pytest.raises(SystemExit):
            _arguments(wrong)
    assert _arguments([]).parts == list(PARTS)
    assert set(_arguments([]).shapes) <= set(SHAPES)


def test_memory_that_is_there_is_not_asked_for() -> None:
    assert grow_memory(1 << 20) > 1 << 20
    assert memory_bytes()["MemTotal"] >= memory_bytes()["MemAvailable"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has one")
def test_without_a_gpu_it_says_so() -> None:
    pytest.importorskip("cuda.bindings")
    from gpu_machine import Gpu, NoGpu

    with pytest.raises(NoGpu, match="sees no GPU"):
        Gpu(1 << 20)
