"""The GPU's main job without a GPU: what it picks, writes and compares."""

import argparse
import json
import os
import subprocess
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import gpu_catalogue
import numpy as np
import pytest
from catalogue_client import TOLERANCE, Answer, Compared, Question, phases, question, rms
from catalogue_files import MIX, STRIDE, pick, write_catalogue
from catalogue_phases import Phases
from catalogue_server import sum_samples
from gpu_catalogue import _by_profile, _check_room
from gpu_models import config_of, weight_bytes
from tokenizers import Tokenizer

from c2cserve.catalog.file import load_catalog
from c2cserve.core.machine import Gpu
from c2cserve.engine.models.layout import EMBED, HEAD, plan_layout
from c2cserve.memory.checkpoint import TensorSource, find_files, open_checkpoint, read_header

ROOT = Path(__file__).parents[3]
TINY = (("tiny-llama", 2), ("tiny-tied", 1), ("tiny-moe", 1))


def test_a_pick_fills_the_memory_with_the_mix() -> None:
    made = pick(24, 90 << 30)
    assert Counter(entry.shape for entry in made.entries) == dict(MIX)
    assert made.bytes <= 90 << 30 < pick(24, 1 << 50, made.scale - 1).bytes
    assert len({entry.id for entry in made.entries}) == 24
    whole = pick(24, 1 << 50)
    assert (whole.scale, whole.shapes["llama-8b"]) == (1, 32)
    assert pick(24, 250 << 30).scale < made.scale
    assert {entry.shape for entry in pick(4, 1 << 50).entries} == {shape for shape, _ in MIX}
    assert len(pick(31, 1 << 50).entries) == 31
    assert sum(a.shape == b.shape for a, b in pairwise(made.entries)) <= 6


def test_what_can_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"do not fit 1\.1 GB at scale 48"):
        pick(24, 1 << 30)
    with pytest.raises(ValueError, match="at scale 2"):
        pick(24, 90 << 30, scale=2)
    with pytest.raises(ValueError, match="too few"):
        pick(3, 1 << 50)


def test_checkpoints_are_complete_and_no_two_models_are_alike(tmp_path: Path) -> None:
    made = pick(4, 1 << 30, mix=TINY)
    catalog = load_catalog(write_catalogue(tmp_path, made))
    assert [entry["id"] for entry in catalog.raw] == [entry.id for entry in made.entries]
    own: dict[str, list[bytes]] = {}
    gains: dict[str, list[float]] = {}
    for entry in made.entries:
        directory, config = tmp_path / "models" / entry.id, config_of(entry.shape, entry.layers)
        names = frozenset(name for file in find_files(directory) for name in read_header(file))
        plan = plan_layout(config, names)
        sources = open_checkpoint(directory, plan)
        last = f"model.layers.{config.layers - 1}.mlp."
        [down] = [n for n in sources if n.startswith(last) and n.endswith("down_proj.weight")][:1]
        own.setdefault(entry.shape, []).append(_raw(sources[down]).tobytes())
        assert np.isfinite(_numbers(sources["model.layers.0.self_attn.q_proj.weight"])).all()
        assert (_numbers(sources["model.layers.0.input_layernorm.weight"]) == 1).all()
        [gain] = set(_numbers(sources["model.norm.weight"]).tolist())
        gains.setdefault(entry.shape, []).append(gain)
        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        assert tokenizer.decode([7, config.vocab - 1]) == f" 7 {config.vocab - 1}"
    assert all(len(set(some)) == len(some) for some in own.values())
    assert len(own["tiny-llama"]) == 2
    assert gains["tiny-llama"] == [0.625, 0.875]
    assert all(one == [0.75] for shape, one in gains.items() if shape != "tiny-llama")
    assert (tmp_path / "models" / "tiny-llama.1" / "model-00001-of-00002.safetensors").is_symlink()


def test_the_head_follows_the_embedding(tmp_path: Path) -> None:
    """Row t + STRIDE of the head is row t of the table, so the likeliest token is known."""
    made = pick(3, 1 << 30, mix=TINY)
    write_catalogue(tmp_path, made)
    config = config_of("tiny-llama")
    plan = plan_layout(config)
    sources = open_checkpoint(tmp_path / "models" / "tiny-llama.1", plan)
    table, head = (
        _numbers(sources[part.source])
        for target in (EMBED, HEAD)
        for group in plan.groups
        for part in group.parts
        if part.target == target
    )
    assert (head[STRIDE:] == table[:-STRIDE]).all()
    assert len({row.tobytes() for row in table}) == config.vocab


def _raw(source: TensorSource) -> np.ndarray:
    with source.path.open("rb") as file:
        file.seek(source.offset)
        return np.frombuffer(file.read(source.bytes), np.uint16)


def _numbers(source: TensorSource) -> np.ndarray:
    wide = _raw(source).astype(np.uint32) << 16
    return wide.view(np.float32).reshape(source.shape)


def test_checkpoints_need_room_beside_the_pool(tmp_path: Path) -> None:
    made = pick(4, 1 << 30, mix=TINY)
    room = _check_room(tmp_path, tmp_path, made)
    assert room > made.bytes + sum(weight_bytes(shape) for shape in made.shapes)
    free = os.statvfs(tmp_path)
    huge = pick(24, 1 << 50, scale=1, mix=(("qwen3-30b-a3b", 1),))
    if free.f_bavail * free.f_frsize < huge.bytes:
        with pytest.raises(ValueError, match="name another folder"):
            _check_room(tmp_path, tmp_path, huge)


ASKED = Question("a", "s", (1, 2), 3)


def answer(text: str, *logprobs: float) -> Answer:
    return Answer(ASKED, text, list(logprobs), [0.1 * (i + 1) for i in range(len(logprobs))])


def test_only_the_same_text_with_the_same_probabilities_is_right() -> None:
    compared, alone = Compared(), answer(" 1 2 3", -1.0, -2.0, -0.5)
    compared.add(answer(" 1 2 3", -1.0, -2.0, -0.5), alone)
    compared.add(answer(" 1 2", -1.0, -2.0), alone)
    compared.add(answer(" 1 2 3", -1.0, -2.0, -0.51), alone)
    assert (compared.answers, compared.equal, compared.bit_equal) == (3, 3, 2)
    compared.add(answer(" 1 2 4", -1.0, -2.0, -0.5), alone)
    compared.add(answer(" 1 2 3", -1.0, -2.0, -0.5 - 3 * TOLERANCE), alone)
    compared.add(answer(" 1 2 3", -1.0, -2.0, float("nan")), alone)
    assert (compared.answers, compared.equal, len(compared.wrong)) == (6, 3, 3)
    assert compared.wrong[0]["alone"] == "1 2 3"
    assert json.loads(json.dumps(compared.summary()))["equal"] == 3


def test_differences_of_unlike_lists_are_infinite() -> None:
    assert rms([3.0, 0.0], [0.0, 4.0]) == pytest.approx((25 / 2) ** 0.5)
    assert rms([1.0], [1.0, 2.0]) == rms([], []) == float("inf")


def test_questions_repeat_and_differ_by_model_and_salt() -> None:
    one = question("a", "s", 512, 6, 2, "x")
    assert one == question("a", "s", 512, 6, 2, "x")
    assert len({one.prompt, question("b", "s", 512, 6, 2, "x").prompt}) == 2
    assert one.prompt != question("a", "s", 512, 6, 2, "y").prompt


def test_phases_of_answers() -> None:
    first, second = answer(" 1 2", -1.0, -1.0), answer(" 1", -1.0)
    first.switched, first.switch_s, first.queue_s = True, 0.01, 0.02
    found = phases([first, second])
    assert (found["answers"], found["switched"]) == (2, 1)
    assert found["switch_s"]["p99"] == 0.01
    assert found["first_step_s"]["p50"] == pytest.approx((0.07 + 0.1) / 2)
    assert found["tpot_s"]["p50"] == pytest.approx(0.1)
    assert "tpot_s" not in phases([second])


def test_shuffled_turns_never_ask_the_same_model_twice_in_a_row() -> None:
    given = argparse.Namespace(short=4, long=8, tokens=2, rounds=1)
    made = pick(4, 1 << 30, mix=TINY)
    asked = Phases(None, made, given, 0.0, {}, lambda: None)
    questions, turns = asked._questions()[0], list[Question]()
    for _ in range(50):
        turns += asked._shuffled(questions, turns[-1].model if turns else "")
    assert all(a.model != b.model for a, b in pairwise(turns))


class FakeServer:
    url = "http://127.0.0.1:9"

    def metrics(self) -> dict[str, float]:
        return {"asked_total": 1.0}

    def memory(self) -> dict[str, int]:
        return {"own_bytes": 1, "available_bytes": 1}


async def test_phases_without_time_or_server_are_named_and_the_rest_is_kept() -> None:
    given = argparse.Namespace(
        short=4, long=8, tokens=2, rounds=1, switches=5, at_once=2, kill=True
    )  # fmt: skip
    made, kept = pick(4, 1 << 30, mix=TINY), 0

    def keep() -> None:
        nonlocal kept
        kept += 1

    for until_s, reason in ((0.0, "out of time: 0 of 8"), (time.monotonic() + 60, "ClientConn")):
        results: dict[str, Any] = {"failed": {}}
        server: Any = FakeServer()
        await Phases(server, made, given, until_s, results, keep).run()
        assert {"interleaved", "alone", "switches", "together", "kill"} <= set(results["failed"])
        assert reason in results["failed"]["interleaved"]
        assert results["phases"]["together"]["compared"]["answers"] == 0
        assert results["memory"]["flat"]
    assert kept > 8


def test_samples_are_summed_over_labels_without_buckets() -> None:
    text = """# TYPE x histogram
x_bucket{le="1",model_name="a"} 3
x_count{model_name="a"} 3
x_count{model_name="b"} 4
c2cserve:y_total 1.5e+03
z NaN
"""
    found = sum_samples(text)
    assert {name: found[name] for name in ("x_count", "c2cserve:y_total")} == {
        "x_count": 7.0, "c2cserve:y_total": 1500.0,
    }  # fmt: skip
    assert "x_bucket" not in found


def test_test_gpu_goes_on_after_a_failure_and_says_so_in_the_end(tmp_path: Path) -> None:
    script, environment = str(ROOT / "scripts" / "test-gpu"), {**os.environ, "PYTHON": "false"}
    command = [script, "--only", "tests,engine,catalogue", "--quick", "--out", str(tmp_path)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env=environment
    )
    assert done.returncode == 1
    assert "failed: tests_gemm tests_engine tests_server engine catalogue" in done.stderr
    parts = [json.loads(path.read_text()) for path in tmp_path.glob("verdict_*.json")]
    assert len(parts) == 5
    assert all(part["exit"] for part in parts)
    for wrong in (["--only", "test"], ["--quck"]):
        refused = subprocess.run(
            [script, *wrong], capture_output=True, text=True, timeout=60, check=False
        )
        assert refused.returncode == 2


def test_without_a_profile_the_server_is_told_and_the_results_say_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("C2CSERVE_HOME", str(tmp_path))
    results: dict[str, Any] = {}
    monkeypatch.setattr(gpu_catalogue, "usable_gpus", lambda: (Gpu(0, "uuid", "NVIDIA X", 1),))
    given = ["--gpu-slices", "16x7"]
    assert _by_profile(given, results) == [*given, "--gpu-profile", "assumed"]
    assert "nothing was measured" in results["picked_by"]
    assert _by_profile(["--gpu-profile", "measured"], results) == ["--gpu-profile", "measured"]
    monkeypatch.setattr(gpu_catalogue, "usable_gpus", tuple)
    assert _by_profile([], results) == []
