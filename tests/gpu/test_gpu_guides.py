"""Grammars on a real GPU: masks come after the layers are launched, and no text changes by that."""

import re
import time
from pathlib import Path

import pytest
from engine_case import LateModel, make
from gpu_engine_case import OTHER, PROMPT, folder, gpu, segments
from gpu_policy_loop import Loop

from c2cserve.core.request import Grammar, Sampling
from c2cserve.engine.gpu.segments import PinnedSegments
from c2cserve.engine.gpu.setup import GpuParts
from c2cserve.grammars import write
from c2cserve.grammars.table import read_table, write_table

__all__ = ["folder", "gpu", "segments"]

pytestmark = pytest.mark.gpu

PATTERN = "[a-f]{30}[0-9]{2}"
ENDS = (2,)


@pytest.fixture
def grammar(tmp_path: Path) -> Grammar:
    singles = [bytes([one]) for one in b"abcdefghijklmnopqrstuvwxyz0123456789"]
    pairs = [a + b for a in singles for b in singles]
    table = write_table(str(tmp_path / "run"), [b""] * 3 + (singles + pairs)[:157])
    return Grammar(write.grammar_of(write.regex(PATTERN)), table, ENDS)


@pytest.mark.parametrize("heat", [0.0, 1.5])
@pytest.mark.parametrize("case", ["llama", "qwen3-moe"])
def test_masks_hold_in_steps_that_are_launched_ahead(
    gpu: GpuParts, segments: PinnedSegments, folder: Path, grammar: Grammar, case: str, heat: float
) -> None:
    """Two requests with a grammar beside two without: one step at a time, then two."""
    make(folder, case)
    model = LateModel(folder, 1024, device=gpu.device, open_=segments.open).load_all()
    held = Sampling(seed=3, temperature=heat, stop_token_ids=ENDS, grammar=grammar)
    scored = Sampling(seed=3, temperature=heat, stop_token_ids=ENDS, grammar=grammar, logprobs=2)
    answers: list[list[list[int]]] = []
    for at_a_time in (1, 2):
        loop = Loop(gpu, model, at_a_time)
        loop.submit("held", PROMPT[:40], 60, held)
        loop.submit("free", OTHER[:30], 40, Sampling(seed=1, temperature=heat))
        loop.finish("held", "free")
        if at_a_time == 2:
            assert loop.ahead > 10, "a grammar holds up no step"
        loop.submit("scored", PROMPT[:20], 60, scored)  # the CPU samples it, and it is waited for
        loop.finish("scored")
        names = ("held", "free", "scored")
        answers.append([loop.tokens(name) for name in names])
    assert answers[0] == answers[1]
    table = read_table(grammar.tokens)
    for tokens in (answers[0][0], answers[0][2]):
        assert re.fullmatch(PATTERN, b"".join(table[token] for token in tokens).decode())
    gpu.finish()
    segments.close(model.path)


def test_a_full_batch_of_grammars(
    gpu: GpuParts, segments: PinnedSegments, folder: Path, grammar: Grammar
) -> None:
    """Prints what a step takes with and without; it is a matter of the model's size, so no limit
    is asserted (benchmarks/structured.py measures a real model)."""
    make(folder, "llama")
    model = LateModel(folder, 1024, device=gpu.device, open_=segments.open).load_all()
    took_s: dict[str, float] = {}
    for name, one in (("free", None), ("held", grammar)):
        loop = Loop(gpu, model, 2)
        names = [f"{name}{i}" for i in range(32)]
        for i, request in enumerate(names):
            how = Sampling(seed=i, temperature=1.0, stop_token_ids=ENDS if one else (), grammar=one)
            loop.submit(request, PROMPT[i : i + 16], 32, how)
        begun_s = time.monotonic()
        loop.finish(*names)
        took_s[name] = time.monotonic() - begun_s
        assert all(len(loop.tokens(request)) > 16 for request in names)
    print({name: f"{seconds / 32 * 1e3:.2f} ms a step" for name, seconds in took_s.items()})  # noqa: T201
    gpu.finish()
    segments.close(model.path)
